"""Log-prob and entropy of response tokens from hidden states, in float32, in chunks of the vocabulary projection."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo_lib.training.microbatches import MicroBatch

CHUNK_VALUES = 2**24  # logits held at a time: 64 MiB in float32


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Of ``n`` response tokens under the sampling distribution ``softmax(logits / temperature)``."""

    logprobs: Tensor
    """``float32[n]``."""
    entropy: Tensor
    """``float32[n]``: ``logsumexp(z) - sum softmax(z) z`` in nats."""


def token_logprobs(model: Any, batch: MicroBatch, temperature: float) -> TokenLogprobs:
    """Runs a Transformers causal LM over a micro-batch. Differentiable; never holds the logits of the whole batch."""
    hidden = model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    hidden = hidden.flatten(0, 1)[batch.predicts]
    weight = model.get_output_embeddings().weight
    size = max(1, CHUNK_VALUES // len(weight))
    whole = len(hidden) <= size
    logprobs, entropies = [], []
    for start in range(0, len(hidden), size):
        arguments = (hidden[start : start + size], weight, batch.targets[start : start + size], temperature)
        if whole or not torch.is_grad_enabled():
            logprob, entropy = _head(*arguments)
        else:
            logprob, entropy = checkpoint(_head, *arguments, use_reentrant=False)
        logprobs.append(logprob)
        entropies.append(entropy)
    if not logprobs:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return TokenLogprobs(logprobs=empty, entropy=empty)
    return TokenLogprobs(logprobs=torch.cat(logprobs), entropy=torch.cat(entropies))


def _head(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    with torch.autocast(hidden.device.type, enabled=False):
        logits = torch.nn.functional.linear(hidden.float(), weight.float()) / temperature
        log_p = torch.log_softmax(logits, dim=-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, targets[:, None]).squeeze(-1), entropy
