import itertools
import math
import random
import statistics
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lib.data import ragged as ragged_module
from grpo_lib.data.ragged import (
    BLOCK_TOKENS,
    Ragged,
    concat_rows,
    dense_groups,
    from_padded,
    group_max,
    group_statistics,
    group_sum,
    kept_offsets,
    lengths_to_offsets,
    repeat_rows,
    reverse_scan,
    row_blocks,
    segment_max,
    segment_mean,
    segment_std,
    segment_sum,
    to_padded,
)

FEW = settings(deadline=None, max_examples=40)
tables = st.lists(st.lists(st.integers(-100, 100), max_size=5), max_size=7)


def ragged(rows: list[list[int]]) -> Ragged:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    values = torch.tensor([value for row in rows for value in row], dtype=torch.int64)
    return Ragged(values=values, offsets=lengths_to_offsets(lengths))


def lists(rows: Ragged) -> list[list[int]]:
    starts = rows.offsets.tolist()
    return [rows.values[a:b].tolist() for a, b in itertools.pairwise(starts)]


def test_lengths_become_offsets() -> None:
    assert lengths_to_offsets(torch.tensor([2, 0, 3])).tolist() == [0, 2, 2, 5]
    assert lengths_to_offsets(torch.tensor([], dtype=torch.int64)).tolist() == [0]


def test_rows_lengths_and_row_ids_follow_from_the_offsets() -> None:
    rows = ragged([[5, 6], [], [7]])
    assert (rows.rows, rows.lengths.tolist(), rows.row_ids().tolist()) == (3, [2, 0, 1], [0, 0, 2])


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 4]])
def test_offsets_that_do_not_cover_the_values_are_a_bug(offsets: list[int]) -> None:
    with pytest.raises(AssertionError, match="offsets"):
        Ragged(values=torch.zeros(3), offsets=torch.tensor(offsets))


def test_offsets_of_another_type_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        Ragged(values=torch.zeros(3), offsets=torch.tensor([0, 3], dtype=torch.int32))


def test_one_value_a_row_is_repeated_at_each_of_its_tokens() -> None:
    assert repeat_rows(torch.tensor([1.5, 2.5, 3.5]), torch.tensor([0, 2, 2, 3])).tolist() == [1.5, 1.5, 3.5]


def test_the_sum_of_an_empty_row_is_0_and_the_gradient_is_1_a_token() -> None:
    values = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    sums = segment_sum(values, torch.tensor([0, 2, 2, 3]))
    assert sums.tolist() == [3.0, 0.0, 4.0]
    (sums * torch.tensor([10.0, 20.0, 30.0])).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [10.0, 10.0, 30.0]


@FEW
@given(rows=tables.filter(len), data=st.data())
def test_gather_takes_rows_in_any_order_and_more_than_once(rows: list[list[int]], data: st.DataObject) -> None:
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10))
    gathered = ragged(rows).gather(torch.tensor(picked, dtype=torch.int64))
    assert lists(gathered) == [rows[index] for index in picked]


@FEW
@given(pairs=st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(0, 9), max_size=4))))
def test_concat_puts_the_second_after_the_first_in_every_row(pairs: list[tuple[list[int], list[int]]]) -> None:
    joined = concat_rows(ragged([a for a, _ in pairs]), ragged([b for _, b in pairs]))
    assert lists(joined) == [a + b for a, b in pairs]


@FEW
@given(rows=tables)
def test_segment_sum_is_the_sum_of_each_row(rows: list[list[int]]) -> None:
    table = ragged(rows)
    assert segment_sum(table.values, table.offsets).tolist() == [sum(row) for row in rows]


def test_group_statistics_by_hand() -> None:
    values = torch.tensor([1.0, 5.0, 3.0, 7.0, 2.0, 7.0])
    statistics = group_statistics(values, torch.tensor([4, -1, 4, 0, 4, 0]))
    assert statistics.size.tolist() == [3, 1, 3, 2, 3, 2]
    assert statistics.mean.tolist() == [2.0, 5.0, 2.0, 7.0, 2.0, 7.0]
    assert statistics.std.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert statistics.constant.tolist() == [False, True, False, True, False, True]
    assert (statistics.mean.dtype, statistics.std.dtype) == (torch.float64, torch.float64)


