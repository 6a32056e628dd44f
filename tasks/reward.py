"""`reward`: scores of a shard's rollouts."""

from grpo_lib.problems import get_problem
from grpo_lib.rewards.runner import check_failures
from grpo_lib.rewards.scoring import reward_summary, reward_table
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from tasks.base import Stage, stage_task

REWARD = StageSpec(name="reward", version=1, reads=("reward", "data"))


@stage_task(REWARD)
def reward(stage: Stage, prompts: ArtifactRef, rollouts: ArtifactRef) -> ArtifactRef:
    """Judges every response; what can't be judged is null with a reason."""
    function = get_problem(stage.config.data.problem).make_reward(stage.config.data, stage.config.reward)
    texts = stage.table(rollouts)
    table, scores = reward_table(
        stage.table(prompts), texts, function, lambda done: stage.advanced(done, texts.num_rows)
    )
    check_failures(scores, stage.config.reward.max_failed)
    return stage.commit(table, summary=reward_summary(scores))
