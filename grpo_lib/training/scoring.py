"""What a network says of given responses, without gradient: log-probs, entropies, values."""

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_lib.data.ragged import Ragged, repeat_rows
from grpo_lib.errors import NonFiniteError
from grpo_lib.training.microbatches import Layout, MicroBatch, Sequences, micro_batch, plan
from grpo_lib.training.world import World

Progress = Callable[[int, int, int], None]
"""Rows done, rows in all, tokens so far; of this rank."""


@torch.no_grad()
def score_tokens(
    function: Callable[[MicroBatch], tuple[Tensor, ...]],
    sequences: Sequences,
    *,
    world: World,
    max_tokens: int,
    layout: Layout,
    on_progress: Progress | None = None,
) -> list[Ragged]:
    """Runs ``function`` over micro-batches; each of its results ``[n]`` comes back in the rows' order, on the CPU.

    Every rank runs its own micro-batches and gets the results of all.
    """
    responses = sequences.responses
    mine = plan(sequences.prompts.lengths + responses.lengths, max_tokens, layout, world.size)[world.rank]
    everything: list[Tensor] = []
    rows_done = tokens = 0
    for rows in mine:
        batch = micro_batch(sequences, rows, layout).to(world.device)
        results = function(batch)
        if not everything:
            everything = [torch.zeros(len(responses.values)) for _ in results]
        shift = repeat_rows(responses.offsets[rows] - batch.offsets[:-1], batch.offsets)
        places = shift + torch.arange(len(shift))
        for whole, each in zip(everything, results, strict=True):
            whole[places] = each.float().cpu()
        rows_done, tokens = rows_done + len(rows), tokens + batch.tokens
        if on_progress is not None:
            on_progress(rows_done * world.size, responses.rows, tokens * world.size)
    together = [world.sum_(each.to(world.device)).cpu() if world.size > 1 else each for each in everything]
    return [responses.with_values(each) for each in together]


def check_finite(logprobs: Ragged) -> None:
    """Raises NonFiniteError for log-probs that are NaN or infinite."""
    if not bool(torch.isfinite(logprobs.values).all()):
        raise NonFiniteError(
            "the model gives log-probs that are NaN or infinite; its weights are broken: "
            "go back to an earlier checkpoint, with a lower trainer.optimizer.lr"
        )
