"""The gradient of a mini-batch does not depend on how it is cut into micro-batches, on the order of rows, or on what
stands in masked tokens: for every loss with every aggregation."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.losses import LOSSES, value_loss
from grpo_lib.algorithms.registry import call
from tests.unit.algorithms.loss_references import NAMES, OPTIONS, Batch, bound, random_batch, select

FEW = settings(deadline=None, max_examples=5)
LONGEST = 16
EVERY_LOSS = pytest.mark.parametrize("name", NAMES)
EVERY_AGGREGATION = pytest.mark.parametrize("aggregation", AGGREGATIONS.names())

batches = st.builds(
    random_batch,
    seed=st.integers(0, 100_000),
    lengths=st.lists(st.integers(0, 8), min_size=1, max_size=9),
    extreme=st.sampled_from([1.0, 50.0]),
)


def prepared(name: str, batch: Batch, aggregation: str) -> Batch:
    """With what is known of the whole mini-batch before its first backward pass: weights and selected tokens."""
    weights = AGGREGATIONS[aggregation].function(batch.mask, batch.offsets, LONGEST)
    return replace(select(name, batch, OPTIONS.get(name, {})), weights=weights)


def per_token(name: str, batch: Batch) -> Tensor:
    """The terms of the valid tokens."""
    valid = batch.valid()
    terms: Tensor = valid.weights * call(bound(name, OPTIONS.get(name, {})), valid).values
    return terms


def total_and_gradient(name: str, batch: Batch, split: list[list[int]] | None = None) -> tuple[float, Tensor]:
    """Summed over the micro-batches of ``split``; without it over one of all rows."""
    batch = batch.with_gradient()
    total = 0.0
    for rows in split if split is not None else [list(range(batch.rows))]:
        part = per_token(name, batch.take(rows)).sum()
        part.backward()
        total += part.item()
    assert batch.logprobs.grad is not None
    return total, batch.logprobs.grad


def assert_same(name: str, batch: Batch, one: tuple[float, Tensor], other: tuple[float, Tensor]) -> None:
    largest = float(per_token(name, batch).abs().sum())  # what rounding of the sum is relative to
    assert other[0] == pytest.approx(one[0], rel=1e-10, abs=1e-10 * max(1.0, largest))
    torch.testing.assert_close(other[1], one[1], rtol=1e-10, atol=1e-10)


@EVERY_LOSS
@EVERY_AGGREGATION
@FEW
@given(batch=batches, data=st.data())
def test_any_split_into_micro_batches_in_any_order_gives_the_same_loss_and_gradient(
    name: str, aggregation: str, batch: Batch, data: st.DataObject
) -> None:
    batch = prepared(name, batch, aggregation)
    whole = total_and_gradient(name, batch)
    order = data.draw(st.permutations(range(batch.rows)))
    cuts = sorted(data.draw(st.sets(st.integers(1, batch.rows), max_size=4)) | {0, batch.rows})
    split = [order[a:b] for a, b in itertools.pairwise(cuts)]
    assert_same(name, batch, whole, total_and_gradient(name, batch, split))


@EVERY_LOSS
@FEW
@given(batch=batches, data=st.data())
def test_the_order_of_rows_does_not_matter(name: str, batch: Batch, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(batch.rows)))
    for aggregation in AGGREGATIONS.names():
        there, moved = prepared(name, batch, aggregation), prepared(name, batch.take(order), aggregation)
        assert torch.equal(moved.selected, there.take(order).selected)
        loss, gradient = total_and_gradient(name, there)
        expected = loss, gradient[batch.tokens_of(order)]
        assert_same(name, moved, expected, total_and_gradient(name, moved))


@EVERY_LOSS
@FEW
@given(batch=batches, seed=st.integers(0, 1000))
def test_what_stands_in_a_masked_token_changes_nothing(name: str, batch: Batch, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    odd = torch.tensor([math.nan, math.inf, -math.inf, 1e308, -1e308, 0.0], dtype=torch.float64)
    columns = ("logprobs", "old_logprobs", "advantages", "draws")
    chosen = odd[torch.randint(0, len(odd), (len(columns), len(batch.mask)), generator=generator)]
    poison = {
        column: torch.where(batch.mask, getattr(batch, column), each)
        for column, each in zip(columns, chosen, strict=True)
    }
    for aggregation in AGGREGATIONS.names():
        clean = prepared(name, batch, aggregation)
        dirty = prepared(name, replace(batch, **poison), aggregation)
        assert torch.equal(clean.selected, dirty.selected)
        loss, gradient = total_and_gradient(name, clean)
        other_loss, other_gradient = total_and_gradient(name, dirty)
        assert other_loss == loss and torch.equal(other_gradient, gradient)
        assert not gradient[~batch.mask].any()


@EVERY_AGGREGATION
@FEW
@given(batch=batches, data=st.data())
def test_the_value_loss_does_not_depend_on_the_split_either(
    aggregation: str, batch: Batch, data: st.DataObject
) -> None:
    part_of_row = data.draw(st.lists(st.integers(0, 3), min_size=batch.rows, max_size=batch.rows))
    split = [[row for row, own in enumerate(part_of_row) if own == part] for part in range(4)]

    def gradient(parts: list[list[int]]) -> Tensor:
        whole = prepared("ppo_clip", batch, aggregation).with_gradient()
        for rows in parts:
            part = whole.take(rows).valid()
            loss = value_loss(part.logprobs, part.old_logprobs, part.advantages, clip=0.2)
            (part.weights * loss).sum().backward()
        assert whole.logprobs.grad is not None
        return whole.logprobs.grad

    torch.testing.assert_close(gradient(split), gradient([list(range(batch.rows))]), rtol=1e-10, atol=1e-12)


@EVERY_LOSS
@EVERY_AGGREGATION
def test_a_mini_batch_without_a_valid_token_has_loss_and_gradient_0(name: str, aggregation: str) -> None:
    batch = random_batch(0, lengths=[2, 0, 3])
    batch = prepared(name, replace(batch, mask=torch.zeros_like(batch.mask)), aggregation)
    loss, gradient = total_and_gradient(name, batch, [[0], [1, 2]])
    assert loss == 0.0 and gradient.tolist() == [0.0] * 5


def three_rows() -> Batch:
    """Rows of 4, 1 and 1 tokens at the old policy, advantages 1, 1 and -2."""
    lp = torch.full((6,), -1.0, dtype=torch.float64)
    every = torch.ones(6, dtype=torch.bool)
    advantages = torch.tensor([1.0] * 5 + [-2.0], dtype=torch.float64)
    return Batch(torch.tensor([0, 4, 5, 6]), every, lp, lp, advantages, ~every, lp, lp)


@pytest.mark.parametrize(
    ("aggregation", "right", "wrong"),
    [
        # Token 0 of the long row: one of 6 tokens; in its micro-batch one of 4, and there are two micro-batches.
        ("token-mean", [-1 / 6] * 5 + [1 / 3], [-1 / 8] * 4 + [-1 / 4, 1 / 2]),
        # One of 3 rows; in its micro-batch the only row, so it counts for as much as the two others together.
        ("seq-mean-token-mean", [-1 / 12] * 4 + [-1 / 3, 2 / 3], [-1 / 8] * 4 + [-1 / 4, 1 / 2]),
        ("seq-mean-token-sum", [-1 / 3] * 5 + [2 / 3], [-1 / 2] * 4 + [-1 / 4, 1 / 2]),
    ],
)
def test_averaging_the_means_of_micro_batches_gives_another_gradient(
    aggregation: str, right: list[float], wrong: list[float]
) -> None:
    batch, split = three_rows(), [[0], [1, 2]]
    _, gradient = total_and_gradient("ppo_clip", prepared("ppo_clip", batch, aggregation), split)
    assert gradient.tolist() == pytest.approx(right, rel=1e-14)
    averaged = []
    for rows in split:  # the trap: every micro-batch divides by its own denominator
        _, own = total_and_gradient("ppo_clip", prepared("ppo_clip", batch.take(rows), aggregation))
        averaged += (own / len(split)).tolist()
    assert averaged == pytest.approx(wrong, rel=1e-14)


def test_choosing_tokens_in_each_micro_batch_would_choose_others() -> None:
    helper = LOSSES["kl_cov"].bind_helper({"kl_cov_ratio": 0.5}, "test")
    assert helper is not None
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64)
    advantages = torch.tensor([2.0, 2.0, 0.0, 0.0], dtype=torch.float64)
    whole = call(helper, SimpleNamespace(logprobs=logprobs, advantages=advantages))
    assert whole.tolist() == [True, False, False, True]  # covariances 1.5, 0.5, 0.5, 1.5
    halves = [call(helper, SimpleNamespace(logprobs=logprobs[h], advantages=advantages[h])) for h in ([0, 1], [2, 3])]
    assert torch.cat(halves).tolist() == [True] * 4  # 0 everywhere: within a half the advantage is constant
