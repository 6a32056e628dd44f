"""Rollouts that go on: what an earlier policy left unfinished is continued by the present one.

Kimi Team, "Kimi k1.5: scaling reinforcement learning with LLMs", 2025, section 2.6 (partial rollouts).
"""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from grpo_lib.data.columns import flat_column, ragged_column
from grpo_lib.data.ragged import Ragged, concat_rows, lengths_to_offsets, repeat_rows
from grpo_lib.generation.base import FINISH_REASONS, UNFINISHED, Engine, Generated, Progress, Request


@dataclass(frozen=True, kw_only=True)
class Begun:
    """What there is of ``B`` rows already; fresh rows are empty and unfinished."""

    responses: Ragged
    logprobs: Tensor
    """``float32[N]``."""
    versions: Tensor
    """``int32[N]``: of the policy that drew each token."""
    finish: Tensor
    """``uint8[B]``."""


def begun_rows(prompts: pa.Table, earlier: pa.Table | None, samples: int) -> Begun:
    """Of ``samples`` rows of each prompt of a shard.

    Args:
        prompts: with ``carried_from`` where the iteration before left prompts unfinished.
        earlier: all rollouts of that iteration.
    """
    rows = prompts.num_rows * samples
    empty = Ragged(values=torch.empty(0, dtype=torch.int32), offsets=torch.zeros(rows + 1, dtype=torch.int64))
    nothing = Begun(
        responses=empty,
        logprobs=torch.empty(0),
        versions=torch.empty(0, dtype=torch.int32),
        finish=torch.full((rows,), UNFINISHED, dtype=torch.uint8),
    )
    if earlier is None or "carried_from" not in prompts.column_names:
        return nothing
    source = prompts.column("carried_from").fill_null(-1).to_numpy()
    places = np.flatnonzero(source >= 0)
    if len(places) == 0:
        return nothing
    their_prompt = flat_column(earlier, "prompt_row").numpy()
    # Rows of a prompt lie together, in the order of their samples.
    first = np.searchsorted(their_prompt, source[places])
    taken = torch.from_numpy((first[:, None] + np.arange(samples)).ravel())
    mine = torch.from_numpy((places[:, None] * samples + np.arange(samples)).ravel())
    ids, logprobs, versions = (
        ragged_column(earlier, name).gather(taken) for name in ("response_ids", "rollout_logprobs", "token_versions")
    )
    lengths = torch.zeros(rows, dtype=torch.int64)
    lengths[mine] = ids.lengths
    codes = pc.index_in(earlier.column("finish_reason"), value_set=pa.array(FINISH_REASONS)).to_numpy()
    finish = nothing.finish.clone()
    finish[mine] = torch.from_numpy(codes)[taken].to(torch.uint8)
    return Begun(
        responses=Ragged(values=ids.values, offsets=lengths_to_offsets(lengths)),  # prompts that go on come in order
        logprobs=logprobs.values,
        versions=versions.values,
        finish=finish,
    )


def go_on(
    engine: Engine, request: Request, begun: Begun, policy_version: int, on_progress: Progress | None
) -> tuple[Generated, Ragged]:
    """Generates what is missing of each row, within the request's budget.

    Returns:
        The whole rows, and the version of the policy at each of their tokens.
    """
    unfinished = (begun.finish == UNFINISHED).nonzero().squeeze(1)
    if len(begun.responses.values) == 0:
        new = engine.generate(request, on_progress)
    else:
        contexts = request.prompts.gather(unfinished // request.n)
        have = begun.responses.gather(unfinished)
        part = replace(
            request,
            prompts=concat_rows(contexts.with_values(contexts.values.int()), have),
            seeds=request.seeds[unfinished],
            n=1,
            limits=request.sampling.max_new_tokens - have.lengths,
        )
        new = engine.generate(part, on_progress)
    lengths = torch.zeros(len(begun.finish), dtype=torch.int64)
    lengths[unfinished] = new.responses.lengths
    offsets = lengths_to_offsets(lengths)

    def joined(old: Tensor, fresh: Tensor) -> Ragged:
        return concat_rows(begun.responses.with_values(old), Ragged(values=fresh, offsets=offsets))

    finish = begun.finish.clone()
    finish[unfinished] = new.finish
    responses = joined(begun.responses.values, new.responses.values)
    versions = joined(begun.versions, torch.full((len(new.logprobs),), policy_version, dtype=torch.int32))
    made = Generated(responses=responses, logprobs=joined(begun.logprobs, new.logprobs).values, finish=finish)
    return made, versions


def oldest(versions: Ragged, policy_version: int) -> Tensor:
    """``int32[B]``: the oldest policy that drew a token of each row; of an empty row the present one."""
    first = torch.full((versions.rows,), policy_version, dtype=torch.int32)
    rows = repeat_rows(torch.arange(versions.rows), versions.offsets)
    return first.scatter_reduce_(0, rows, versions.values, "amin")
