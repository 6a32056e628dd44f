"""`advantage`: over the whole iteration, before any shuffling or splitting."""

from grpo_lib.algorithms.advantages import ADVANTAGES
from grpo_lib.data.advantages import advantage_table
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from tasks.base import Stage, stage_task

ADVANTAGE = StageSpec(name="advantage", version=1, reads=("algorithm.advantage",))


@stage_task(ADVANTAGE)
def advantage(stage: Stage, rollouts: list[ArtifactRef], rewards: list[ArtifactRef]) -> ArtifactRef:
    """How much better each response is than its group."""
    estimator = ADVANTAGES[stage.config.algorithm.advantage]
    table, summary = advantage_table(stage.table(rollouts), stage.table(rewards), estimator)
    return stage.commit(table, summary=summary)
