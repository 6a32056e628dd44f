import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.errors import ConfigError
from grpo_lib.training.microbatches import Layout, Sequences, micro_batch, plan, plan_sequences

FEW = settings(deadline=None, max_examples=50)


def ragged(rows: list[list[int]]) -> Ragged:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    values = torch.tensor([value for row in rows for value in row], dtype=torch.int32)
    return Ragged(values=values, offsets=lengths_to_offsets(lengths))


TWO = Sequences(prompts=ragged([[7, 8, 9], [5]]), responses=ragged([[1, 2], [3, 4, 6]]))


LENGTHS = st.lists(st.integers(1, 30), max_size=40)
LAYOUTS: list[Layout] = ["padded", "packed"]


def cost(lengths: Tensor, rows: Tensor, layout: Layout) -> int:
    """Tokens that the model computes."""
    chosen = lengths[rows]
    return int(chosen.sum() if layout == "packed" else chosen.max() * len(rows)) if len(rows) else 0


@FEW
@given(
    lengths=LENGTHS, spare=st.integers(0, 200), ranks=st.integers(1, 4), layout=st.sampled_from(["padded", "packed"])
)
def test_every_row_is_in_one_bin_and_no_bin_is_above_the_budget(
    lengths: list[int], spare: int, ranks: int, layout: Layout
) -> None:
    budget, tokens = max(lengths, default=1) + spare, torch.tensor(lengths, dtype=torch.int64)
    planned = plan(tokens, budget, layout, ranks)
    bins = [rows for steps in planned for rows in steps]
    assert sorted(row for rows in bins for row in rows.tolist()) == list(range(len(lengths)))
    assert all(cost(tokens, rows, layout) <= budget for rows in bins)
    assert [[rows.tolist() for rows in steps] for steps in planned] == [
        [rows.tolist() for rows in steps] for steps in plan(tokens, budget, layout, ranks)
    ]


@FEW
@given(
    lengths=LENGTHS, spare=st.integers(0, 200), ranks=st.integers(1, 4), layout=st.sampled_from(["padded", "packed"])
)
def test_all_ranks_take_as_many_steps_and_only_the_last_one_may_lack_rows(
    lengths: list[int], spare: int, ranks: int, layout: Layout
) -> None:
    planned = plan(torch.tensor(lengths, dtype=torch.int64), max(lengths, default=1) + spare, layout, ranks)
    assert len(planned) == ranks
    assert len({len(steps) for steps in planned}) == 1
    assert all(len(rows) > 0 for steps in planned for rows in steps[:-1])
    if len(lengths) % ranks == 0 or len(lengths) > ranks * len(planned[0]):
        assert all(len(rows) > 0 for steps in planned for rows in steps)


