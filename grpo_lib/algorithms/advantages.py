"""Advantage estimators: how much better a response was than one would have expected.

An outcome estimator maps ``rewards [B]`` and ``group_ids int64[B]`` to one advantage a row, ``float64[B]``.
Rows whose reward could not be computed are taken out before (they belong to no statistic). A group of one has
baseline 0 and standard deviation 1; a group whose rewards are all equal gets exactly 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_lib.algorithms.registry import Registry
from grpo_lib.data.ragged import GroupStatistics, group_statistics

AdvantageEstimator = Callable[[Tensor, Tensor], Tensor]
ADVANTAGES: Registry[AdvantageEstimator] = Registry("advantage estimator")


@ADVANTAGES.register("grpo")
def grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """``(R - mean_g) / (std_g + 1e-6)`` (Shao et al. 2024, DeepSeekMath, section 4.1), std unbiased.

    >>> grpo(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([5, 5, 5])).round(decimals=4).tolist()
    [0.5773, -1.1547, 0.5773]
    """
    group = group_statistics(rewards, group_ids)
    std = torch.where(group.size == 1, 1.0, group.std)
    return _over_baseline(rewards, group) / (std + 1e-6)


@ADVANTAGES.register("dr_grpo")
def dr_grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """``R - mean_g``: GRPO without the division that favours easy and hard prompts (Liu et al. 2025, Dr. GRPO).

    >>> dr_grpo(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1, 1, 2])).tolist()
    [0.5, -0.5, 0.5]
    """
    return _over_baseline(rewards, group_statistics(rewards, group_ids))


def _over_baseline(rewards: Tensor, group: GroupStatistics) -> Tensor:
    """``R - mean_g``: exactly 0 in groups of equal rewards, not the mean's rounding; ``R`` in a group of one."""
    rewards = rewards.double()
    over = torch.where(group.constant, 0.0, rewards - group.mean)
    return torch.where(group.size == 1, rewards, over)
