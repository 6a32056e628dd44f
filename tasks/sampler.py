"""`sampler`: what a curriculum has learned of the prompts."""

from grpo_lib.data.samplers import make_sampler, outcomes_of
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from tasks.base import Stage, stage_task

SAMPLER = StageSpec(name="sampler", version=1, reads=("rollout.sampler",))


@stage_task(SAMPLER)
def sampler(
    stage: Stage,
    prompts: list[ArtifactRef],
    rollouts: list[ArtifactRef],
    rewards: list[ArtifactRef],
    previous: ArtifactRef | None,
) -> ArtifactRef:
    """From the outcomes of the iteration before and what was known by then."""
    config = stage.run.at(stage.name, stage.iteration).config
    learner = make_sampler(stage.config.rollout.sampler, config.algorithm.plugins)
    known = None if previous is None else stage.table(previous)
    outcomes = outcomes_of(stage.table(prompts), stage.table(rollouts), stage.table(rewards))
    return stage.commit(learner.learn(known, outcomes))
