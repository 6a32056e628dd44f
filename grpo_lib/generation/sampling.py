"""Choosing tokens: the inverse of the cumulative distribution at a counter-based uniform number (``seeds.uniforms``).

The number that decides a row's token at a step is a hash of the row's seed and the step, so a row does not depend on
which rows it shares a batch with, nor on any generator's state.
"""

import torch
from torch import Tensor


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
