"""What the update and the scoring stages read off the model at each response token, in float32.

Hidden states go through the head in chunks of the vocabulary projection, forward and backward; the logits of a whole
micro-batch are never held.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo_lib.algorithms.distributions import entropy_of, full_kl, sum_squared_probs
from grpo_lib.training.microbatches import MicroBatch

CHUNK_VALUES = 2**24  # logits held at a time: 64 MiB in float32


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Of ``n`` response tokens under the sampling distribution ``softmax(logits / temperature)``."""

    logprobs: Tensor
    """``float32[n]``."""
    entropy: Tensor
    """``float32[n]``: ``logsumexp(z) - sum softmax(z) z`` in nats."""


@dataclass(frozen=True, kw_only=True)
class TokenKl:
    """Of ``n`` response tokens, from the logits of both policies."""

    full: Tensor
    """``float32[n]``, with gradient: the KL over the vocabulary."""
    ref_logprobs: Tensor
    """``float32[n]``: of the response token under the reference."""


def token_logprobs(model: Any, batch: MicroBatch, temperature: float) -> TokenLogprobs:
    """Runs a Transformers causal LM over a micro-batch. Differentiable."""
    hidden, weight = response_states(model, batch), head_weight(model)
    parts = _in_chunks(_logprobs, batch.targets, temperature, (hidden, weight))
    return TokenLogprobs(logprobs=parts[0], entropy=parts[1])


def token_logprobs_and_kl(
    model: Any, reference: Any, batch: MicroBatch, temperature: float
) -> tuple[TokenLogprobs, TokenKl]:
    """The same with the exact KL to a reference policy, which runs without gradient; in one pass of the head."""
    with torch.no_grad():
        ref_hidden = response_states(reference, batch)
    states = (response_states(model, batch), head_weight(model), ref_hidden, head_weight(reference).detach())
    parts = _in_chunks(_logprobs_and_kl, batch.targets, temperature, states)
    return TokenLogprobs(logprobs=parts[0], entropy=parts[1]), TokenKl(full=parts[2], ref_logprobs=parts[3])


def token_sum_squared_probs(model: Any, batch: MicroBatch, temperature: float) -> Tensor:
    """``sum_v pi(v)^2`` at each response token, ``float32[n]``."""
    states = (response_states(model, batch), head_weight(model))
    (result,) = _in_chunks(_sum_squares, batch.targets, temperature, states)
    return result


def response_states(model: Any, batch: MicroBatch) -> Tensor:
    """Hidden states ``[n, hidden]`` at the positions that predict the response tokens."""
    return model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state.flatten(0, 1)[batch.predicts]


def head_weight(model: Any) -> Tensor:
    """``[V, hidden]``."""
    return model.get_output_embeddings().weight


def _in_chunks(function: Any, targets: Tensor, temperature: float, states: tuple[Tensor, ...]) -> list[Tensor]:
    """``function`` over chunks of tokens; ``states`` are pairs of hidden states ``[n, hidden]`` and head weights."""
    hidden, weights = states[::2], states[1::2]
    size = max(1, CHUNK_VALUES // (len(weights[0]) * len(weights)))
    results = []
    for start in range(0, max(1, len(targets)), size):
        chunk = slice(start, start + size)
        arguments = [each for pair in zip((h[chunk] for h in hidden), weights, strict=True) for each in pair]
        if len(targets) <= size or not torch.is_grad_enabled():
            results.append(function(targets[chunk], temperature, *arguments))
        else:
            results.append(checkpoint(function, targets[chunk], temperature, *arguments, use_reentrant=False))
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return torch.nn.functional.linear(hidden.float(), weight.float()) / temperature


def _logprobs(targets: Tensor, temperature: float, hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return _of_logits(_logits(hidden, weight, temperature), targets)


def _logprobs_and_kl(
    targets: Tensor, temperature: float, hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor
) -> tuple[Tensor, ...]:
    logits = _logits(hidden, weight, temperature)
    ref_logits = _logits(ref_hidden, ref_weight, temperature)
    ref_logprobs, _ = _of_logits(ref_logits, targets)
    return *_of_logits(logits, targets), full_kl(logits, ref_logits), ref_logprobs


def _sum_squares(targets: Tensor, temperature: float, hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (sum_squared_probs(_logits(hidden, weight, temperature)),)


def _of_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits, dim=-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), entropy_of(log_p)
