"""What the filters leave of an iteration's rows, and whether that is enough."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from grpo_lib.algorithms.registry import Entry, call
from grpo_lib.data.columns import flat_column, ragged_column
from grpo_lib.data.iteration import Iteration
from grpo_lib.data.ragged import dense_groups, group_max, group_statistics
from grpo_lib.data.schemas import SELECTION
from grpo_lib.seeds import derive_seed

WAITING = "unfinished"
"""Why rows are left out whose prompt has a response that goes on in the next iteration."""


@dataclass(frozen=True, kw_only=True)
class Filter:
    """A filter with its options set."""

    name: str
    function: Callable[..., Tensor]
    resamples: bool
    """It draws rows anew rather than dropping groups: it runs when the batch is full."""


@dataclass(frozen=True, kw_only=True)
class FilterRows:
    """Columns that a filter may name, of the rows that are left before it."""

    rewards: Tensor
    group_ids: Tensor
    lengths: Tensor
    truncated: Tensor
    seed: int


def selection_table(
    data: Iteration, filters: Sequence[Filter], grouping: Entry[Any], *, prompts_wanted: int | None, seed: int
) -> tuple[pa.Table, dict[str, float]]:
    """Which rows belong to the iteration, and how often each takes part in the update.

    The batch is full when ``prompts_wanted`` prompts have a row left; more are cut. None takes what there is. Prompts
    with an unfinished response wait, with all their responses.

    The summary's ``prompts_kept`` says how many there are (before the cut), ``full`` (0 or 1) whether that is enough.
    """
    rewards, group_ids = flat_column(data.rewards, "value").double(), data.group_ids(grouping)
    lengths = ragged_column(data.rollouts, "response_ids").lengths
    copies = (~torch.isnan(rewards)).long()
    reasons = np.full(len(rewards), None, dtype=object)
    reasons[copies.numpy() == 0] = "no reward"
    waiting = torch.isin(data.prompt_rows, data.prompt_rows[data.unfinished])
    copies[waiting], reasons[waiting.numpy()] = 0, WAITING

    def apply(each: Filter, place: int) -> None:
        left = torch.nonzero(copies).squeeze(1)
        rows = FilterRows(
            rewards=rewards[left],
            group_ids=group_ids[left],
            lengths=lengths[left],
            truncated=data.truncated[left],
            seed=derive_seed(seed, each.name, place),
        )
        copies[left] *= call(each.function, rows).long()
        reasons[left[copies[left] == 0].numpy()] = each.name

    for place, each in enumerate(filters):
        if not each.resamples:
            apply(each, place)
    kept = torch.unique(data.prompt_rows[copies > 0])
    full = len(kept) >= (prompts_wanted or 1)
    if full and prompts_wanted is not None:
        surplus = (data.prompt_rows > kept[prompts_wanted - 1]) & (copies > 0)
        copies[surplus] = 0
        reasons[surplus.numpy()] = "batch full"
    used = copies > 0
    if full:
        for place, each in enumerate(filters):
            if each.resamples:
                apply(each, place)
    columns = {
        "rollout_id": data.rollouts.column("rollout_id"),
        "used": pa.array(used.numpy()),
        "copies": pa.array(copies.numpy(), pa.int32()),
        "reason": pa.array(reasons, pa.string()),
    }
    summary = {
        "prompts_kept": float(len(kept)),
        "prompts_drawn": float(data.prompts.num_rows),
        "full": float(full),
        "rows_used_fraction": float(used.double().mean()),
    }
    if prompts_wanted is None:
        summary["waiting_fraction"] = float(waiting.double().mean())
    return pa.table(columns, schema=SELECTION), summary


def what_was_seen(data: Iteration, selection: pa.Table) -> str:
    """For the error of a batch that could not be filled: why rows went, and what rewards groups have."""
    reasons = Counter(reason for reason in selection.column("reason").to_pylist() if reason is not None)
    rewards = flat_column(data.rewards, "value").double()
    known = ~torch.isnan(rewards)
    group, groups = dense_groups(data.prompt_rows[known])
    constant = group_statistics(rewards[known], group).constant
    of_group = group_max(rewards[known].masked_fill(~constant, -torch.inf), group, groups)
    values = Counter(f"{value:g}" for value in of_group[of_group > -torch.inf].tolist())
    dropped = ", ".join(f"{count} rows by {reason!r}" for reason, count in reasons.most_common())
    equal = ", ".join(f"{count} with every reward {value}" for value, count in values.most_common(3))
    return f"dropped: {dropped or 'nothing'}; prompts with equal rewards: {equal or 'none'}"
