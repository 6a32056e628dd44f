"""Advantage estimators: how much better a response was than one would have expected.

An outcome estimator maps ``rewards`` (``[B]``) and ``group_ids`` (``int64[B]``) to one advantage a row (``float64[B]``).
Rows whose reward could not be computed are taken out before (they belong to no statistic). A group of one has
baseline 0 and standard deviation 1; a group whose rewards are all equal gets exactly 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_lib.algorithms.registry import Registry
from grpo_lib.data.ragged import group_statistics

AdvantageEstimator = Callable[[Tensor, Tensor], Tensor]
ADVANTAGES: Registry[AdvantageEstimator] = Registry("advantage estimator")


@ADVANTAGES.register("grpo")
def grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """``(R - mean_g) / (std_g + 1e-6)`` (Shao et al. 2024, DeepSeekMath, section 4.1), std unbiased.

    >>> grpo(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([5, 5, 5])).round(decimals=4).tolist()
    [0.5773, -1.1547, 0.5773]
    """
    group = group_statistics(rewards, group_ids)
    scaled = (rewards.double() - group.mean) / (group.std + 1e-6)
    return _without_noise(scaled, rewards, group.constant, group.size)


@ADVANTAGES.register("dr_grpo")
def dr_grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """``R - mean_g``: GRPO without the division that favours easy and hard prompts (Liu et al. 2025, Dr. GRPO).

    >>> dr_grpo(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1, 1, 2])).tolist()
    [0.5, -0.5, 0.5]
    """
    group = group_statistics(rewards, group_ids)
    return _without_noise(rewards.double() - group.mean, rewards, group.constant, group.size)


def _without_noise(advantages: Tensor, rewards: Tensor, constant: Tensor, size: Tensor) -> Tensor:
    """Exactly 0 in groups of equal rewards; the reward itself in a group of one (baseline 0, std 1)."""
    advantages = torch.where(constant, torch.zeros_like(advantages), advantages)
    return torch.where(size == 1, rewards.double(), advantages)
