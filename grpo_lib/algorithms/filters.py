"""Which rows of an iteration are used, and what length does to a reward.

A filter returns ``copies int64[B]``: 0 takes a row out of everything, its group's statistics included. One with the
trait ``resamples`` runs when the batch is full, and says only how often each row takes part in the update.
"""

import math
from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from grpo_lib.algorithms.registry import Option, Registry
from grpo_lib.data.ragged import group_statistics

FILTERS: Registry[Callable[..., Tensor]] = Registry(
    "filter",
    {
        "rewards": "`float64[B]`: of the reward stage; rows whose reward is null are not among them",
        "group_ids": "`int64[B]`",
        "lengths": "`int64[B]`: response tokens",
        "truncated": "`bool[B]`: cut at `rollout.max_new_tokens`",
        "seed": "an integer for whatever is random",
    },
)


@FILTERS.register(
    "dynamic_sampling",
    formula="drop groups whose rewards are all equal",
    paper="Yu et al. 2025, DAPO, section 3.2, arXiv:2503.14476",
    use="no compute on groups without signal; prompts are drawn until the batch is full (rollout.max_gen_batches)",
)
def dynamic_sampling(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A group of one is dropped too: its rewards are all equal.

    >>> dynamic_sampling(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([1, 1, 2, 2])).tolist()
    [1, 1, 0, 0]
    """
    return (~group_statistics(rewards, group_ids).constant).long()


@FILTERS.register(
    "pf_ppo",
    formula="draw B rows with replacement, p_i ~ |R_i|^power",
    paper="Zhang et al. 2024, Policy Filtration for RLHF (PF-PPO), arXiv:2409.06957",
    use="noisy reward models: rows with a clear verdict, good or bad, are seen more often",
    resamples=True,
)
def pf_ppo(
    rewards: Tensor,
    seed: int,
    *,
    power: Annotated[
        float, Option(ge=0, le=100, description="0 is plain resampling; more prefers clear verdicts.")
    ] = 2.0,
) -> Tensor:
    """Rows that are drawn twice count twice. All rewards 0: every row once.

    >>> pf_ppo(torch.tensor([0.0, 1.0]), 0).tolist()
    [0, 2]
    """
    size = rewards.double().abs()
    if not bool((size > 0).any()):
        return torch.ones(len(rewards), dtype=torch.int64)
    weights = (size / size.max()) ** power  # at most 1, whatever the power
    # Systematic resampling: one random shift, B evenly spaced points; every count is within 1 of its expectation.
    ends = torch.cumsum(weights, 0)
    shift = torch.rand((), generator=torch.Generator().manual_seed(seed % 2**63), dtype=torch.float64)
    points = (torch.arange(len(rewards), dtype=torch.float64) + shift) / len(rewards)
    # A point that rounds to 1 would be past the last row with a weight.
    drawn = torch.searchsorted(ends / ends[-1], points.clamp(max=math.nextafter(1.0, 0.0)), right=True)
    return torch.bincount(drawn, minlength=len(rewards))


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, penalty: float) -> Tensor:
    """``float64[B]``, added to the reward: 0 to ``max_length - buffer``, then linear to ``-penalty`` at ``max_length``.

    Yu et al. 2025, DAPO, eq. 13.

    >>> overlong_penalty(torch.tensor([6, 8, 10, 12]), max_length=10, buffer=4, penalty=1.0).tolist()
    [0.0, -0.5, -1.0, -1.0]
    """
    over = (lengths.double() - (max_length - buffer)) / buffer
    return -penalty * over.clamp(0, 1) + 0.0
