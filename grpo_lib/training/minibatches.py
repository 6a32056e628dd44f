"""An iteration into mini-batches, one optimizer step each, and what is computed over the whole of one."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_lib.algorithms.registry import call
from grpo_lib.data.ragged import Ragged, expand, repeat_rows, segment_sum
from grpo_lib.seeds import derive_seed, uniforms
from grpo_lib.training.base import Batching, Objective, UpdateBatch


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """Rows of one optimizer step."""

    batch: UpdateBatch
    weights: Ragged
    """``float32[N]``: aggregation weight of each token, over the whole mini-batch."""
    selected: Ragged | None
    """``bool[N]``: what the loss's helper chose, over the whole mini-batch."""


@dataclass(frozen=True, kw_only=True)
class _Selecting:
    """Columns that a loss's helper may name, of all tokens of a mini-batch with mask 1."""

    logprobs: Tensor
    advantages: Tensor
    draws: Tensor


def mini_batches(mask: Ragged, group_ids: Tensor, batching: Batching, epoch: int) -> list[Tensor]:
    """Row indices of each mini-batch of an epoch: whole groups with a token left, shuffled by (seed, epoch).

    Without any token left there is one mini-batch, of all rows.
    """
    live = segment_sum(mask.values.long(), mask.offsets) > 0
    groups, of_row = torch.unique(group_ids, return_inverse=True)
    alive = torch.zeros(len(groups), dtype=torch.bool).index_fill(0, of_row[live], True)
    count = int(alive.sum())
    if count == 0:
        return [torch.arange(len(group_ids))]
    size = batching.mini_batch_groups or count
    generator = torch.Generator().manual_seed(derive_seed(batching.seed, "mini-batches", epoch))
    place = torch.full((len(groups),), -size)
    place[torch.nonzero(alive).squeeze(1)[torch.randperm(count, generator=generator)]] = torch.arange(count)
    part = place[of_row] // size
    return [torch.nonzero(part == index).squeeze(1) for index in range(-(-count // size))]


def make_mini_batch(batch: UpdateBatch, objective: Objective, seed: int, logprobs: Callable[[], Ragged]) -> MiniBatch:
    """Aggregation weights and chosen tokens; ``logprobs`` (a forward pass of all rows) is asked for only to choose."""
    mask = batch.mask
    selected = None
    if objective.select is not None:
        valid = mask.values.bool()
        columns = _Selecting(
            logprobs=logprobs().values[valid],
            advantages=batch.advantages.values[valid],
            draws=token_draws(batch.row_seeds, mask.offsets, seed)[valid],
        )
        selected = mask.with_values(expand(call(objective.select, columns), valid))
    weights = mask.with_values(objective.aggregation(mask.values, mask.offsets).float())
    return MiniBatch(batch=batch, weights=weights, selected=selected)


def token_draws(row_seeds: Tensor, offsets: Tensor, seed: int) -> Tensor:
    """A number in [0, 1) for each token, ``float64[N]``: of its row's seed and its position in the row."""
    position = torch.arange(int(offsets[-1])) - repeat_rows(offsets[:-1], offsets)
    mixed = repeat_rows(row_seeds, offsets).numpy() ^ np.int64(seed)
    return torch.from_numpy(uniforms(mixed, position.numpy()))


def rows_with_gradient(batch: UpdateBatch, objective: Objective, critic: bool) -> Tensor:
    """Rows that can change the gradient; exact: without KL, entropy and critic, zero advantages add nothing."""
    valid = batch.mask.values != 0
    if objective.kl is None and not objective.entropy_coef and objective.zero_without_advantage and not critic:
        valid = valid & (batch.advantages.values != 0)
    return torch.nonzero(segment_sum(valid.long(), batch.mask.offsets)).squeeze(1)
