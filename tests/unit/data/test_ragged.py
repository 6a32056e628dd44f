import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.data.ragged import Ragged, concat_rows, group_statistics, lengths_to_offsets, repeat_rows, segment_sum

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
