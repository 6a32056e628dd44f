"""Which tokens of a mini-batch a loss treats differently: by covariance of advantage and log-prob (Cui et al. 2025).

The choice is made over all tokens (mask 1) of an optimizer step's whole mini-batch, without gradient, before the first
backward pass; so it does not depend on micro-batches, and neither on the order of rows.
"""

import math
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from grpo_lib.algorithms.registry import Option


def covariance(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """``(A - mean A)(lp - mean lp)`` of each token, ``float64[N]``.

    >>> covariance(torch.tensor([-1.0, -3.0]), torch.tensor([1.0, 0.0])).tolist()
    [0.5, 0.5]
    """
    a, lp = advantages.double(), logprobs.detach().double()
    return (a - a.mean()) * (lp - lp.mean())


def random_in_covariance_band(
    logprobs: Tensor,
    advantages: Tensor,
    draws: Tensor,
    *,
    clip_cov_ratio: Annotated[
        float, Option(ge=0, le=1, description="Fraction of the tokens in the band that is taken out (rounded up).")
    ] = 0.01,
    cov_low: Annotated[float, Option(description="Lower end of the band.")] = 1.0,
    cov_high: Annotated[float, Option(description="Upper end of the band.")] = 5.0,
) -> Tensor:
    """``bool[N]``: of the tokens with ``cov_low < covariance < cov_high`` those with the smallest draws.

    Args:
        draws: ``[N]``, uniform in [0, 1), the token's own: they follow the token wherever its row stands.
    """
    cov = covariance(logprobs, advantages)
    inside = (cov > cov_low) & (cov < cov_high)
    count = _part(clip_cov_ratio, int(inside.sum()))
    return inside & _smallest(draws.double().masked_fill(~inside, torch.inf), count)


def highest_covariance(
    logprobs: Tensor,
    advantages: Tensor,
    *,
    kl_cov_ratio: Annotated[
        float, Option(gt=0, le=1, description="Fraction of all tokens that gets the penalty (rounded up).")
    ] = 2e-3,
) -> Tensor:
    """``bool[N]``: the top ``kl_cov_ratio`` of the tokens by covariance, with all that tie with the last."""
    cov = covariance(logprobs, advantages)
    return _smallest(-cov, _part(kl_cov_ratio, len(cov)))


def _part(fraction: float, of: int) -> int:
    return math.ceil(round(fraction * of, 9))  # 0.07 * 100 is a little more than 7


def _smallest(values: Tensor, count: int) -> Tensor:
    """``bool[N]``: the ``count`` smallest, with all that tie with the largest of them."""
    if count == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    return values <= float(np.partition(values.cpu().numpy(), count - 1)[count - 1])
