"""Reward functions tried on a few real samples, before any model is loaded."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from grpo_lib.algorithms.registry import nearest
from grpo_lib.errors import ConfigError
from grpo_lib.rewards.judges import Judge, Reward
from grpo_lib.rewards.runner import score
from grpo_lib.types import Sample

COUNT = 3
"""Samples of each data source."""


def trial_samples(prompts: pa.Table, count: int = COUNT) -> list[Sample]:
    """Samples of the first prompts of each data source, each with a right answer if the data set brings one, else with
    the reference; their tokens are words, all with the id 0.
    """
    sources = prompts.column("data_source").combine_chunks()
    rows: list[dict[str, Any]] = []
    for source in pc.unique(sources):
        rows += prompts.take(pc.indices_nonzero(pc.equal(sources, source))[:count]).to_pylist()
    samples = []
    for row in rows:
        response = row.get("demonstration") or row["reference"] or ""
        words = len(response.split())
        samples.append(
            Sample(
                prompt=row["prompt"],
                response=response,
                reference=row["reference"],
                data_source=row["data_source"],
                response_tokens=words,
                finish_reason="stop",
                prompt_id=row["prompt_id"],
                response_ids=[0] * words,
                metadata=json.loads(row.get("metadata") or "{}"),
            )
        )
    return samples


def try_reward(reward: Reward, samples: Sequence[Sample]) -> None:
    """Every function judges the samples that are for it.

    Raises:
        ConfigError: a function can't score any sample of a source, with its reason; nothing judges a sample; or a
            function is for a source that no prompt has.
    """
    there = {sample.data_source: None for sample in samples}
    for place, judge in enumerate(reward.judges):
        for name in judge.data_sources or ():
            if name not in there:
                where = f"reward.functions[{place}].data_sources"
                raise ConfigError(f"{where}: no prompt has the data_source {name!r}; {nearest(name, there)}")
    for judge in reward.judges:
        for source in there:
            if judge.judges(source):
                _try(judge, reward, [sample for sample in samples if sample.data_source == source])
    lost = [each for each in samples if not any(judge.judges(each.data_source) for judge in reward.judges)]
    if lost:
        raise ConfigError(
            f"no function of reward.functions judges data_source {lost[0].data_source!r} (prompt {lost[0].prompt_id}); "
            "add one, or leave data_sources out"
        )


def _try(judge: Judge, reward: Reward, samples: Sequence[Sample]) -> None:
    settings = reward.settings.model_copy(update={"max_failed": 1.0})
    scores = score(samples, replace(reward, judges=[judge], settings=settings))
    if all(value is None for value in scores.values):
        raise ConfigError(
            f"reward function {judge.name!r} ({judge.place}) was tried on {len(samples)} real samples and scored none: "
            f"{scores.reasons[0]}. The first was prompt {samples[0].prompt_id} with the response "
            f"{samples[0].response[:160]!r} and the reference {samples[0].reference[:160]!r}"
        )
