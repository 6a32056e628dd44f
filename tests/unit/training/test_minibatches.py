"""How an iteration is cut into mini-batches, and what is drawn for their tokens."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lib.data.ragged import Ragged
from grpo_lib.training.minibatches import mini_batches, token_draws
from tests.unit.training.trainers import BATCHING

# --- mini-batches -----------------------------------------------------------------------------------------------------


def full(group_ids: Tensor) -> Ragged:
    """A mask of one valid token a row."""
    return Ragged(values=torch.ones(len(group_ids), dtype=torch.uint8), offsets=torch.arange(len(group_ids) + 1))


@settings(deadline=None, max_examples=50)
@given(
    group_ids=st.lists(st.integers(-3, 6), min_size=1, max_size=30),
    size=st.none() | st.integers(1, 10),
    seed=st.integers(0, 2**62),
)
def test_mini_batches_are_whole_groups_and_hold_every_row_once(
    group_ids: list[int], size: int | None, seed: int
) -> None:
    ids = torch.tensor(group_ids)
    batches = mini_batches(full(ids), ids, replace(BATCHING, mini_batch_groups=size, seed=seed), 0)
    assert sorted(row for rows in batches for row in rows.tolist()) == list(range(len(group_ids)))
    groups = [{group_ids[row] for row in rows.tolist()} for rows in batches]
    assert sum(map(len, groups)) == len(set(group_ids))  # no group is in two of them
    assert all(len(each) == (size or len(set(group_ids))) for each in groups[:-1]) and groups[-1]


@settings(deadline=None, max_examples=50)
@given(
    rows=st.lists(st.tuples(st.integers(-3, 6), st.booleans(), st.booleans()), min_size=1, max_size=30),
    size=st.integers(1, 4),
)
def test_groups_without_a_token_left_are_in_no_mini_batch(rows: list[tuple[int, bool, bool]], size: int) -> None:
    """So that every optimizer step is made of ``size`` groups that say something."""
    ids = torch.tensor([group for group, _, _ in rows])
    tokens = torch.tensor([[first, second] for _, first, second in rows], dtype=torch.uint8)
    mask = Ragged(values=tokens.flatten(), offsets=2 * torch.arange(len(rows) + 1))
    alive = {group for group, first, second in rows if first or second}
    batches = mini_batches(mask, ids, replace(BATCHING, mini_batch_groups=size), 0)
    if not alive:
        assert [each.tolist() for each in batches] == [list(range(len(rows)))]  # a step is made all the same
        return
    groups = [{int(ids[row]) for row in each} for each in batches]
    assert set.union(*groups) == alive
    assert [len(each) for each in groups[:-1]] == [size] * (len(batches) - 1) and len(groups[-1]) <= size
    # A group is whole: rows without a token belong to it too.
    assert sorted(int(row) for each in batches for row in each) == [i for i, row in enumerate(rows) if row[0] in alive]


def test_the_shuffle_follows_from_seed_and_epoch_alone() -> None:
    group_ids = torch.arange(40) // 2

    def order(seed: int, epoch: int) -> list[list[int]]:
        batching = replace(BATCHING, mini_batch_groups=3, seed=seed)
        return [rows.tolist() for rows in mini_batches(full(group_ids), group_ids, batching, epoch)]

    first = order(0, 0)
    torch.manual_seed(99)
    assert order(0, 0) == first
    assert order(0, 1) != first and order(1, 0) != first and order(0, 1) != order(1, 0)


def test_draws_belong_to_the_token_of_a_row_wherever_it_stands() -> None:
    offsets, seeds = torch.tensor([0, 3, 4, 9]), torch.tensor([11, 12, 13])
    draws = Ragged(values=token_draws(seeds, offsets, 5), offsets=offsets)
    order = torch.tensor([2, 0, 2, 1])
    moved = draws.gather(order)
    assert torch.equal(token_draws(seeds[order], moved.offsets, 5), moved.values)
    longer = token_draws(seeds, torch.tensor([0, 5, 6, 11]), 5)
    assert torch.equal(longer[:3], draws.values[:3])  # of the position, not of the length
    assert bool(((draws.values >= 0) & (draws.values < 1)).all()) and len(set(draws.values.tolist())) == 9
    assert not bool((token_draws(seeds, offsets, 6) == draws.values).any())
