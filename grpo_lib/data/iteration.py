"""The committed datasets of one iteration, and their columns by the names that estimators and metrics use."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from grpo_lib.data.columns import flag_column, flat_column, ragged_column, same_rows
from grpo_lib.data.ragged import Ragged, lengths_to_offsets, segment_sum


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """Row by row the same rollouts; ``greedy`` and ``prompts`` have one row a prompt."""

    prompts: pa.Table
    rollouts: pa.Table
    rewards: pa.Table
    old: pa.Table | None = None
    ref: pa.Table | None = None
    values: pa.Table | None = None
    greedy: pa.Table | None = None
    """Rewards of the greedy responses."""
    selection: pa.Table | None = None
    """What the filters left."""

    def __post_init__(self) -> None:
        tables = {"reward": self.rewards, "old_logprobs": self.old, "ref_logprobs": self.ref, "values": self.values}
        for name, table in (tables | {"filter": self.selection}).items():
            if table is not None:
                same_rows(self.rollouts, table, name)

    @property
    def prompt_rows(self) -> Tensor:
        """``int64[B]``."""
        return flat_column(self.rollouts, "prompt_row").long()

    @property
    def truncated(self) -> Tensor:
        """``bool[B]``: cut at ``rollout.max_new_tokens``."""
        cut = pc.equal(self.rollouts.column("finish_reason"), "length")
        return torch.from_numpy(cut.to_numpy().astype(bool))

    @property
    def unfinished(self) -> Tensor:
        """``bool[B]``: to go on in the next iteration."""
        going = pc.equal(self.rollouts.column("finish_reason"), "unfinished")
        return torch.from_numpy(going.to_numpy().astype(bool))

    @property
    def used(self) -> Tensor | None:
        """``bool[B]``: rows that the filters left; None without filters."""
        return None if self.selection is None else flag_column(self.selection, "used")

    @property
    def old_logprobs(self) -> Ragged:
        """``float32[N]``: the anchor of the update; in bypass mode the engine's."""
        if self.old is None:
            return ragged_column(self.rollouts, "rollout_logprobs")
        return ragged_column(self.old, "old_logprobs")

    @property
    def copies(self) -> Tensor | None:
        """``int64[B]``: how often a row takes part in the update; None without filters."""
        return None if self.selection is None else flat_column(self.selection, "copies").long()

    def group_ids(self, grouping: Any) -> Tensor:
        """``int64[B]``: of a grouping that names columns of the prompts."""
        names = grouping.columns
        columns = [self.prompts.column(name).to_numpy() for name in names]
        return torch.from_numpy(np.ascontiguousarray(grouping.function(*columns), dtype=np.int64))[self.prompt_rows]


class Rows:
    """The rows of an iteration that belong to its statistics, by the names that estimators and metrics use.

    Args:
        data: the iteration.
        chosen: ``int64[b]``: those rows.
        scores: ``float64[b]``: their rewards, shaped.
        group_ids: ``int64[b]``.
        mask: ``bool[N]`` of all rows of the iteration.
        token_bonus: ``float64[N]`` of all rows: what counts at each token beside the scores, 0 where masked: scores of
            steps, less coefficient times KL where it is in the reward.
        is_weights: ``float32[N]`` of all rows.
    """

    def __init__(
        self,
        data: Iteration,
        chosen: Tensor,
        *,
        scores: Tensor,
        group_ids: Tensor,
        mask: Ragged,
        token_bonus: Tensor | None,
        is_weights: Tensor | None,
    ) -> None:
        self._data = data
        self._chosen = chosen
        self._all = len(chosen) == mask.rows
        self._scores = scores
        self.group_ids = group_ids
        kept = self._take(mask)
        self.mask, self.offsets, self.lengths = kept.values, kept.offsets, kept.lengths
        self._bonus = None if token_bonus is None else self._take(mask.with_values(token_bonus)).values
        self.is_weights = None if is_weights is None else self._take(mask.with_values(is_weights)).values
        self.advantages: Tensor | None = None
        """``float64[n]``, set when they are known."""

    def _take(self, column: Ragged) -> Ragged:
        return column if self._all else column.gather(self._chosen)

    def _column(self, table: pa.Table | None, name: str) -> Tensor:
        assert table is not None, f"no dataset with the column {name!r} was given"
        return self._take(ragged_column(table, name)).values

    @cached_property
    def valid_tokens(self) -> Tensor:
        return segment_sum(self.mask.long(), self.offsets)

    @cached_property
    def rewards(self) -> Tensor:
        return self._scores if self._bonus is None else self._scores + segment_sum(self._bonus, self.offsets)

    @cached_property
    def token_rewards(self) -> Tensor:
        """The score stands on the row's last token with mask 1; a row without one has no place for it."""
        tokens = torch.zeros(len(self.mask), dtype=torch.float64) if self._bonus is None else self._bonus.clone()
        filled = self.valid_tokens > 0
        last = lengths_to_offsets(self.valid_tokens)[1:][filled] - 1
        tokens[torch.nonzero(self.mask).squeeze(1)[last]] += self._scores[filled]
        return tokens

    @property
    def token_scores(self) -> Tensor:
        return self._column(self._data.rewards, "token_scores").double()

    @property
    def greedy_rewards(self) -> Tensor:
        assert self._data.greedy is not None, "no greedy rewards were given"
        return flat_column(self._data.greedy, "value")[self._data.prompt_rows][self._chosen]

    @property
    def component_names(self) -> tuple[str, ...]:
        return self._components[0]

    @property
    def components(self) -> Tensor:
        return self._components[1][:, self._chosen]

    @cached_property
    def _components(self) -> tuple[tuple[str, ...], Tensor]:
        return component_matrix(self._data.rewards)

    @property
    def values(self) -> Tensor:
        return self._column(self._data.values, "values")

    @property
    def old_logprobs(self) -> Tensor:
        return self._take(self._data.old_logprobs).values

    @property
    def sum_squared_probs(self) -> Tensor:
        return self._column(self._data.old, "sum_squared_probs")


def component_matrix(rewards: pa.Table) -> tuple[tuple[str, ...], Tensor]:
    """Names of the reward's components, and their values ``float64[K, B]``; NaN where a row has no such component."""
    column = rewards.column("components").combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    offsets = np.asarray(column.offsets)
    rows = np.repeat(np.arange(len(column)), np.diff(offsets))
    keys = column.keys.slice(offsets[0], offsets[-1] - offsets[0]).dictionary_encode()
    items = column.items.slice(offsets[0], offsets[-1] - offsets[0]).to_numpy(zero_copy_only=False)
    names = tuple(keys.dictionary.to_pylist())
    matrix = np.full((len(names), len(column)), np.nan)
    matrix[keys.indices.to_numpy(), rows] = items
    return names, torch.from_numpy(matrix)
