"""The whole objective on random ragged batches, against the formulas written row by row in plain Python."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lib.algorithms.advantages import grpo
from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.kl import k3
from grpo_lib.algorithms.losses import ppo_clip
from grpo_lib.data.ragged import lengths_to_offsets, repeat_rows

FEW = settings(deadline=None, max_examples=15)
LOW, HIGH, DUAL, KL_COEF, LONGEST = 0.2, 0.28, 3.0, 0.05, 40
EVERY_AGGREGATION = pytest.mark.parametrize("aggregation", AGGREGATIONS.names())


@dataclass
class Batch:
    offsets: Tensor
    mask: Tensor
    logprobs: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    """One a row."""


def random_batch(seed: int, rows: int = 12) -> Batch:
    """Groups of different size, rows of one token, rows without a valid token, log-ratios up to +-50."""
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int, scale: float) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64) * scale

    lengths = torch.randint(1, 12, (rows,), generator=generator)
    lengths[0] = 1
    offsets = lengths_to_offsets(lengths)
    tokens = int(offsets[-1])
    mask = (torch.rand(tokens, generator=generator) < 0.8).to(torch.uint8)
    mask[offsets[1] : offsets[2]] = 0
    old = normal(tokens, 1.0) - 4
    logprobs = old + normal(tokens, 0.4)
    logprobs[torch.randint(0, tokens, (4,), generator=generator)] += 50
    logprobs[torch.randint(0, tokens, (4,), generator=generator)] -= 50
    rewards = torch.randint(0, 3, (rows,), generator=generator) / 2
    group_ids = torch.randint(0, 4, (rows,), generator=generator)
    group_ids[-1] = 99  # a group of one
    rewards[group_ids == group_ids[2]] = 0.5  # a group of equal rewards
    return Batch(offsets, mask, logprobs, old, logprobs + normal(tokens, 1.0), grpo(rewards, group_ids))


def objective(batch: Batch, aggregation: str, logprobs: Tensor) -> Tensor:
    """What is summed, token by token."""
    weights = AGGREGATIONS[aggregation].function(batch.mask, batch.offsets, LONGEST)
    advantages = repeat_rows(batch.advantages, batch.offsets)
    loss = ppo_clip(logprobs, batch.old, advantages, clip_low=LOW, clip_high=HIGH, dual_clip=DUAL)
    return weights * (loss.values + KL_COEF * k3(logprobs, batch.ref))


def token_by_formula(lp: float, old: float, ref: float, advantage: float) -> tuple[float, float]:
    """Loss of one token and its derivative by ``lp``."""
    rho = math.exp(max(-20.0, min(20.0, lp - old)))
    loss, slope = -advantage * rho, -advantage * rho if -20 <= lp - old <= 20 else 0.0
    clipped = -advantage * max(1 - LOW, min(1 + HIGH, rho))
    if clipped > loss:
        loss, slope = clipped, 0.0
    if advantage < 0 and loss > -advantage * DUAL:
        loss, slope = -advantage * DUAL, 0.0
    d = max(-20.0, min(20.0, ref - lp))
    kl = math.expm1(d) - d
    kl_slope = 1 - math.exp(d) if -20 <= ref - lp <= 20 and kl <= 10 else 0.0
    return loss + KL_COEF * min(10.0, kl), slope + KL_COEF * kl_slope


def by_formula(batch: Batch, aggregation: str) -> tuple[float, list[float]]:
    """The scalar and its gradient, a row at a time."""
    starts = batch.offsets.tolist()
    valid = [sum(batch.mask[a:b].tolist()) for a, b in itertools.pairwise(starts)]
    rows_that_count = sum(count > 0 for count in valid)
    total, gradient = [], []
    for row, (a, b) in enumerate(itertools.pairwise(starts)):
        for token in range(a, b):
            if not batch.mask[token]:
                gradient.append(0.0)
                continue
            share = {
                "token-mean": 1 / sum(valid),
                "token-sum": 1.0,
                "seq-mean-token-mean": 1 / valid[row] / rows_that_count,
                "seq-mean-token-sum": 1 / rows_that_count,
                "seq-mean-token-sum-norm": 1 / rows_that_count / LONGEST,
            }[aggregation]
            columns = (batch.logprobs, batch.old, batch.ref)
            lp, old, ref = (column[token].item() for column in columns)
            loss, slope = token_by_formula(lp, old, ref, batch.advantages[row].item())
            total.append(share * loss)
            gradient.append(share * slope)
    return math.fsum(total), gradient


@EVERY_AGGREGATION
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_agree_with_the_formulas_row_by_row(aggregation: str, seed: int) -> None:
    batch = random_batch(seed)
    logprobs = batch.logprobs.clone().requires_grad_()
    loss = objective(batch, aggregation, logprobs).sum()
    loss.backward()
    expected, gradient = by_formula(batch, aggregation)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(gradient, rel=1e-12, abs=1e-15)
    assert logprobs.grad.abs().max() > 0


@EVERY_AGGREGATION
@FEW
@given(seed=st.integers(0, 10_000), data=st.data())
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(
    aggregation: str, seed: int, data: st.DataObject
) -> None:
    batch = random_batch(seed)
    whole = batch.logprobs.clone().requires_grad_()
    loss = objective(batch, aggregation, whole).sum()
    loss.backward()

    rows = len(batch.offsets) - 1
    part_of_row = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows)))
    part_of_token = repeat_rows(part_of_row, batch.offsets)
    weights = AGGREGATIONS[aggregation].function(batch.mask, batch.offsets, LONGEST)
    advantages = repeat_rows(batch.advantages, batch.offsets)
    split = batch.logprobs.clone().requires_grad_()
    total = 0.0
    for part in data.draw(st.permutations(range(5))):
        chosen = part_of_token == part
        part_loss = ppo_clip(
            split[chosen], batch.old[chosen], advantages[chosen], clip_low=LOW, clip_high=HIGH, dual_clip=DUAL
        )
        value = (weights[chosen] * (part_loss.values + KL_COEF * k3(split[chosen], batch.ref[chosen]))).sum()
        value.backward()
        total += value.item()
    assert total == pytest.approx(loss.item(), rel=1e-10, abs=1e-10)
    torch.testing.assert_close(split.grad, whole.grad, rtol=1e-10, atol=1e-10)


@EVERY_AGGREGATION
@FEW
@given(seed=st.integers(0, 10_000), data=st.data())
def test_the_order_of_rows_does_not_matter(aggregation: str, seed: int, data: st.DataObject) -> None:
    batch = random_batch(seed)
    order = data.draw(st.permutations(range(len(batch.offsets) - 1)))
    starts = batch.offsets.tolist()
    tokens = torch.tensor([token for row in order for token in range(starts[row], starts[row + 1])])
    moved = Batch(
        offsets=lengths_to_offsets(batch.offsets.diff()[torch.tensor(order)]),
        mask=batch.mask[tokens],
        logprobs=batch.logprobs[tokens],
        old=batch.old[tokens],
        ref=batch.ref[tokens],
        advantages=batch.advantages[torch.tensor(order)],
    )
    torch.testing.assert_close(
        objective(moved, aggregation, moved.logprobs),
        objective(batch, aggregation, batch.logprobs)[tokens],
        rtol=1e-12,
        atol=1e-14,
    )