def test_the_standard_deviation_keeps_its_digits_far_from_0() -> None:
    statistics = group_statistics(torch.tensor([1e8, 1e8 + 1], dtype=torch.float64), torch.tensor([0, 0]))
    assert statistics.std.tolist() == pytest.approx([math.sqrt(0.5)] * 2, rel=1e-12)


# ------------------------------------------------------------------------------------------------ sums of each row

SEGMENTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[list[float]], float]]] = {
    "sum": (segment_sum, math.fsum),
    "mean": (segment_mean, lambda row: math.fsum(row) / len(row) if row else 0.0),
    "std": (segment_std, lambda row: statistics.stdev(row) if len(row) > 1 else 0.0),
    "max": (segment_max, lambda row: max(row, default=-math.inf)),
}
segments = pytest.mark.parametrize("name", SEGMENTS)
EMPTY_ROWS = [
    [],
    [[]],
    [[], [], []],
    [[], [1.5, -2.0], [4.0]],
    [[1.5, -2.0], [], [], [4.0, 4.0, 7.0]],
    [[1.5, -2.0], [4.0], [], []],
    [[], [-3.0], [], [0.5, 0.25, -8.0, 0.5], []],
]


def numbers(rows: list[list[float]]) -> Ragged:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return Ragged(
        values=torch.tensor(list(itertools.chain(*rows)), dtype=torch.float64), offsets=lengths_to_offsets(lengths)
    )


@segments
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("rows", EMPTY_ROWS)
def test_empty_rows_have_a_value_wherever_they_stand(name: str, rows: list[list[float]], gradient: bool) -> None:
    table, (function, of_row) = numbers(rows), SEGMENTS[name]
    result = function(table.values.requires_grad_(gradient), table.offsets)
    assert result.tolist() == pytest.approx([of_row(row) for row in rows], rel=1e-12)


@segments
@FEW
@given(rows=st.lists(st.lists(st.floats(-1e6, 1e6, width=32), max_size=5), max_size=7))
def test_segments_with_and_without_gradient_are_those_of_a_loop(name: str, rows: list[list[float]]) -> None:
    table, (function, of_row) = numbers(rows), SEGMENTS[name]
    without = function(table.values, table.offsets)
    with_gradient = function(table.values.clone().requires_grad_(), table.offsets)
    torch.testing.assert_close(without, with_gradient.detach(), rtol=1e-12, atol=1e-9)
    assert without.tolist() == pytest.approx([of_row(row) for row in rows], rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("name", ["sum", "mean", "max"])
@pytest.mark.parametrize("gradient", [False, True])
def test_segments_keep_float32(name: str, gradient: bool) -> None:
    values = torch.tensor([1.0, 2.0], requires_grad=gradient)
    assert SEGMENTS[name][0](values, torch.tensor([0, 2])).dtype == torch.float32


def test_the_standard_deviation_of_a_row_keeps_its_digits_far_from_0() -> None:
    result = segment_std(torch.tensor([1e8, 1e8 + 1, 5.0], dtype=torch.float64), torch.tensor([0, 2, 3]))
    assert result.tolist() == pytest.approx([math.sqrt(0.5), 0.0], rel=1e-12)


@pytest.mark.parametrize("function", [segment_sum, segment_mean])
def test_gradients_of_segments_are_right(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    values = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    offsets = torch.tensor([0, 0, 2, 2, 5, 6, 6])
    assert torch.autograd.gradcheck(lambda values: function(values, offsets), (values,))


def test_the_gradient_of_repeated_rows_is_right() -> None:
    values = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    offsets = torch.tensor([0, 0, 3, 4, 4])
    assert torch.autograd.gradcheck(lambda values: repeat_rows(values, offsets), (values,))
    assert torch.equal(repeat_rows(values, offsets).detach(), repeat_rows(values.detach(), offsets))


def test_the_largest_and_smallest_of_a_row_carry_no_gradient() -> None:
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    for function in (segment_max,):
        assert not function(values, torch.tensor([0, 2])).requires_grad


@segments
@pytest.mark.parametrize("gradient", [False, True])
def test_segments_leave_their_values_as_they_were(name: str, gradient: bool) -> None:
    values = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64, requires_grad=gradient)
    SEGMENTS[name][0](values, torch.tensor([0, 1, 3]))
    assert values.tolist() == [3.0, 1.0, 2.0]


# ---------------------------------------------------------------------------------------------- scans, row by row


def scanned(values: list[float], offsets: list[int], decay: float) -> list[float]:
    result = [0.0] * len(values)
    for start, stop in itertools.pairwise(offsets):
        running = 0.0
        for t in reversed(range(start, stop)):
            running = values[t] + decay * running
            result[t] = running
    return result


def test_a_scan_by_hand() -> None:
    # 1 + 0.5 (2 + 0.5 * 4), 2 + 0.5 * 4, 4 | | 8 | 16 + 0.5 * 32, 32
    values, offsets = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]), torch.tensor([0, 3, 3, 4, 6])
    result = reverse_scan(values, offsets, 0.5)
    assert (result.tolist(), result.dtype) == ([3.0, 4.0, 4.0, 8.0, 32.0, 32.0], torch.float64)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99, 1.0])
