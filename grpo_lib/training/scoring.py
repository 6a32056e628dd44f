"""What a model says of given responses, without gradient: log-probs, entropies, values."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_lib.data.ragged import Ragged
from grpo_lib.errors import NonFiniteError
from grpo_lib.training.logprobs import token_logprobs
from grpo_lib.training.microbatches import MicroBatch, Sequences, bins, micro_batch, scatter_rows


@torch.no_grad()
def score_tokens(
    function: Callable[[MicroBatch], tuple[Tensor, ...]],
    sequences: Sequences,
    *,
    device: torch.device,
    max_tokens: int,
    autocast: torch.dtype | None,
) -> list[Ragged]:
    """Runs ``function`` over micro-batches; each of its results ``[n]`` comes back in the rows' order, on the CPU."""
    lengths = sequences.prompts.lengths + sequences.responses.lengths
    parts: list[list[tuple[Tensor, Ragged]]] = []
    for rows in bins(lengths, max_tokens):
        batch = micro_batch(sequences, rows).to(device)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            results = function(batch)
        parts.append([(rows, Ragged(values=each.float().cpu(), offsets=batch.offsets)) for each in results])
    return [scatter_rows(list(column), sequences.responses.rows) for column in zip(*parts, strict=True)]


def score(
    model: Any, sequences: Sequences, *, temperature: float, max_tokens: int, autocast: torch.dtype | None
) -> tuple[Ragged, Ragged]:
    """Log-prob and entropy (``float32[N]`` each) of every response token.

    Raises:
        NonFiniteError: a log-prob is NaN or infinite.
    """

    def of_batch(batch: MicroBatch) -> tuple[Tensor, ...]:
        scored = token_logprobs(model, batch, temperature)
        return scored.logprobs, scored.entropy

    device = next(model.parameters()).device
    result, entropies = score_tokens(of_batch, sequences, device=device, max_tokens=max_tokens, autocast=autocast)
    if not bool(torch.isfinite(result.values).all()):
        raise NonFiniteError(
            "the model gives log-probs that are NaN or infinite; its weights are broken: "
            "go back to an earlier checkpoint, with a lower trainer.optimizer.lr"
        )
    return result, entropies
