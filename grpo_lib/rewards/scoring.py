"""Rewards of rollouts as a dataset."""

from collections.abc import Callable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from grpo_lib.data.columns import flat_column
from grpo_lib.data.schemas import REWARDS
from grpo_lib.rewards.runner import Scores, score
from grpo_lib.types import RewardFunction, Sample


def samples_of(prompts: pa.Table, rollouts: pa.Table) -> list[Sample]:
    """What the reward function sees of every rollout; ``prompt_row`` counts rows of ``prompts``."""
    theirs = prompts.take(pa.array(flat_column(rollouts, "prompt_row").numpy()))
    columns = zip(
        theirs.column("prompt").to_pylist(),
        rollouts.column("text").to_pylist(),
        theirs.column("reference").to_pylist(),
        theirs.column("data_source").to_pylist(),
        pc.list_value_length(rollouts.column("response_ids")).to_pylist(),
        rollouts.column("finish_reason").to_pylist(),
        rollouts.column("failure").to_pylist() if "failure" in rollouts.column_names else [None] * rollouts.num_rows,
        strict=True,
    )
    return [
        Sample(
            prompt=prompt,
            response=text,
            reference=reference,
            data_source=source,
            response_tokens=tokens,
            finish_reason=finish,
            failure=failure,
        )
        for prompt, text, reference, source, tokens, finish, failure in columns
    ]


def reward_table(
    prompts: pa.Table,
    rollouts: pa.Table,
    function: RewardFunction,
    on_progress: Callable[[int], None] | None = None,
) -> tuple[pa.Table, Scores]:
    """Scores every rollout; a reward that could not be computed, or of a rollout that failed, is null with a reason."""
    scores = score(samples_of(prompts, rollouts), function, on_progress)
    components = [
        [(name, values[row]) for name, values in scores.components.items() if values[row] is not None]
        for row in range(rollouts.num_rows)
    ]
    columns = {
        "rollout_id": rollouts.column("rollout_id"),
        "value": pa.array(scores.values, type=pa.float64()),
        "reason": pa.array(scores.reasons, type=pa.string()),
        "components": pa.array(components, type=REWARDS.field("components").type),
    }
    return pa.table(columns, schema=REWARDS), scores


def reward_summary(scores: Scores) -> dict[str, float]:
    """Means of reward and components over what could be scored, and the fraction that could not."""
    known = [value for value in scores.values if value is not None]
    judged = sum(scores.judged)
    summary = {"failed_fraction": 1 - len(known) / judged if judged else 0.0}
    if known:
        summary |= {"mean": sum(known) / len(known), "min": min(known), "max": max(known)}
    return summary | _component_means(scores.components)


def _component_means(components: Mapping[str, list[float | None]]) -> dict[str, float]:
    means = {}
    for name, values in components.items():
        known = [value for value in values if value is not None]
        if known:
            means[f"{name}_mean"] = sum(known) / len(known)
    return means
