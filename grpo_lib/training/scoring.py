"""What a network says of given responses, without gradient: log-probs, entropies, values."""

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_lib.data.ragged import Ragged, places
from grpo_lib.errors import NonFiniteError
from grpo_lib.training.microbatches import Layout, MicroBatch, Sequences, micro_batch, plan_sequences
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
    mine = plan_sequences(sequences, max_tokens, layout, world.size)[world.rank]
    found: list[tuple[Tensor, ...]] = []
    found_at: list[Tensor] = []
    rows_done = tokens = 0
    for rows in mine or [torch.arange(0)]:  # without rows a single token that predicts nothing
        batch = micro_batch(sequences, rows, layout).to(world.device)
        found.append(function(batch))
        found_at.append(places(batch.offsets, responses.offsets[batch.rows]))
        rows_done, tokens = rows_done + len(rows), tokens + batch.tokens
        if on_progress is not None:
            on_progress(min(rows_done * world.size, responses.rows), responses.rows, tokens * world.size)
    results = []
    for column in zip(*found, strict=True):  # kept on the device until here: no waiting between micro-batches
        whole = torch.zeros(len(responses.values))
        whole[torch.cat(found_at)] = torch.cat(column).float().cpu()
        results.append(responses.with_values(world.sum_(whole.to(world.device)).cpu() if world.size > 1 else whole))
    return results


def check_finite(logprobs: Ragged) -> None:
    """Raises NonFiniteError for log-probs that are NaN or infinite."""
    if not bool(torch.isfinite(logprobs.values).all()):
        raise NonFiniteError(
            "the model gives log-probs that are NaN or infinite; its weights are broken: "
            "go back to an earlier checkpoint, with a lower trainer.optimizer.lr"
        )
