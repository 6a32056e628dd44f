"""One shard of rollouts: what the engine generated as a dataset, and the proof that it came from the policy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from grpo_lib.data.columns import list_array, ragged_column
from grpo_lib.data.ragged import Ragged
from grpo_lib.data.schemas import FLOATS, MASK, ROLLOUTS, TOKENS
from grpo_lib.errors import NonFiniteError, ParityError
from grpo_lib.generation.base import FINISH_REASONS, Engine, Generated, Progress, Request, Sampling
from grpo_lib.seeds import row_seeds
from grpo_lib.training.microbatches import Sequences
from grpo_lib.training.updates import sequences


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


def check_parity(
    score: Callable[[Sequences], Ragged],
    digest: Callable[[], str],
    prompts: pa.Table,
    rollouts: pa.Table,
    *,
    engine: Engine,
    rows: int,
    max_mean: float,
    temperature: float,
) -> dict[str, float]:
    """Scores ``rows`` rollouts with the trainer and compares with what the engine reported.

    Args:
        score: log-probs of the trainer, at the rollouts' temperature.
        digest: of the weights that the trainer holds.

    Raises:
        ParityError: the mean absolute difference is above ``max_mean``: the engine holds other weights than the
            trainer, or its log-probs are of another distribution.
    """
    picked = np.unique(np.linspace(0, rollouts.num_rows - 1, min(rows, rollouts.num_rows)).astype(np.int64))
    chosen = rollouts.take(pa.array(picked))
    theirs = ragged_column(chosen, "rollout_logprobs").values
    ours = score(sequences(prompts, chosen))
    finite = theirs.isfinite()
    if not bool(finite.any()):
        raise ParityError(
            f"engine {engine.name!r} reports no finite log-prob in {len(picked)} rows; nothing was committed"
        )
    difference = (ours.values - theirs)[finite].abs().double()
    mean, largest = float(difference.mean()), float(difference.max())
    if not mean <= max_mean:
        raise ParityError(
            f"the log-probs of engine {engine.name!r} and of the trainer differ by {mean:.3g} on average and "
            f"{largest:.3g} at most (parity.max_mean={max_mean:g}, {len(picked)} rows, temperature {temperature:g}); "
            f"the engine holds weights {engine.digest()[:16]}, the trainer {digest()[:16]}. "
            "Nothing was committed. Different digests: the engine was not loaded; equal ones: its arithmetic or its "
            "sampling distribution differs (raise parity.max_mean only for reduced precision)"
        )
    return {"parity_mean": mean, "parity_max": largest}