@FEW
@given(lengths=LENGTHS.filter(len), spare=st.integers(0, 200), ranks=st.integers(2, 4))
def test_packed_bins_differ_by_at_most_the_longest_row(lengths: list[int], spare: int, ranks: int) -> None:
    tokens = torch.tensor(lengths)
    costs = [cost(tokens, r, "packed") for steps in plan(tokens, max(lengths) + spare, "packed", ranks) for r in steps]
    assert max(costs) - min(costs) <= max(lengths)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ranks_of_a_step_have_about_the_same_work(layout: Layout, ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    lengths = (4.0 + torch.randn(500, generator=generator)).exp().long().clamp(2, 800)
    planned = plan(lengths, 4096, layout, ranks)
    slowest = sum(max(cost(lengths, rows, layout) for rows in step) for step in zip(*planned, strict=True))
    work = sum(cost(lengths, rows, layout) for steps in planned for rows in steps)
    assert slowest * ranks < 1.15 * work


def test_rectangles_hold_the_longest_rows_first_and_as_many_as_fit() -> None:
    (steps,) = plan(torch.tensor([2, 9, 3, 9, 1]), 18, "padded")
    assert [rows.tolist() for rows in steps] == [[1, 3], [2, 0, 4]]


def test_a_budget_of_the_longest_row_is_enough() -> None:
    assert [rows.tolist() for rows in plan(torch.tensor([4, 5]), 5, "padded")[0]] == [[1], [0]]
    assert [rows.tolist() for rows in plan(torch.tensor([4, 5]), 5, "packed")[0]] == [[1], [0]]


def test_rectangles_of_several_ranks_are_as_small_as_their_number_allows() -> None:
    planned = plan(torch.full((9,), 10), 80, "padded", ranks=2)  # 8 + 1 rows would fit
    assert [[len(rows) for rows in steps] for steps in planned] == [[5], [4]]


def test_rectangles_are_split_until_every_rank_has_one() -> None:
    planned = plan(torch.tensor([50, 2, 2, 2, 2]), 50, "padded", ranks=3)  # a smaller budget can't hold the first
    assert [[rows.tolist() for rows in steps] for steps in planned] == [[[0]], [[1, 2]], [[3, 4]]]


def test_packed_rows_are_dealt_to_and_fro() -> None:
    planned = plan(torch.tensor([1, 2, 3, 4, 5, 6]), 11, "packed", ranks=2)
    assert [[rows.tolist() for rows in steps] for steps in planned] == [[[5, 2, 1]], [[4, 3, 0]]]


def test_rows_that_do_not_fit_two_to_a_bin_get_one_each() -> None:
    (steps,) = plan(torch.full((300,), 51), 100, "packed")
    assert [len(rows) for rows in steps] == [1] * 300


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_without_rows_get_empty_steps(layout: Layout) -> None:
    planned = plan(torch.tensor([3, 5]), 10, layout, ranks=4)
    assert [[rows.tolist() for rows in steps] for steps in planned] == [[[1]], [[0]], [[]], [[]]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rows_make_no_steps(layout: Layout) -> None:
    assert plan(torch.tensor([], dtype=torch.int64), 10, layout, ranks=2) == [[], []]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_longer_than_the_budget_names_both_and_the_remedy(layout: Layout) -> None:
    with pytest.raises(ConfigError, match=r"a row of 31 tokens does not fit into trainer\.max_tokens=30; raise it"):
        plan(torch.tensor([3, 31, 7]), 30, layout)


def test_packed_rows_stand_one_after_another_each_from_position_0() -> None:
    batch = micro_batch(TWO, torch.tensor([1, 0]), "packed")
    assert batch.input_ids.tolist() == [[5, 3, 4, 6, 7, 8, 9, 1, 2]]
    assert batch.position_ids is not None and batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4]]
    assert batch.row_offsets is not None and batch.row_offsets.tolist() == [0, 4, 9]
    assert batch.row_offsets.dtype == torch.int32
    assert batch.predicts.tolist() == [0, 1, 2, 6, 7]
    assert batch.targets.tolist() == [3, 4, 6, 1, 2]
    assert batch.offsets.tolist() == [0, 3, 5]


def test_a_shared_prompt_stands_once_before_its_responses() -> None:
    rows = Sequences(
        prompts=ragged([[9], [7, 8], [5]]), responses=ragged([[1, 2], [3], [4], [6, 6]]),
        prompt_of=torch.tensor([1, 2, 1, 2]),
    )  # fmt: skip
    batch = micro_batch(rows, torch.tensor([3, 0, 1, 2]), "packed")
    assert batch.rows.tolist() == [3, 1, 0, 2]  # neighbours of a prompt
    assert batch.input_ids.tolist() == [[5, 6, 6, 3, 7, 8, 1, 2, 4]]
    assert batch.position_ids is not None and batch.position_ids.tolist() == [[0, 1, 2, 1, 0, 1, 2, 3, 2]]
    assert batch.row_offsets is not None and batch.row_offsets.tolist() == [0, 3, 5, 9, 12]
    assert batch.row_tokens is not None and batch.row_tokens.tolist() == [0, 1, 2, 0, 3, 4, 5, 6, 7, 4, 5, 8]
    assert batch.predicts.tolist() == [0, 1, 0, 5, 6, 5]
    assert batch.targets.tolist() == [6, 6, 3, 1, 2, 4]
    assert batch.offsets.tolist() == [0, 2, 3, 5, 6]
    assert (batch.tokens, batch.computed, batch.longest) == (9, 9, 4)
    # Prompts of 1 and 2 tokens see themselves once.
    assert batch.squares == (3**2 + 2**2 - 1**2) + (4**2 + 3**2 - 2**2)
    padded = micro_batch(rows, torch.tensor([3, 0]))
    assert padded.input_ids.tolist() == [[5, 6, 6, 0], [7, 8, 1, 2]]


