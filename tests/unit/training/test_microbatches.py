import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.errors import ConfigError
from grpo_lib.training.microbatches import Sequences, bins, micro_batch, scatter_rows

FEW = settings(deadline=None, max_examples=50)


def ragged(rows: list[list[int]]) -> Ragged:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    values = torch.tensor([value for row in rows for value in row], dtype=torch.int32)
    return Ragged(values=values, offsets=lengths_to_offsets(lengths))


TWO = Sequences(prompts=ragged([[7, 8, 9], [5]]), responses=ragged([[1, 2], [3, 4, 6]]))


@FEW
@given(lengths=st.lists(st.integers(1, 30), max_size=40), spare=st.integers(0, 200))
def test_every_row_is_in_one_bin_and_no_bin_is_above_the_budget(lengths: list[int], spare: int) -> None:
    budget = max(lengths, default=1) + spare
    cuts = bins(torch.tensor(lengths, dtype=torch.int64), budget)
    assert sorted(row for cut in cuts for row in cut.tolist()) == list(range(len(lengths)))
    assert all(len(cut) > 0 for cut in cuts)
    for cut in cuts:
        assert len(cut) * max(lengths[row] for row in cut.tolist()) <= budget


def test_bins_hold_the_longest_rows_first_and_as_many_as_fit() -> None:
    cuts = bins(torch.tensor([2, 9, 3, 9, 1]), 18)
    assert [cut.tolist() for cut in cuts] == [[1, 3], [2, 0, 4]]


def test_a_budget_of_the_longest_row_is_enough() -> None:
    assert [cut.tolist() for cut in bins(torch.tensor([4, 5]), 5)] == [[1], [0]]


def test_no_rows_make_no_bins() -> None:
    assert bins(torch.tensor([], dtype=torch.int64), 10) == []


def test_a_row_longer_than_the_budget_names_both_and_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"a row of 31 tokens does not fit into trainer\.max_tokens=30; raise it"):
        bins(torch.tensor([3, 31, 7]), 30)


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
    batch = micro_batch(sequences, torch.arange(len(rows)))
    assert torch.equal(batch.input_ids.flatten()[batch.predicts + 1], batch.targets)
    assert batch.targets.tolist() == [token for _, response in rows for token in response]
    width = batch.input_ids.shape[1]
    for row, (prompt, response) in enumerate(rows):
        assert batch.input_ids[row].tolist() == prompt + response + [0] * (width - len(prompt) - len(response))
        assert batch.predicts[batch.offsets[row]] == row * width + len(prompt) - 1


@FEW
@given(rows=st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=8), data=st.data())
def test_results_of_micro_batches_come_back_in_row_order(rows: list[list[int]], data: st.DataObject) -> None:
    table = ragged(rows)
    order = torch.tensor(data.draw(st.permutations(range(len(rows)))))
    cut = data.draw(st.integers(0, len(rows)))
    parts = [(picked, table.gather(picked)) for picked in (order[:cut], order[cut:])]
    back = scatter_rows(parts, len(rows))
    assert torch.equal(back.values, table.values) and torch.equal(back.offsets, table.offsets)


def test_a_row_without_a_result_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="every row belongs to one micro-batch"):
        scatter_rows([(torch.tensor([0]), ragged([[1]]))], 2)
