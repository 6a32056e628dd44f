"""`prompts`: the prompts of an iteration."""

import numpy as np
import pyarrow.compute as pc

from grpo_lib.data.columns import flat_column, same_rows
from grpo_lib.data.prompts import carry_on, take_prompts
from grpo_lib.data.selection import WAITING
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from tasks.base import Stage, stage_task
from tasks.dataset import split

PROMPTS = StageSpec(name="prompts", version=3, reads=("rollout.prompts", "seed"))


@stage_task(PROMPTS)
def prompts(
    stage: Stage,
    dataset: ArtifactRef,
    previous: ArtifactRef | None = None,
    asked: list[ArtifactRef] | None = None,
    rollouts: list[ArtifactRef] | None = None,
) -> ArtifactRef:
    """The next prompts of the shuffled training split.

    With filters an iteration may draw several batches (``stage.shard`` counts them), and ``previous``, the selection of
    the iteration before, says where they begin. With partial rollouts the prompts and rollouts of that iteration say
    which prompts go on; they come first.
    """
    train = split(stage.run.stages, dataset, "train")
    count = stage.config.rollout.prompts
    first = stage.k * count if previous is None else stage.summary(previous)["next_prompt"]
    fresh = take_prompts(train, first=first + stage.shard * count, count=count, seed=stage.config.seed)
    if previous is None or not rollouts or not asked:
        return stage.commit(fresh)
    selection, made = stage.table(previous), stage.table(rollouts)
    same_rows(made, selection, "filter")
    waiting = pc.equal(selection.column("reason"), WAITING).fill_null(False).to_numpy().astype(bool)
    rows = np.unique(flat_column(made, "prompt_row").numpy()[waiting])
    return stage.commit(carry_on(fresh, stage.table(asked), rows), summary={"carried": len(rows)})