def test_responses_of_a_prompt_stay_together_as_far_as_they_fit() -> None:
    lengths = [4, 4, 4, 4, 30, 2, 2]
    rows = Sequences(
        prompts=ragged([[1] * 10, [1] * 3]), responses=ragged([[2] * each for each in lengths]),
        prompt_of=torch.tensor([0, 0, 0, 0, 1, 1, 1]),
    )  # fmt: skip
    (steps,) = plan_sequences(rows, 64, "packed")
    assert [sorted(each.tolist()) for each in steps] == [[0, 1, 2, 3, 4, 5, 6]]  # 26 + 37
    (steps,) = plan_sequences(rows, 40, "packed")
    assert [sorted(each.tolist()) for each in steps] == [[4, 5, 6], [0, 1, 2, 3]]
    (steps,) = plan_sequences(rows, 34, "packed")
    assert [sorted(each.tolist()) for each in steps] == [[4], [0, 1, 2, 3, 5, 6]]  # 33 and 26 + 7
    planned = plan_sequences(rows, 64, "packed", ranks=2)
    assert all(len(each) > 0 for steps in planned for each in steps)
    with pytest.raises(ConfigError, match=r"a row of 33 tokens does not fit into trainer\.max_tokens=32"):
        plan_sequences(rows, 32, "packed")


@FEW
@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    rows=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=40),
    spare=st.integers(0, 100),
    ranks=st.integers(1, 3),
    left_out=st.integers(0, 10),
)
def test_shared_prompts_keep_to_the_budget_and_every_row_comes_once(
    prompts: list[int], rows: list[tuple[int, int]], spare: int, ranks: int, left_out: int
) -> None:
    rows = [(prompt % len(prompts), length) for prompt, length in rows]
    budget = max([prompts[prompt] + length for prompt, length in rows], default=1) + spare
    sequences = Sequences(
        prompts=ragged([[1] * each for each in prompts]),
        responses=ragged([[2] * length for _, length in rows]),
        prompt_of=torch.tensor([prompt for prompt, _ in rows], dtype=torch.int64),
    )
    wanted = torch.arange(len(rows))[left_out:]
    planned = plan_sequences(sequences, budget, "packed", ranks, wanted)
    assert len({len(steps) for steps in planned}) == 1
    assert sorted(row for steps in planned for step in steps for row in step.tolist()) == wanted.tolist()
    for step in (step for steps in planned for step in steps if len(step)):
        batch = micro_batch(sequences, step, "packed")
        assert batch.tokens <= budget
        assert batch.row_offsets is not None and int(batch.row_offsets[-1]) <= 4 * budget


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize(
    ("prompt", "shortest", "longest", "most", "saved"),
    [(100, 1900, 2300, 1.0, 0.005), (300, 500, 4000, 1.1, 0.03), (200, 100, 400, 1.0, 0.3), (4000, 100, 400, 0.4, 0.8)],
)
def test_sharing_prompts_saves_tokens_and_takes_hardly_more_micro_batches(
    prompt: int, shortest: int, longest: int, most: float, saved: float, ranks: int
) -> None:
    lengths = torch.randint(shortest, longest, (512,), generator=torch.Generator().manual_seed(0))
    sequences = Sequences(
        prompts=ragged([[1] * prompt] * 64),
        responses=Ragged(
            values=torch.zeros(int(lengths.sum()), dtype=torch.int32), offsets=lengths_to_offsets(lengths)
        ),
        prompt_of=torch.arange(512) // 8,
    )
    alone = plan(sequences.lengths, 16_384, "packed", ranks)
    planned = plan_sequences(sequences, 16_384, "packed", ranks)
    assert len(planned[0]) <= most * len(alone[0])
    tokens = sum(micro_batch(sequences, step, "packed").tokens for steps in planned for step in steps)
    assert tokens <= (1 - saved) * int(sequences.lengths.sum())


@pytest.mark.parametrize("budget", [10, 12, 40])
def test_rows_without_tokens_are_planned_too(budget: int) -> None:
    sequences = Sequences(
        prompts=ragged([[1] * 10, [1] * 3]), responses=ragged([[], [], [2, 2]]), prompt_of=torch.tensor([0, 0, 1])
    )
    (planned,) = plan_sequences(sequences, budget, "packed")
    assert sorted(torch.cat(planned).tolist()) == [0, 1, 2]
    assert all(micro_batch(sequences, step, "packed").tokens <= budget for step in planned)


