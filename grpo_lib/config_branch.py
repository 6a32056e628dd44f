"""Where a branch leaves the run that it shares its first part with. Part of ``RunConfig``."""

from typing import Literal, get_args

from pydantic import Field

from grpo_lib.config_base import RunName, Section

ORDER = (
    "dataset",
    "warm_start",
    "pretrained",
    "inherited",
    "reference_model",
    "sampler",
    "prompts",
    "rollout",
    "reward",
    "filter",
    "greedy_rollout",
    "greedy_reward",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "advantage",
    "update",
    "weights",
    "checkpoint",
    "reference",
    "evaluate",
    "publish",
)
"""All stages, in the order in which an iteration's data comes into being."""
DRAWN = ("sampler", "prompts", "rollout", "reward", "filter")
"""Stages that come before training, most of them again for each further batch of prompts; their shards say which."""

Fork = Literal[
    "sampler",
    "prompts",
    "rollout",
    "reward",
    "filter",
    "greedy_rollout",
    "greedy_reward",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "advantage",
    "update",
    "reference",
    "evaluate",
]
"""Stages that a branch can begin with."""
FORKS: tuple[str, ...] = get_args(Fork)


class BranchConfig(Section):
    """What a branch shares: everything that its base made before one stage of one iteration. `grpo rerun` writes it."""

    run: RunName = Field(description="The base: a run in the same store.")
    iteration: int = Field(ge=0, le=999_999, description="Of the first stage that is the branch's own.")
    stage: Fork = Field(description="The first stage that is the branch's own.")

    def shares(self, stage: str, iteration: int | None, batch: int = 0) -> bool:
        """Whether what ``stage`` makes of ``iteration`` is the base's; None: before the first iteration.

        Args:
            batch: of prompts, where filters had an iteration draw several.

        >>> fork = BranchConfig(run="demo", iteration=7, stage="reward")
        >>> [fork.shares("rollout", 7), fork.shares("reward", 7), fork.shares("evaluate", 7), fork.shares("update", 6)]
        [True, False, True, True]
        """
        return _position(stage, iteration, batch) < _position(self.stage, self.iteration, 0)


def _position(stage: str, iteration: int | None, batch: int) -> tuple[int, int, int, int]:
    """Sorts stages by when their data comes into being."""
    order = ORDER.index(stage)
    if iteration is None:
        return -1, 0, 0, order
    if stage == "evaluate":  # of the policy that the iteration before made
        iteration -= 1
    return (iteration, 0, batch, order) if stage in DRAWN else (iteration, 1, 0, order)
