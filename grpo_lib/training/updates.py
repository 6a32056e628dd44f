"""The update of one iteration, from committed datasets; used by the stage, and by the replay after a crash."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import torch

from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.kl import kl_estimator
from grpo_lib.algorithms.losses import LOSSES
from grpo_lib.algorithms.registry import call
from grpo_lib.algorithms.rollout_correction import correct_rows
from grpo_lib.config_algorithm import AlgorithmConfig
from grpo_lib.data.columns import flat_column, ragged_column, same_rows
from grpo_lib.data.ragged import Ragged
from grpo_lib.data.schemas import UPDATES
from grpo_lib.recipe import aggregation_of, correction_of, full_kl
from grpo_lib.seeds import derive_seed
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef, StageStore
from grpo_lib.training.base import Batching, KlTerm, Objective, StepMetrics, UpdateBatch
from grpo_lib.training.microbatches import Sequences
from grpo_lib.training.scoring import Progress
from grpo_lib.training.trainer import Trainer

UPDATE = StageSpec(
    name="update",
    version=4,
    reads=(
        "algorithm.loss",
        "algorithm.loss_options",
        "algorithm.aggregation",
        "algorithm.kl",
        "algorithm.entropy_coef",
        "algorithm.old_logprobs",
        "algorithm.rollout_correction",
        "trainer",
        "critic",
        "decay_steps",
        "model.dtype",
        "rollout.temperature",
        "rollout.max_new_tokens",
        "seed",
    ),
)


def run_update(
    trainer: Trainer,
    stages: StageStore,
    inputs: Sequence[ArtifactRef],
    config: Any,
    iteration: int,
    on_progress: Progress | None = None,
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
        max_kl=config.trainer.max_kl,
        train_policy=config.critic is None or iteration >= config.critic.warmup_iterations,
    )
    return trainer.update(batch, objective(config), batching, on_progress)


def objective(config: Any) -> Objective:
    """The configured loss as functions of tensors."""
    algorithm: AlgorithmConfig = config.algorithm
    loss, aggregate = LOSSES[algorithm.loss], AGGREGATIONS[aggregation_of(algorithm)].function
    longest = config.rollout.max_new_tokens
    correction = None
    if algorithm.old_logprobs == "bypass" and algorithm.rollout_correction.active:
        correction = partial(correct_rows, **correction_of(algorithm.rollout_correction))
    return Objective(
        policy_loss=loss.bind(algorithm.loss_options, "algorithm.loss_options"),
        select=loss.bind_helper(algorithm.loss_options, "algorithm.loss_options"),
        zero_without_advantage=bool(loss.traits.get("zero_without_advantage", True)),
        aggregation=lambda mask, offsets: call(
            aggregate, SimpleNamespace(mask=mask, offsets=offsets, max_response_length=longest)
        ),
        kl=_kl_term(algorithm),
        entropy_coef=algorithm.entropy_coef,
        temperature=config.rollout.temperature,
        correction=correction,
    )


def _kl_term(algorithm: AlgorithmConfig) -> KlTerm | None:
    kl = algorithm.kl
    if kl.coef == 0 or kl.place != "loss":
        return None
    return KlTerm(
        coef=kl.coef,
        estimator=None if full_kl(algorithm) else kl_estimator(kl.estimator),
        straight_through=kl.estimator.endswith("+"),
        importance=kl.importance,
    )


def update_batch(stages: StageStore, inputs: Sequence[ArtifactRef]) -> UpdateBatch:
    """Joins the datasets of one iteration by position; rows that the filters drew several times stand several times."""

    def read(stage: str) -> pa.Table | None:
        refs = [ref for ref in inputs if ref.stage == stage]
        return stages.table(refs) if refs else None

    prompts, rollouts, advantages = read("prompts"), read("rollout"), read("advantage")
    old, ref, values = read("old_logprobs"), read("ref_logprobs"), read("values")
    assert prompts is not None, "no prompts among the inputs"
    assert rollouts is not None, "no rollouts among the inputs"
    assert advantages is not None, "no advantages among the inputs"
    for table, name in (
        (advantages, "advantage"),
        (old, "old_logprobs"),
        (ref, "ref_logprobs"),
        (values, "values"),
    ):
        if table is not None:
            same_rows(rollouts, table, name)

    def optional(table: pa.Table | None, name: str) -> Ragged | None:
        return None if table is None or name not in table.column_names else ragged_column(table, name)

    batch = UpdateBatch(
        sequences=sequences(prompts, rollouts),
        mask=ragged_column(advantages, "response_mask"),
        advantages=ragged_column(advantages, "advantages"),
        old_logprobs=ragged_column(rollouts, "rollout_logprobs") if old is None else ragged_column(old, "old_logprobs"),
        ref_logprobs=optional(ref, "ref_logprobs"),
        group_ids=flat_column(rollouts, "group_id"),
        row_seeds=flat_column(rollouts, "seed"),
        is_weights=optional(advantages, "is_weights"),
        values=optional(values, "values"),
        returns=optional(advantages, "returns"),
    )
    if "copies" not in advantages.column_names:
        return batch
    copies = flat_column(advantages, "copies").long()
    return batch.gather(torch.repeat_interleave(torch.arange(len(copies)), copies))


def sequences(prompts: pa.Table, rollouts: pa.Table) -> Sequences:
    """Prompt and response ids of every rollout."""
    return Sequences(
        prompts=ragged_column(prompts, "prompt_ids"),
        responses=ragged_column(rollouts, "response_ids"),
        prompt_of=flat_column(rollouts, "prompt_row").long(),
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
    """Means over the iteration's optimizer steps; extremes of the ratio; sums of work; the last learning rate."""
    names = sorted({name for step in steps for name in step.values})
    summary: dict[str, float] = {}
    for name in names:
        values = [step.values[name] for step in steps if name in step.values]
        match name:
            case "ratio_min":
                summary[name] = min(values)
            case "ratio_max":
                summary[name] = max(values)
            case "skipped" | "critic_skipped" | "stopped_early" | "model_tokens" | "model_tflop":
                summary[name] = sum(values)
            case "lr":
                summary[name] = values[-1]
            case _:
                summary[name] = sum(values) / len(values)
    return {name: value for name, value in summary.items() if value == value and abs(value) != float("inf")}
