"""One shard of rollouts: what the engine generated, as a dataset."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from grpo_lib.data.columns import list_array, ragged_column
from grpo_lib.data.ragged import Ragged
from grpo_lib.data.schemas import FLOATS, MASK, ROLLOUTS, TOKENS
from grpo_lib.errors import NonFiniteError
from grpo_lib.generation.base import FINISH_REASONS, Engine, Generated, Progress, Request, Sampling
from grpo_lib.seeds import row_seeds


def generate_rollouts(
    engine: Engine,
    prompts: pa.Table,
    tokenizer: Any,
    *,
    first_prompt: int,
    samples: int,
    sampling: Sampling,
    seed: int,
    iteration: int,
    policy_version: int,
    on_progress: Progress | None = None,
) -> pa.Table:
    """``samples`` responses to each of ``prompts``, whose first is row ``first_prompt`` of the iteration's prompts.

    The seed of a row follows from its place in the iteration, not in the shard.
    """
    ids = ragged_column(prompts, "prompt_ids")
    count = prompts.num_rows * samples
    seeds = row_seeds(seed, first_prompt * samples, count)
    request = Request(prompts=ids, seeds=torch.from_numpy(seeds), n=samples, sampling=sampling)
    made = engine.generate(request, on_progress)
    if bool(torch.isnan(made.logprobs).any()):  # infinite ones are dropped, and counted, by the advantage stage
        raise NonFiniteError(
            f"engine {engine.name} gave log-probs that are NaN; the policy's weights are broken: "
            "resume from an earlier checkpoint with a lower trainer.optimizer.lr"
        )
    prompt_row = np.repeat(np.arange(first_prompt, first_prompt + prompts.num_rows, dtype=np.int32), samples)
    sample = np.tile(np.arange(samples), prompts.num_rows)
    responses = made.responses
    columns = {
        "rollout_id": rollout_ids(iteration, prompt_row, sample),
        "prompt_row": pa.array(prompt_row),
        "group_id": pa.array(prompt_row.astype(np.int64)),
        "response_ids": list_array(responses, TOKENS),
        "response_mask": list_array(responses.with_values(torch.ones(len(made.logprobs), dtype=torch.uint8)), MASK),
        "rollout_logprobs": list_array(responses.with_values(made.logprobs), FLOATS),
        "finish_reason": finish_reasons(made),
        "seed": pa.array(seeds),
        "temperature": pa.repeat(pa.scalar(sampling.temperature, pa.float32()), count),
        "policy_version": pa.repeat(pa.scalar(policy_version, pa.int32()), count),
        "weights_digest": pa.repeat(engine.digest(), count),
        "text": pa.array(decode(tokenizer, responses)),
    }
    return pa.table(columns, schema=ROLLOUTS)


def rollout_ids(iteration: int, prompt_row: np.ndarray, sample: np.ndarray) -> pa.Array:
    """``"7-12-3"``: iteration, prompt, sample."""
    parts = [pc.cast(pa.array(numbers), pa.string()) for numbers in (prompt_row, sample)]
    return pc.binary_join_element_wise(pa.repeat(str(iteration), len(prompt_row)), *parts, "-")


def finish_reasons(made: Generated) -> pa.Array:
    return pa.array(FINISH_REASONS).take(pa.array(made.finish.numpy()))


def decode(tokenizer: Any, responses: Ragged) -> list[str]:
    """Text of every response, for people and rewards."""
    rows = np.split(responses.values.numpy(), responses.offsets[1:-1].numpy())
    return tokenizer.batch_decode([row.tolist() for row in rows], skip_special_tokens=True)


def rollout_summary(table: pa.Table) -> dict[str, float]:
    """Lengths, truncation and surprise of some rollouts."""
    lengths = pc.list_value_length(table.column("response_ids"))
    logprobs = ragged_column(table, "rollout_logprobs").values
    return {
        "length_mean": float(pc.mean(lengths).as_py()),
        "length_max": float(pc.max(lengths).as_py()),
        "truncated_fraction": float(pc.mean(pc.equal(table.column("finish_reason"), "length")).as_py()),
        "surprise": -float(logprobs[logprobs.isfinite()].double().mean().nan_to_num()),
    }
