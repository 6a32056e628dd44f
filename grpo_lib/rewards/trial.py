"""Reward functions tried on a few real samples, before any model is loaded."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from grpo_lib.errors import RewardError
from grpo_lib.rewards.judges import Judge, Reward
from grpo_lib.rewards.runner import score
from grpo_lib.types import Sample

COUNT = 3
"""Samples."""


def trial_samples(prompts: pa.Table, count: int = COUNT) -> list[Sample]:
    """Samples of the first prompts, each with a right answer if the data set brings one, else with the reference."""
    rows: list[dict[str, Any]] = prompts.slice(0, count).to_pylist()
    return [
        Sample(
            prompt=row["prompt"],
            response=row.get("demonstration") or row["reference"] or "",
            reference=row["reference"],
            data_source=row["data_source"],
            response_tokens=len((row.get("demonstration") or row["reference"] or "").split()),
            finish_reason="stop",
            prompt_id=row["prompt_id"],
        )
        for row in rows
    ]


def try_reward(reward: Reward, samples: Sequence[Sample]) -> None:
    """Every function judges the samples that are for it.

    Raises:
        RewardError: a function can't score any of them, with its reason; or nothing judges a sample.
    """
    for judge in reward.judges:
        theirs = [sample for sample in samples if judge.judges(sample.data_source)]
        if theirs:
            _try(judge, reward, theirs)
    lost = [each for each in samples if not any(judge.judges(each.data_source) for judge in reward.judges)]
    if lost:
        raise RewardError(
            f"no function of reward.functions judges data_source {lost[0].data_source!r} (prompt {lost[0].prompt_id}); "
            "add one, or leave data_sources out"
        )


def _try(judge: Judge, reward: Reward, samples: Sequence[Sample]) -> None:
    settings = reward.settings.model_copy(update={"max_failed": 1.0})
    scores = score(samples, replace(reward, judges=[judge], settings=settings))
    if all(value is None for value in scores.values):
        raise RewardError(
            f"reward function {judge.name!r} ({judge.place}) was tried on {len(samples)} real samples and scored none: "
            f"{scores.reasons[0]}. The first was prompt {samples[0].prompt_id} with the response "
            f"{samples[0].response[:160]!r} and the reference {samples[0].reference[:160]!r}"
        )
