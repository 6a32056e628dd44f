"""Policy losses per token, before aggregation (``aggregation.py`` is the one place that divides).

Every loss takes ``logprobs`` (with gradient), ``old_logprobs`` and ``advantages``, each ``[N]``, and the options that
its signature names, and returns a ``PolicyLoss``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lib.algorithms.registry import Registry


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """What a policy loss says of each token."""

    values: Tensor
    """``[N]``, with gradient: the loss of the token."""
    ratio: Tensor
    """``[N]``, no gradient: ``exp(logprobs - old_logprobs)``."""
    clipped_high: Tensor
    """``bool[N]``: the gradient was cut because the ratio is above its range."""
    clipped_low: Tensor
    """``bool[N]``: the gradient was cut because the ratio is below its range."""


LOSSES: Registry[Callable[..., PolicyLoss]] = Registry("policy loss")


@LOSSES.register("ppo_clip")
def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyLoss:
    """``max(-A rho, -A clip(rho, 1-clip_low, 1+clip_high))``, where ``A < 0`` at most ``-A dual_clip``.

    ``rho = exp(clamp(logprobs - old_logprobs, -20, 20))``. Schulman et al. 2017 (PPO, eq. 7); clip-higher: Yu et al.
    2025 (DAPO, section 3.1); dual clip: Ye et al. 2020.
    """
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    values = torch.maximum(-advantages * ratio, -advantages * clipped)
    high = (ratio > 1 + clip_high) & (advantages > 0)
    low = (ratio < 1 - clip_low) & (advantages < 0)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        capped = (advantages < 0) & (values > bound)
        values = torch.where(capped, bound, values)
        high = high | capped
    return PolicyLoss(values=values, ratio=ratio.detach(), clipped_high=high, clipped_low=low)
