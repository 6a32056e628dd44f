"""Choosing tokens: counter-based uniform numbers and the inverse of the cumulative distribution.

The number that decides a row's token at a step is a hash of the row's seed and the step, so a row does not depend on
which rows it shares a batch with, nor on any generator's state.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: NDArray[np.int64], step: int) -> NDArray[np.float64]:
    """One number in [0, 1) for each row's seed at a step: multiples of 2^-48.

    >>> uniforms(np.array([1, 2, 1]), 0).round(3).tolist() == uniforms(np.array([1, 2, 1]), 0).round(3).tolist()
    True
    >>> u = uniforms(np.array([1, 2, 1]), 0); bool(u[0] == u[2] != u[1])
    True
    """
    offset = np.uint64((step + 1) * int(_GOLDEN) % 2**64)
    mixed = _mix(_mix(seeds.astype(np.int64).view(np.uint64)) + offset)
    return (mixed >> np.uint64(16)).astype(np.float64) * 2.0**-48


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def choose(logits: Tensor, temperature: float, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs.

    Args:
        logits: ``[rows, vocabulary]``.
        temperature: what logits are divided by; 0: the most likely token.
        uniform: ``float64[rows]`` in [0, 1); not read when greedy.

    Returns:
        ``int64[rows]``, and ``float32[rows]`` under softmax(logits / temperature), greedy: softmax(logits).
    """
    scores = logits.float()
    if temperature > 0:
        scores = scores / temperature
    scores = scores - scores.amax(-1, keepdim=True)
    weights = scores.exp()
    if temperature > 0:
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