def test_a_micro_batch_knows_its_tokens_with_and_without_padding() -> None:
    padded, packed = (micro_batch(TWO, torch.tensor([0, 1]), layout) for layout in LAYOUTS)
    assert (padded.longest, padded.tokens, padded.computed) == (5, 9, 10)
    assert (packed.longest, packed.tokens, packed.computed) == (5, 9, 9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rows_make_one_token_that_predicts_nothing(layout: Layout) -> None:
    batch = micro_batch(TWO, torch.tensor([], dtype=torch.int64), layout)
    assert batch.input_ids.tolist() == [[0]]
    assert (len(batch.predicts), len(batch.targets), batch.offsets.tolist()) == (0, 0, [0])
    assert (batch.tokens, batch.computed) == (0, 1)
    if layout == "packed":
        assert batch.row_offsets is not None and batch.row_offsets.tolist() == [0, 1]


def test_the_first_response_token_is_predicted_at_the_last_prompt_position() -> None:
    batch = micro_batch(TWO, torch.tensor([0, 1]))
    assert batch.input_ids.tolist() == [[7, 8, 9, 1, 2], [5, 3, 4, 6, 0]]
    # Row 0: 9 -> 1, 1 -> 2. Row 1 begins at position 5: 5 -> 3, 3 -> 4, 4 -> 6.
    assert batch.predicts.tolist() == [2, 3, 5, 6, 7]
    assert batch.targets.tolist() == [1, 2, 3, 4, 6]
    assert batch.offsets.tolist() == [0, 2, 5]
    assert (batch.input_ids.dtype, batch.targets.dtype) == (torch.int64, torch.int64)


def test_rows_come_in_the_order_they_are_asked_for() -> None:
    batch = micro_batch(TWO, torch.tensor([1, 0]))
    assert batch.input_ids.tolist() == [[5, 3, 4, 6, 0], [7, 8, 9, 1, 2]]
    assert batch.predicts.tolist() == [0, 1, 2, 7, 8]
    assert batch.targets.tolist() == [3, 4, 6, 1, 2]
    assert batch.rows.tolist() == [1, 0]


def test_a_rectangle_is_as_wide_as_its_own_longest_row() -> None:
    assert micro_batch(TWO, torch.tensor([1])).input_ids.tolist() == [[5, 3, 4, 6]]


@FEW
@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), min_size=1, max_size=5), st.lists(st.integers(0, 9), min_size=1, max_size=5)
        ),
        min_size=1,
        max_size=6,
    )
)
def test_each_target_stands_right_after_the_position_that_predicts_it(
    rows: list[tuple[list[int], list[int]]],
) -> None:
    sequences = Sequences(prompts=ragged([prompt for prompt, _ in rows]), responses=ragged([r for _, r in rows]))
    for layout in LAYOUTS:
        batch = micro_batch(sequences, torch.arange(len(rows)), layout)
        assert torch.equal(batch.input_ids.flatten()[batch.predicts + 1], batch.targets)
    batch = micro_batch(sequences, torch.arange(len(rows)))
    assert batch.targets.tolist() == [token for _, response in rows for token in response]
    width = batch.input_ids.shape[1]
    for row, (prompt, response) in enumerate(rows):
        assert batch.input_ids[row].tolist() == prompt + response + [0] * (width - len(prompt) - len(response))
        assert batch.predicts[batch.offsets[row]] == row * width + len(prompt) - 1


@pytest.mark.parametrize(
    ("lengths", "budget", "most"),
    [
        ([1024] + 200 * [60], 1024, 14),  # one row as long as a bin: the others fill 12
        ([1000] + 511 * [10], 1000, 7),
        ([1024] * 5 + 500 * [60], 2048, 18),
        (100 * [600] + 100 * [424], 1024, 100),
    ],
)
def test_long_rows_do_not_keep_packed_bins_from_being_filled(lengths: list[int], budget: int, most: int) -> None:
    (steps,) = plan(torch.tensor(lengths), budget, "packed")
    assert len(steps) <= most


@FEW
@given(lengths=LENGTHS.filter(len), spare=st.integers(0, 200))
def test_packed_bins_are_at_most_a_third_more_than_any_packing_needs(lengths: list[int], spare: int) -> None:
    budget = max(lengths) + spare
    (steps,) = plan(torch.tensor(lengths), budget, "packed")
    assert len(steps) <= 1 + 4 * max(-(-sum(lengths) // budget), sum(2 * each > budget for each in lengths)) // 3
