"""The update of one iteration, from committed datasets; used by the stage, and by the replay after a crash."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.kl import KL_ESTIMATORS
from grpo_lib.algorithms.losses import LOSSES
from grpo_lib.data.columns import flat_column, ragged_column, same_rows
from grpo_lib.data.schemas import UPDATES
from grpo_lib.seeds import derive_seed
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef, StageStore
from grpo_lib.training.base import Batching, Objective, StepMetrics, Trainer, UpdateBatch
from grpo_lib.training.microbatches import Sequences

UPDATE = StageSpec(
    name="update",
    version=1,
    reads=(
        "algorithm",
        "trainer",
        "decay_steps",
        "model.dtype",
        "rollout.temperature",
        "rollout.max_new_tokens",
        "seed",
    ),
)


def run_update(
    trainer: Trainer, stages: StageStore, inputs: Sequence[ArtifactRef], config: Any, iteration: int
) -> list[StepMetrics]:
    """Runs the optimizer steps of ``iteration`` on ``trainer``, which must hold the iteration's policy.

    Args:
        inputs: of the stage, in any order: prompts, rollouts, advantages, and old and ref log-probs where used.
        config: the slice that ``UPDATE`` declares.
    """
    batch = update_batch(stages, inputs)
    batching = Batching(
        epochs=config.trainer.epochs,
        mini_batch_groups=config.trainer.mini_batch_prompts,
        max_tokens=config.trainer.max_tokens,
        seed=derive_seed(config.seed, "update", iteration),
        max_skipped=config.trainer.max_skipped,
    )
    return trainer.update(batch, objective(config), batching)


def objective(config: Any) -> Objective:
    """The configured loss as functions of tensors."""
    algorithm = config.algorithm
    aggregate = AGGREGATIONS[algorithm.aggregation]
    return Objective(
        policy_loss=partial(
            LOSSES[algorithm.loss],
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
        ),
        aggregation=lambda mask, offsets: aggregate(mask, offsets, config.rollout.max_new_tokens),
        kl=KL_ESTIMATORS[algorithm.kl.estimator],
        kl_coef=algorithm.kl.coef,
        entropy_coef=algorithm.entropy_coef,
        temperature=config.rollout.temperature,
    )


def update_batch(stages: StageStore, inputs: Sequence[ArtifactRef]) -> UpdateBatch:
    """Joins the datasets of one iteration by position."""

    def read(stage: str) -> pa.Table | None:
        refs = [ref for ref in inputs if ref.stage == stage]
        return stages.table(refs) if refs else None

    prompts, rollouts, advantages = read("prompts"), read("rollout"), read("advantage")
    old, ref = read("old_logprobs"), read("ref_logprobs")
    assert prompts is not None, "no prompts among the inputs"
    assert rollouts is not None, "no rollouts among the inputs"
    assert advantages is not None, "no advantages among the inputs"
    for table, name in ((advantages, "advantage"), (old, "old_logprobs"), (ref, "ref_logprobs")):
        if table is not None:
            same_rows(rollouts, table, name)
    return UpdateBatch(
        sequences=sequences(prompts, rollouts),
        mask=ragged_column(advantages, "response_mask"),
        advantages=ragged_column(advantages, "advantages"),
        old_logprobs=ragged_column(rollouts, "rollout_logprobs") if old is None else ragged_column(old, "old_logprobs"),
        ref_logprobs=None if ref is None else ragged_column(ref, "ref_logprobs"),
        group_ids=flat_column(rollouts, "group_id"),
    )


def sequences(prompts: pa.Table, rollouts: pa.Table) -> Sequences:
    """Prompt and response ids of every rollout."""
    rows = flat_column(rollouts, "prompt_row").long()
    return Sequences(
        prompts=ragged_column(prompts, "prompt_ids").gather(rows),
        responses=ragged_column(rollouts, "response_ids"),
    )


def update_table(steps: Sequence[StepMetrics]) -> pa.Table:
    """One row an optimizer step."""
    rows = [
        {
            "optimizer_step": step.optimizer_step,
            "epoch": step.epoch,
            "rows": step.rows,
            "tokens": step.tokens,
            "metric": list(step.values.items()),
        }
        for step in steps
    ]
    return pa.Table.from_pylist(rows, schema=UPDATES)


def update_summary(steps: Sequence[StepMetrics]) -> dict[str, float]:
    """Means over the iteration's optimizer steps; the extremes of the ratio; the last step's learning rate."""
    names = sorted({name for step in steps for name in step.values})
    summary: dict[str, float] = {}
    for name in names:
        values = [step.values[name] for step in steps if name in step.values]
        match name:
            case "ratio_min":
                summary[name] = min(values)
            case "ratio_max":
                summary[name] = max(values)
            case "skipped":
                summary[name] = sum(values)
            case "lr":
                summary[name] = values[-1]
            case _:
                summary[name] = sum(values) / len(values)
    return {name: value for name, value in summary.items() if value == value and abs(value) != float("inf")}
