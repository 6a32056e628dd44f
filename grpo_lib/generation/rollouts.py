"""One shard of rollouts: what the engine generated, as a dataset."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from grpo_lib.data.columns import flat_column, list_array, ragged_column
from grpo_lib.data.ragged import Ragged
from grpo_lib.data.schemas import FLOATS, MASK, PARTIAL_EXTRAS, ROLLOUT_EXTRAS, ROLLOUTS, TOKENS
from grpo_lib.errors import NonFiniteError
from grpo_lib.generation.agents import Agent, respond
from grpo_lib.generation.base import FINISH_REASONS, UNFINISHED, Budget, Engine, Generated, Progress, Request, Sampling
from grpo_lib.generation.episodes import Played
from grpo_lib.generation.partial import begun_rows, go_on, oldest
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
    agent: Agent | None = None,
    budget: Budget | None = None,
    earlier: pa.Table | None = None,
    on_progress: Progress | None = None,
) -> pa.Table:
    """``samples`` responses to each of ``prompts``, whose first is row ``first_prompt`` of the iteration's prompts.

    The seed of a row follows from its place in the iteration, not in the shard.

    Args:
        budget: rows that are unfinished when it is used up go on in the next iteration; None: all are finished.
        earlier: rollouts of the iteration before, some of which go on.
    """
    ids = ragged_column(prompts, "prompt_ids")
    count = prompts.num_rows * samples
    seeds = row_seeds(seed, first_prompt * samples, count)
    request = Request(prompts=ids, seeds=torch.from_numpy(seeds), n=samples, sampling=sampling, budget=budget)
    versions = None
    if budget is None:
        made = respond(engine, request, agent, on_progress)
    else:
        begun = begun_rows(prompts, earlier, samples)
        made, versions = go_on(engine, request, begun, policy_version, on_progress)
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
        "response_mask": list_array(responses.with_values(policy_mask(made).to(torch.uint8)), MASK),
        "rollout_logprobs": list_array(responses.with_values(made.logprobs), FLOATS),
        "finish_reason": finish_reasons(made),
        "seed": pa.array(seeds),
        "temperature": pa.repeat(pa.scalar(sampling.temperature, pa.float32()), count),
        "policy_version": pa.repeat(pa.scalar(policy_version, pa.int32()), count),
        "staleness": pa.repeat(pa.scalar(iteration - policy_version, pa.int32()), count),
        "weights_digest": pa.repeat(engine.digest(), count),
        "text": pa.array(decode(tokenizer, responses)),
    }
    extras: Sequence[pa.Field] = ()
    if isinstance(made, Played):
        extras, more = ROLLOUT_EXTRAS, agent_columns(made)
        columns |= more
    if versions is not None:
        extras = PARTIAL_EXTRAS
        first = oldest(versions, policy_version).numpy()
        columns |= {"policy_version": pa.array(first), "staleness": pa.array(iteration - first)}
        columns["token_versions"] = list_array(versions, TOKENS)
        going = pa.array((made.finish == UNFINISHED).numpy())
        columns["failure"] = pc.if_else(going, "unfinished", pa.scalar(None, pa.string()))
    return pa.table(columns, schema=pa.schema([*ROLLOUTS, *extras]))


def policy_mask(made: Generated) -> torch.Tensor:
    """``bool[N]``: tokens that the policy produced."""
    return torch.ones(len(made.logprobs), dtype=torch.bool) if made.mask is None else made.mask


def agent_columns(made: Generated) -> dict[str, pa.Array]:
    """``ROLLOUT_EXTRAS`` of rollouts that an agent played; nothing of others."""
    if not isinstance(made, Played) or made.turns is None:
        return {}
    numbers = {"turns": made.turns, "tool_calls": made.tool_calls, "tool_errors": made.tool_errors}
    return {name: pa.array(values.numpy()) for name, values in numbers.items()} | {"failure": failures(made)}


def failures(made: Generated) -> pa.Array:
    """Why rows failed, null for those that did not."""
    return pa.array(made.failures or [None] * len(made.finish), pa.string())


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
    """Lengths, truncation and surprise of some rollouts; of an agent's also turns, tools and failures."""
    lengths = pc.list_value_length(table.column("response_ids"))
    own = ragged_column(table, "response_mask").values.bool()
    logprobs = ragged_column(table, "rollout_logprobs").values[own]
    summary = {
        "length_mean": float(pc.mean(lengths).as_py()),
        "length_max": float(pc.max(lengths).as_py()),
        "truncated_fraction": float(pc.mean(pc.equal(table.column("finish_reason"), "length")).as_py()),
        "surprise": -float(logprobs[logprobs.isfinite()].double().mean().nan_to_num()),
    }
    if "token_versions" in table.column_names:
        going = pc.mean(pc.equal(table.column("finish_reason"), "unfinished")).as_py()
        versions = ragged_column(table, "token_versions").values
        older = (versions < versions.max()).double().mean() if len(versions) else 0.0
        return summary | {"unfinished_fraction": float(going), "older_tokens_fraction": float(older)}
    if "turns" not in table.column_names:
        return summary
    turns, calls, errors = (flat_column(table, name).double() for name in ("turns", "tool_calls", "tool_errors"))
    return summary | {
        "turns_mean": float(turns.mean()),
        "tool_calls_mean": float(calls.mean()),
        "tool_errors_fraction": float(errors.sum() / calls.sum().clamp(min=1)),
        "observation_fraction": 1 - float(own.double().mean()),
        "failed_fraction": 1 - table.column("failure").null_count / table.num_rows,
    }
