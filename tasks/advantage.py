"""`advantage`: over the whole iteration, before any shuffling or splitting."""

from typing import Any

from grpo_lib.algorithms.advantages import ADVANTAGES
from grpo_lib.algorithms.groupings import GROUPINGS
from grpo_lib.algorithms.kl import kl_estimator
from grpo_lib.algorithms.metrics import METRICS
from grpo_lib.data.advantages import AdvantagePlan, KlInReward, Overlong, advantage_table
from grpo_lib.data.iteration import Iteration
from grpo_lib.recipe import correction_of
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from tasks.base import Stage, stage_task

ADVANTAGE = StageSpec(
    name="advantage",
    version=2,
    reads=(
        "algorithm.advantage",
        "algorithm.advantage_options",
        "algorithm.grouping",
        "algorithm.kl",
        "algorithm.rollout_correction",
        "algorithm.overlong",
        "algorithm.metrics",
        "rollout.max_new_tokens",
    ),
)


@stage_task(ADVANTAGE)
def advantage(
    stage: Stage,
    prompts: list[ArtifactRef],
    rollouts: list[ArtifactRef],
    rewards: list[ArtifactRef],
    old_logprobs: ArtifactRef | None,
    ref_logprobs: ArtifactRef | None,
    values: ArtifactRef | None,
    greedy_rewards: ArtifactRef | None,
    selection: ArtifactRef | None,
    previous: ArtifactRef | None,
) -> ArtifactRef:
    """How much better each token is than expected, after KL in the reward and rollout correction.

    ``previous`` are the advantages of the iteration before, where the KL coefficient follows from them.
    """

    def table(ref: ArtifactRef | None) -> Any:
        return None if ref is None else stage.table(ref)

    data = Iteration(
        prompts=stage.table(prompts),
        rollouts=stage.table(rollouts),
        rewards=stage.table(rewards),
        old=table(old_logprobs),
        ref=table(ref_logprobs),
        values=table(values),
        greedy=table(greedy_rewards),
        selection=table(selection),
    )
    coef = None if previous is None else stage.summary(previous)["next_kl_coef"]
    advantages, summary = advantage_table(data, plan(stage.config, coef, stage.k))
    return stage.commit(advantages, summary=summary)


def plan(config: Any, kl_coef: float | None, policy_version: int) -> AdvantagePlan:
    """The configuration as functions and numbers; ``kl_coef`` where an adaptive controller moved it."""
    algorithm, overlong = config.algorithm, config.algorithm.overlong
    kl = None
    if algorithm.kl.place == "reward" and algorithm.kl.coef > 0:
        kl = KlInReward(
            estimator=kl_estimator(algorithm.kl.estimator),
            coef=algorithm.kl.coef if kl_coef is None else kl_coef,
            target=algorithm.kl.target if algorithm.kl.controller == "adaptive" else None,
            horizon=algorithm.kl.horizon,
        )
    return AdvantagePlan(
        estimator=ADVANTAGES[algorithm.advantage].bind(algorithm.advantage_options, "algorithm.advantage_options"),
        grouping=GROUPINGS[algorithm.grouping],
        correction=correction_of(algorithm.rollout_correction),
        overlong=Overlong(
            max_length=config.rollout.max_new_tokens,
            buffer=overlong.buffer_tokens,
            penalty=overlong.penalty,
            mask_truncated=overlong.mask_truncated,
        ),
        kl=kl,
        metrics=[(name, METRICS[name].function) for name in algorithm.metrics],
        policy_version=policy_version,
    )
