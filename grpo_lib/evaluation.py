"""Held-out accuracy of a policy: every sample as a dataset, and a summary overall and per data source."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from grpo_lib.algorithms.evaluation import maj_at_k, pass_at_k, standard_error
from grpo_lib.data.columns import list_array, ragged_column
from grpo_lib.data.schemas import EVALUATION, TOKENS
from grpo_lib.generation.agents import Agent, respond
from grpo_lib.generation.base import Engine, Request, Sampling
from grpo_lib.generation.rollouts import decode, failures, finish_reasons
from grpo_lib.rewards.judges import Reward
from grpo_lib.rewards.scoring import reward_table
from grpo_lib.seeds import row_seeds
from grpo_lib.types import CORRECT


def evaluate_mode(
    engine: Engine,
    prompts: pa.Table,
    tokenizer: Any,
    reward: Reward,
    *,
    mode: str,
    samples: int,
    sampling: Sampling,
    seed: int,
    agent: Agent | None = None,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> pa.Table:
    """``samples`` judged responses to each held-out prompt, in one mode (``greedy`` or ``sampled``)."""
    ids = ragged_column(prompts, "prompt_ids")
    count = prompts.num_rows * samples
    seeds = torch.from_numpy(row_seeds(seed, 0, count))
    request = Request(prompts=ids, seeds=seeds, n=samples, sampling=sampling)
    made = respond(engine, request, agent, on_progress)
    responses = made.responses
    prompt_row = np.repeat(np.arange(prompts.num_rows), samples)
    generated = pa.table(
        {
            "rollout_id": pa.array(np.arange(count)).cast(pa.string()),
            "prompt_row": pa.array(prompt_row),
            "response_ids": list_array(responses, TOKENS),
            "finish_reason": finish_reasons(made),
            "failure": failures(made),
            "text": pa.array(decode(tokenizer, responses)),
        }
    )
    all_of_them = reward.settings.model_copy(update={"max_failed": 1.0})  # failures are counted here, and stop nothing
    rewards, scores = reward_table(prompts, generated, replace(reward, settings=all_of_them))
    said = scores.components.get(CORRECT, [None] * count)
    correct = [value if each is None else each for each, value in zip(said, scores.values, strict=True)]
    theirs = prompts.take(pa.array(prompt_row))
    columns = {
        "prompt_id": theirs.column("prompt_id"),
        "data_source": theirs.column("data_source"),
        "mode": pa.repeat(mode, count),
        "sample": pa.array(np.tile(np.arange(samples, dtype=np.int32), prompts.num_rows)),
        "prompt": theirs.column("prompt"),
        "text": generated.column("text"),
        "reference": theirs.column("reference"),
        "response_ids": generated.column("response_ids"),
        "finish_reason": generated.column("finish_reason"),
        "value": rewards.column("value"),
        "correct": pa.array([None if each is None else each >= 1.0 for each in correct], type=pa.bool_()),
        "answer": pa.array(scores.answers, type=pa.string()),
        "reason": rewards.column("reason"),
    }
    return pa.table(columns, schema=EVALUATION)


def evaluation_summary(table: pa.Table, ks: Sequence[int]) -> dict[str, float]:
    """Accuracy (mean@n) with its standard error over prompts, pass@k, maj@k, reward, length and truncation.

    By mode and source. Names are ``sampled_accuracy``, ``greedy_length_mean``, ``pass_at_2``, ``maj_at_2`` ...; with
    several sources also ``<source>/sampled_accuracy`` ... Responses whose reward could not be computed are left out and
    counted.
    """
    summary = _of_rows(table, ks)
    sources = pc.unique(table.column("data_source")).to_pylist()
    if len(sources) > 1:
        for source in sources:
            rows = table.filter(pc.equal(table.column("data_source"), source))
            summary |= {f"{source}/{name}": value for name, value in _of_rows(rows, ks).items()}
    return summary


def _of_rows(table: pa.Table, ks: Sequence[int]) -> dict[str, float]:
    summary: dict[str, float] = {}
    for mode in pc.unique(table.column("mode")).to_pylist():
        rows = table.filter(pc.equal(table.column("mode"), mode))
        lengths = pc.list_value_length(rows.column("response_ids"))
        summary[f"{mode}_length_mean"] = float(pc.mean(lengths).as_py())
        summary[f"{mode}_truncated_fraction"] = pc.mean(pc.equal(rows.column("finish_reason"), "length")).as_py()
        judged = rows.filter(pc.is_valid(rows.column("correct")))
        summary[f"{mode}_failed_fraction"] = 1 - judged.num_rows / rows.num_rows
        if judged.num_rows == 0:
            continue
        summary[f"{mode}_reward_mean"] = pc.mean(judged.column("value")).as_py()
        groups = judged.group_by("prompt_id", use_threads=False)
        by_prompt = groups.aggregate([("correct", "sum"), ("correct", "count")])
        correct = by_prompt.column("correct_sum").to_numpy().astype(np.int64)
        count = by_prompt.column("correct_count").to_numpy().astype(np.int64)
        summary[f"{mode}_accuracy"] = float(correct.sum() / count.sum())
        summary[f"{mode}_accuracy_se"] = standard_error(correct / count)
        if mode == "sampled":
            for k in ks:
                enough = count >= k
                if enough.any():
                    summary[f"pass_at_{k}"] = float(pass_at_k(count[enough], correct[enough], k).mean())
            summary |= _majority(judged, ks)
    return summary


def _majority(judged: pa.Table, ks: Sequence[int]) -> dict[str, float]:
    """maj@k for k above 1, where the reward function says what a response answers."""
    if judged.column("answer").null_count == judged.num_rows:
        return {}
    ordered = judged.sort_by("sample")
    prompts = ordered.column("prompt_id").combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    answers = ordered.column("answer").combine_chunks().dictionary_encode().indices.fill_null(-1).to_numpy()
    correct = ordered.column("correct").to_numpy().astype(bool)
    votes = (prompts, answers.astype(np.int64), correct)
    return {f"maj_at_{k}": float(maj_at_k(*votes, k).mean()) for k in ks if k > 1}
