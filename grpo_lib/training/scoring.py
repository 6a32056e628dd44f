"""Log-probs of given responses, without gradient: old_logprobs, ref_logprobs and the parity gate."""

from typing import Any

import torch

from grpo_lib.data.ragged import Ragged
from grpo_lib.errors import NonFiniteError
from grpo_lib.training.logprobs import token_logprobs
from grpo_lib.training.microbatches import Sequences, bins, micro_batch, scatter_rows


@torch.no_grad()
def score(
    model: Any, sequences: Sequences, *, temperature: float, max_tokens: int, autocast: torch.dtype | None
) -> tuple[Ragged, Ragged]:
    """Log-prob and entropy (``float32[N]`` each) of every response token, in the rows' order, on the CPU.

    Raises:
        NonFiniteError: a log-prob is NaN or infinite.
    """
    device = next(model.parameters()).device
    lengths = sequences.prompts.lengths + sequences.responses.lengths
    logprobs, entropies = [], []
    for rows in bins(lengths, max_tokens):
        batch = micro_batch(sequences, rows).to(device)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            scored = token_logprobs(model, batch, temperature)
        logprobs.append((rows, Ragged(values=scored.logprobs.cpu(), offsets=batch.offsets)))
        entropies.append((rows, Ragged(values=scored.entropy.cpu(), offsets=batch.offsets)))
    result = scatter_rows(logprobs, sequences.responses.rows)
    if not bool(torch.isfinite(result.values).all()):
        raise NonFiniteError(
            "the model gives log-probs that are NaN or infinite; its weights are broken: "
            "go back to an earlier checkpoint, with a lower trainer.optimizer.lr"
        )
    return result, scatter_rows(entropies, sequences.responses.rows)
