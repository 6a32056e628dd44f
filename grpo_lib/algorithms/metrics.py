"""Numbers about an iteration that a run may ask for by name (``algorithm.metrics``), from the advantage stage."""

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_lib.algorithms.registry import Registry
from grpo_lib.data.ragged import dense_groups, group_max, group_statistics

METRICS: Registry[Callable[..., float]] = Registry(
    "metric",
    {
        "rewards": "`float64[B]`: as the estimator got them",
        "group_ids": "`int64[B]`",
        "lengths": "`int64[B]`: response tokens",
        "valid_tokens": "`int64[B]`: tokens with mask 1",
        "advantages": "`[N]`: as the estimator gave them",
        "mask": "`bool[N]`",
        "offsets": "`int64[B+1]`",
    },
)


@METRICS.register(
    "group_std", formula="mean over rows of std_g(R)", paper="-", use="how much a group has to learn from"
)
def group_std(rewards: Tensor, group_ids: Tensor) -> float:
    """Unbiased standard deviation of the rewards within a group."""
    return float(group_statistics(rewards, group_ids).std.mean())


@METRICS.register("best_of_group", formula="mean over groups of max_g(R)", paper="-", use="what best-of-n would earn")
def best_of_group(rewards: Tensor, group_ids: Tensor) -> float:
    """The best response of each group."""
    group, groups = dense_groups(group_ids)
    best = group_max(rewards.double(), group, groups)
    return float(best[best > -torch.inf].mean())


@METRICS.register(
    "length_of_rewarded",
    formula="mean length where R > mean_g over mean length elsewhere",
    paper="-",
    use="above 1: longer responses are being rewarded",
)
def length_of_rewarded(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> float:
    """1 where one of the two sides is empty."""
    group = group_statistics(rewards, group_ids)
    better = (rewards.double() > group.mean) & ~group.constant  # equal rewards may be above their rounded mean
    if bool(better.all()) or not bool(better.any()):
        return 1.0
    return float(lengths[better].double().mean() / lengths[~better].double().mean().clamp(min=1))
