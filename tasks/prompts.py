"""`prompts`: the prompts of an iteration."""

from grpo_lib.data.prompts import take_prompts
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from tasks.base import Stage, stage_task
from tasks.dataset import split

PROMPTS = StageSpec(name="prompts", version=1, reads=("rollout.prompts", "seed"))


@stage_task(PROMPTS)
def prompts(stage: Stage, dataset: ArtifactRef) -> ArtifactRef:
    """The next prompts of the shuffled training split."""
    train = split(stage.run.stages, dataset, "train")
    count = stage.config.rollout.prompts
    return stage.commit(take_prompts(train, iteration=stage.k, count=count, seed=stage.config.seed))