@FEW
@given(
    lengths=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 300)), max_size=9),
    block=st.sampled_from([1, 2, 7, 64, BLOCK_TOKENS]),
    seed=st.integers(0, 2**32),
)
def test_a_scan_is_that_of_a_loop_in_blocks_of_any_size(
    decay: float, lengths: list[int], block: int, seed: int
) -> None:
    rng = random.Random(seed)
    values = [rng.gauss(0, 1) for _ in range(sum(lengths))]
    offsets = lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged_module, "row_blocks", partial(row_blocks, tokens=block))
        result = reverse_scan(torch.tensor(values, dtype=torch.float64), offsets, decay)
    assert result.tolist() == pytest.approx(scanned(values, offsets.tolist(), decay), rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("decay", [0.99, 1.0])
def test_a_scan_crosses_blocks_as_they_are(decay: float) -> None:
    # Three blocks: many rows; one that is longer than a block; the rest.
    lengths = [1000, 0, 3] * 130 + [BLOCK_TOKENS + 5] + [70, 0]
    generator = torch.Generator().manual_seed(2)
    offsets = lengths_to_offsets(torch.tensor(lengths))
    assert len(list(row_blocks(offsets))) == 3
    values = torch.rand(int(offsets[-1]), dtype=torch.float64, generator=generator)
    wanted = torch.tensor(scanned(values.tolist(), offsets.tolist(), decay), dtype=torch.float64)
    torch.testing.assert_close(reverse_scan(values, offsets, decay), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scan_leaves_its_values_as_they_were(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 2.0, 4.0], dtype=dtype)
    assert reverse_scan(values, torch.tensor([0, 3]), 1.0).tolist() == [7.0, 6.0, 4.0]
    assert values.tolist() == [1.0, 2.0, 4.0]


def test_a_scan_of_one_row_never_reaches_another() -> None:
    values = torch.tensor([math.nan, math.inf, 1.0, 2.0, math.nan], dtype=torch.float64)
    result = reverse_scan(values, torch.tensor([0, 2, 4, 5]), 1.0)
    assert result[2:4].tolist() == [3.0, 2.0]


def test_a_scan_of_nothing_is_nothing() -> None:
    for offsets in ([0], [0, 0], [0, 0, 0]):
        assert reverse_scan(torch.tensor([]), torch.tensor(offsets), 1.0).tolist() == []


@FEW
@given(lengths=st.lists(st.integers(0, 12), max_size=20), tokens=st.integers(1, 30))
def test_blocks_hold_every_row_once_and_as_many_as_fit(lengths: list[int], tokens: int) -> None:
    blocks = [
        (each.start, each.stop)
        for each in row_blocks(lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64)), tokens)
    ]
    assert [row for start, stop in blocks for row in range(start, stop)] == list(range(len(lengths)))
    for start, stop in blocks:
        assert stop == start + 1 or sum(lengths[start:stop]) <= tokens
        assert stop == len(lengths) or sum(lengths[start : stop + 1]) > tokens  # the next one did not fit


# ----------------------------------------------------------------------------------------- masks, padding, groups


@FEW
@given(rows=st.lists(st.lists(st.booleans(), max_size=6), max_size=7))
def test_kept_offsets_are_those_of_the_values_that_stay(rows: list[list[bool]]) -> None:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    mask = torch.tensor(list(itertools.chain(*rows)), dtype=torch.bool)
    offsets = lengths_to_offsets(lengths)
    kept = Ragged(values=torch.arange(len(mask))[mask], offsets=kept_offsets(mask, offsets))
    starts = offsets.tolist()
    assert lists(kept) == [
        [start + t for t, taken in enumerate(row) if taken] for start, row in zip(starts, rows, strict=False)
    ]


