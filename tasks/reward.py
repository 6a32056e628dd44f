"""`reward`: scores of a shard's rollouts; `greedy_reward`: of the greedy ones."""

from grpo_lib.problems import get_problem
from grpo_lib.rewards.runner import check_failures
from grpo_lib.rewards.scoring import reward_summary, reward_table
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from tasks.base import Stage, stage_task

REWARD = StageSpec(name="reward", version=1, reads=("reward", "data"))
GREEDY = StageSpec(name="greedy_reward", version=1, reads=("reward", "data"))


@stage_task(REWARD, role="score")
def reward(stage: Stage, prompts: list[ArtifactRef], rollouts: ArtifactRef) -> ArtifactRef:
    """Judges every response; what can't be judged is null with a reason."""
    return _judge(stage, prompts, rollouts)


@stage_task(GREEDY, role="score")
def greedy_reward(stage: Stage, prompts: list[ArtifactRef], rollouts: ArtifactRef) -> ArtifactRef:
    """Judges the greedy response to each prompt."""
    return _judge(stage, prompts, rollouts)


def _judge(stage: Stage, prompts: list[ArtifactRef], rollouts: ArtifactRef) -> ArtifactRef:
    function = get_problem(stage.config.data.problem).make_reward(stage.config.data, stage.config.reward)
    texts = stage.table(rollouts)
    table, scores = reward_table(
        stage.table(prompts), texts, function, lambda done: stage.advanced(done, texts.num_rows)
    )
    check_failures(scores, stage.config.reward.max_failed)
    return stage.commit(table, summary=reward_summary(scores))
