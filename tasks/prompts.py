"""`prompts`: the prompts of an iteration."""

from grpo_lib.data.prompts import take_prompts
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from tasks.base import Stage, stage_task
from tasks.dataset import split

PROMPTS = StageSpec(name="prompts", version=1, reads=("rollout.prompts", "seed"))


@stage_task(PROMPTS)
def prompts(stage: Stage, dataset: ArtifactRef, previous: ArtifactRef | None = None) -> ArtifactRef:
    """The next prompts of the shuffled training split.

    With filters an iteration may draw several batches (``stage.shard`` counts them), and ``previous``, the selection of
    the iteration before, says where they begin.
    """
    train = split(stage.run.stages, dataset, "train")
    first = stage.k if previous is None else stage.summary(previous)["next_batch"]
    count = stage.config.rollout.prompts
    return stage.commit(take_prompts(train, batch=first + stage.shard, count=count, seed=stage.config.seed))
