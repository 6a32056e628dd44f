"""Rewards of rollouts as a dataset."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_lib.data.columns import flat_column, ragged_column
from grpo_lib.data.schemas import REWARD_EXTRAS, REWARDS
from grpo_lib.rewards.judges import Reward
from grpo_lib.rewards.runner import Scores, digest_of, score
from grpo_lib.rewards.verdicts import NoReward, Verdict
from grpo_lib.types import RewardResult, Sample

Decode = Callable[[Sequence[int]], str]
"""Token ids to the text that reward functions see."""


def samples_of(prompts: pa.Table, rollouts: pa.Table) -> list[Sample]:
    """What the reward function sees of every rollout; ``prompt_row`` counts rows of ``prompts``."""
    theirs = prompts.take(pa.array(flat_column(rollouts, "prompt_row").numpy()))
    ids = ragged_column(rollouts, "response_ids")
    tokens, offsets = ids.values.numpy(), ids.offsets.tolist()

    def column(table: pa.Table, name: str, otherwise: Any) -> list[Any]:
        return table.column(name).to_pylist() if name in table.column_names else [otherwise] * table.num_rows

    columns = zip(
        theirs.column("prompt").to_pylist(),
        rollouts.column("text").to_pylist(),
        theirs.column("reference").to_pylist(),
        theirs.column("data_source").to_pylist(),
        rollouts.column("finish_reason").to_pylist(),
        column(rollouts, "failure", None),
        column(theirs, "prompt_id", ""),
        rollouts.column("rollout_id").to_pylist(),
        column(theirs, "metadata", None),
        strict=True,
    )
    return [
        Sample(
            prompt=prompt,
            response=text,
            reference=reference,
            data_source=source,
            response_tokens=offsets[row + 1] - offsets[row],
            finish_reason=finish,
            failure=failure,
            prompt_id=prompt_id,
            rollout_id=rollout_id,
            response_ids=tokens[offsets[row] : offsets[row + 1]],
            metadata={} if metadata is None else json.loads(metadata),
        )
        for row, (prompt, text, reference, source, finish, failure, prompt_id, rollout_id, metadata) in enumerate(
            columns
        )
    ]


def reward_table(
    prompts: pa.Table,
    rollouts: pa.Table,
    reward: Reward,
    on_progress: Callable[[int], None] | None = None,
    *,
    known: Mapping[tuple[str, str], Verdict] | None = None,
    decode: Decode | None = None,
) -> tuple[pa.Table, Scores]:
    """Scores every rollout; a reward that could not be computed, or of a rollout that failed, is null with a reason.

    Args:
        known: what was judged before, see `judged_before`.
        decode: finds the tokens that scores of steps belong to; without it there is no column ``token_scores``.
    """
    samples = samples_of(prompts, rollouts)
    digests = [digest_of(each) for each in samples] if known or reward.settings.functions else []
    scores = score(samples, reward, on_progress, known, digests)
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
    if reward.settings.functions:
        columns["verdicts"] = _verdict_column(samples, digests, reward, scores)
    if reward.settings.functions and decode is not None:
        columns["token_scores"] = _token_scores(samples, reward, scores, decode)
    extras = [field for field in REWARD_EXTRAS if field.name in columns]
    return pa.table(columns, schema=pa.schema([*REWARDS, *extras])), scores


def judged_before(tables: Iterable[pa.Table]) -> dict[tuple[str, str], Verdict]:
    """Results in earlier rewards, by the digests of function and sample; what failed is tried again."""
    known: dict[tuple[str, str], Verdict] = {}
    for table in tables:
        if "verdicts" not in table.column_names:
            continue
        rows = pc.list_flatten(table.column("verdicts").combine_chunks())
        names = ("function", "sample", "result")
        for function, sample, result in zip(*(pc.struct_field(rows, each).to_pylist() for each in names), strict=True):
            if result is not None:
                known[function, sample] = RewardResult(**json.loads(result))
    return known


def reward_summary(scores: Scores) -> dict[str, float]:
    """Means of reward and components over what could be scored, and the fraction that could not."""
    known = [value for value in scores.values if value is not None]
    judged = sum(scores.judged)
    summary = {"failed_fraction": 1 - len(known) / judged if judged else 0.0}
    if known:
        summary |= {"mean": sum(known) / len(known), "min": min(known), "max": max(known)}
    return summary | _component_means(scores.components)


def step_tokens(ids: Sequence[int], text: str, ends: Sequence[int], decode: Decode) -> list[int]:
    """Place of the token that holds the last character of each step.

    Args:
        ids: of the response.
        text: what they decode to.
        ends: number of characters up to the end of each step.
    """
    places = []
    for end in ends:
        low, high = 1, len(ids)
        while low < high:  # the fewest tokens whose text begins with the step's
            middle = (low + high) // 2
            if decode(ids[:middle])[:end] == text[:end]:
                high = middle
            else:
                low = middle + 1
        places.append(low - 1)
    return places


def _verdict_column(samples: Sequence[Sample], digests: Sequence[str], reward: Reward, scores: Scores) -> pa.Array:
    rows = []
    for place, sample in enumerate(samples):
        theirs = []
        for judge in reward.judges:
            verdict = scores.verdicts[judge.name][place] if judge.judges(sample.data_source) else None
            if verdict is None:
                continue
            result = None if isinstance(verdict, NoReward) else verdict
            theirs.append(
                {
                    "name": judge.name,
                    "function": judge.digest,
                    "sample": digests[place],
                    "value": None if result is None else result.value,
                    "reason": verdict.reason if isinstance(verdict, NoReward) else None,
                    "text": None if result is None else result.text,
                    "result": None if result is None else json.dumps(vars(result)),
                }
            )
        rows.append(theirs)
    return pa.array(rows, type=REWARD_EXTRAS.field("verdicts").type)


def _token_scores(samples: Sequence[Sample], reward: Reward, scores: Scores, decode: Decode) -> pa.Array:
    """Of all functions together, weighted; NaN where a token has none."""
    offsets = np.concatenate([[0], np.cumsum([sample.response_tokens for sample in samples])]).astype(np.int32)
    values = np.full(int(offsets[-1]), np.nan, dtype=np.float32)
    for judge in reward.judges:
        for place, verdict in enumerate(scores.verdicts[judge.name]):
            if not isinstance(verdict, RewardResult) or scores.values[place] is None:
                continue
            if not judge.judges(samples[place].data_source):
                continue
            row = values[offsets[place] : offsets[place + 1]]
            if verdict.token_scores is not None:
                row[:] = np.nan_to_num(row) + judge.weight * np.asarray(verdict.token_scores)
            elif verdict.step_scores is not None:
                sample, ends = samples[place], [end for end, _ in verdict.step_scores]
                tokens = step_tokens(list(sample.response_ids), sample.response, ends, decode)
                for token, (_, value) in zip(tokens, verdict.step_scores, strict=True):
                    row[token] = np.nan_to_num(row[token]) + judge.weight * value
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _component_means(components: Mapping[str, list[float | None]]) -> dict[str, float]:
    means = {}
    for name, values in components.items():
        known = [value for value in values if value is not None]
        if known:
            means[f"{name}_mean"] = sum(known) / len(known)
    return means
