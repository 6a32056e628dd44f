"""`prompts`: the prompts of an iteration."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from grpo_lib.data.columns import flat_column, same_rows
from grpo_lib.data.prompts import carry_on, take_prompts, take_rows
from grpo_lib.data.samplers import draw, effective_fraction, make_sampler, sampler_weights
from grpo_lib.data.selection import WAITING
from grpo_lib.seeds import derive_seed
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from tasks.base import Stage, stage_task
from tasks.dataset import split

PROMPTS = StageSpec(name="prompts", version=3, reads=("rollout.prompts", "rollout.sampler", "seed"))


@stage_task(PROMPTS)
def prompts(
    stage: Stage,
    dataset: ArtifactRef,
    previous: ArtifactRef | None = None,
    asked: list[ArtifactRef] | None = None,
    rollouts: list[ArtifactRef] | None = None,
    learned: ArtifactRef | None = None,
) -> ArtifactRef:
    """The next prompts of the shuffled training split, or those that a sampler chooses by what it has ``learned``.

    With filters an iteration may draw several batches (``stage.shard`` counts them), and ``previous``, the selection of
    the iteration before, says where they begin. With partial rollouts the prompts and rollouts of that iteration say
    which prompts go on; they come first.
    """
    train = split(stage.run.stages, dataset, "train")
    count = stage.config.rollout.prompts
    summary: dict[str, float] = {}
    if stage.config.rollout.sampler is None:
        first = stage.k * count if previous is None else stage.summary(previous)["next_prompt"]
        fresh = take_prompts(train, first=first + stage.shard * count, count=count, seed=stage.config.seed)
    else:
        weights = _weights(stage, train, learned)
        seed = derive_seed(stage.config.seed, "sampler", stage.k)
        fresh = take_rows(train, draw(weights, first=stage.shard * count, count=count, seed=seed))
        summary["effective_fraction"] = effective_fraction(weights)
    if previous is None or not rollouts or not asked:
        return stage.commit(fresh, summary=summary)
    selection, made = stage.table(previous), stage.table(rollouts)
    same_rows(made, selection, "filter")
    waiting = pc.equal(selection.column("reason"), WAITING).fill_null(False).to_numpy().astype(bool)
    rows = np.unique(flat_column(made, "prompt_row").numpy()[waiting])
    return stage.commit(carry_on(fresh, stage.table(asked), rows), summary=summary | {"carried": len(rows)})


def _weights(stage: Stage, train: pa.Table, learned: ArtifactRef | None) -> NDArray[np.float64]:
    plugins = stage.run.at(stage.name, stage.iteration, stage.shard).config.algorithm.plugins
    sampler = make_sampler(stage.config.rollout.sampler, plugins)
    return sampler_weights(sampler, None if learned is None else stage.table(learned), train)
