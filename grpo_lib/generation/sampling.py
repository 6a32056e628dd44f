"""Choosing tokens: the inverse of the cumulative distribution at a counter-based uniform number (``seeds.uniforms``).

The number that decides a row's token at a step is a hash of the row's seed and the step, so a row does not depend on
which rows it shares a batch with, nor on any generator's state.
"""

import torch
from torch import Tensor

from grpo_lib.generation.base import Sampling


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor | None, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs.

    Args:
        logits: ``[rows, vocabulary]``.
        uniform: ``float64[rows]`` in [0, 1); not read when greedy.
        seen: ``bool[rows, vocabulary]``: tokens of the prompt and the response so far; read with a penalty only.

    Returns:
        ``int64[rows]``, and ``float32[rows]``, of the distribution that they were drawn from; greedy: of
        softmax(logits) after the penalty.
    """
    scores = shape(logits, sampling, seen)
    scores = scores - scores.amax(-1, keepdim=True)
    weights = scores.exp()
    if sampling.temperature > 0:
        assert uniform is not None
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        # right=True passes over tokens of probability 0; clamp only acts on NaN, which then shows in the log-prob.
        tokens = torch.searchsorted(cumulative, uniform.unsqueeze(1) * total, right=True)
        tokens = tokens.clamp(max=scores.shape[-1] - 1)
    else:
        total = weights.sum(-1, keepdim=True)
        tokens = scores.argmax(-1, keepdim=True)
    logprobs = scores.gather(1, tokens) - total.log()
    return tokens.squeeze(1), logprobs.squeeze(1).float()


def shape(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    """``float32[rows, vocabulary]``: logits of the sampling distribution; tokens that can't be drawn have -inf."""
    scores = logits.float()
    if sampling.repetition_penalty != 1:
        assert seen is not None
        penalty = sampling.repetition_penalty
        scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    if sampling.temperature > 0:
        scores = truncate(scores / sampling.temperature, sampling)
    return scores


def truncate(scores: Tensor, sampling: Sampling) -> Tensor:
    """Sets the scores of tokens outside ``min_p``, ``top_k`` and ``top_p``, one after the other, to -inf.

    Ties at the bound of ``top_k`` all stay, as in vLLM; of ties at that of ``top_p`` those with the higher ids do.
    """
    if sampling.min_p > 0:
        floor = scores.amax(-1, keepdim=True) + torch.tensor(sampling.min_p, dtype=torch.float64).log().float()
        scores = scores.masked_fill(scores < floor, float("-inf"))
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k, -1).values[:, -1:], float("-inf"))
    if sampling.top_p < 1:
        ordered, order = scores.sort(dim=-1, stable=True)  # ascending: what the less likely tokens add up to
        outside = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        outside[:, -1] = False
        scores = scores.masked_fill(torch.zeros_like(outside).scatter_(-1, order, outside), float("-inf"))
    return scores