@pytest.mark.parametrize("side", ["left", "right", "both"])
@FEW
@given(rows=tables)
def test_rows_come_back_from_any_padding(side: str, rows: list[list[int]]) -> None:
    table = ragged(rows)
    width = max(map(len, rows), default=0) + 2
    before = {"left": lambda row: width - len(row), "right": lambda row: 0, "both": lambda row: (width - len(row)) // 2}
    values, mask = torch.full((len(rows), width), -999), torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        start = before[side](row)
        values[i, start : start + len(row)] = torch.tensor(row, dtype=torch.int64)
        mask[i, start : start + len(row)] = 1
    back = from_padded(values, mask)
    assert lists(back) == rows and torch.equal(back.offsets, table.offsets)


@FEW
@given(rows=tables)
def test_padding_and_back_is_nothing(rows: list[list[int]]) -> None:
    padded, mask = to_padded(ragged(rows), fill=-999)
    assert padded.shape == mask.shape == (len(rows), max(map(len, rows), default=0))
    assert bool((padded[~mask] == -999).all())
    assert padded.tolist() == [row + [-999] * (padded.shape[1] - len(row)) for row in rows]
    assert lists(from_padded(padded, mask)) == rows


def test_the_gradient_goes_through_padding() -> None:
    values = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    offsets = torch.tensor([0, 0, 2, 3])
    assert torch.autograd.gradcheck(lambda values: to_padded(Ragged(values=values, offsets=offsets))[0], (values,))


def test_values_and_mask_of_other_shapes_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="differ in shape"):
        from_padded(torch.zeros(2, 3), torch.zeros(2, 2))


GAPS = [
    [0, 0, 1, 2],
    [0, 2, 2, 5],
    [-7, -5, -7, 0],
    [-(2**62), 2**62, 5, -(2**62)],
    [10**12, 10**12 + 1, 10**12, 10**12 + 3],
    [3],
]


@pytest.mark.parametrize("ids", GAPS)
def test_groups_are_numbered_from_0_whatever_their_names(ids: list[int]) -> None:
    group, groups = dense_groups(torch.tensor(ids))
    assert group.dtype == torch.int64 and group.shape == (len(ids),)
    assert int(group.min()) >= 0 and int(group.max()) < groups <= 4 * len(ids)
    for (a, x), (b, y) in itertools.combinations(zip(ids, group.tolist(), strict=True), 2):
        assert (a == b) == (x == y)


def test_no_rows_are_no_groups() -> None:
    group, groups = dense_groups(torch.tensor([], dtype=torch.int64))
    assert (group.tolist(), groups) == ([], 0)
    assert group_statistics(torch.tensor([]), torch.tensor([], dtype=torch.int64)).mean.tolist() == []


def test_groups_without_rows_have_sum_0_and_no_largest() -> None:
    group, groups = dense_groups(torch.tensor([5, 8, 5]))
    values = torch.tensor([1.0, -2.0, 4.0])
    assert (groups, group_sum(values, group, groups).tolist()) == (4, [5.0, 0.0, 0.0, -2.0])
    assert group_max(values, group, groups).tolist() == [4.0, -math.inf, -math.inf, -2.0]


@FEW
@given(
    rows=st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 4)), min_size=1, max_size=20),
    names=st.lists(st.integers(-(2**61), 2**61), min_size=5, max_size=5, unique=True),
)
def test_group_statistics_are_those_of_a_loop_whatever_the_names(
    rows: list[tuple[float, int]], names: list[int]
) -> None:
    values = torch.tensor([value for value, _ in rows], dtype=torch.float64)
    near = group_statistics(values, torch.tensor([group for _, group in rows]))
    far = group_statistics(values, torch.tensor([names[group] for _, group in rows]))
    for field in ("size", "mean", "std", "constant"):
        torch.testing.assert_close(getattr(near, field), getattr(far, field), rtol=1e-12, atol=1e-9)
    for i, (_, group) in enumerate(rows):
        theirs = [value for value, other in rows if other == group]
        assert int(near.size[i]) == len(theirs)
        assert float(near.mean[i]) == pytest.approx(statistics.fmean(theirs), rel=1e-12, abs=1e-9)
        assert float(near.std[i]) == pytest.approx(statistics.stdev(theirs) if len(theirs) > 1 else 0, abs=1e-6)
        assert bool(near.constant[i]) == (len(set(theirs)) == 1)
