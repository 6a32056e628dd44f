"""Rows into micro-batches of at most so many tokens, dealt to ranks.

Padded, rows of nearly equal length share a rectangle. Packed, rows stand one after another without padding, and
attention keeps them apart (``attention.py``). What is padded is known from lengths, never from token values. The
gradient does not depend on the cut (``algorithms/aggregation.py``).
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_lib.data.ragged import Ragged, concat_rows, repeat_rows
from grpo_lib.errors import ConfigError
from grpo_lib.training.rectangles import PackedRows

Layout = Literal["padded", "packed"]


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Prompts and the responses to score, row by row."""

    prompts: Ragged
    """Token ids, ``[B]`` rows of at least one token."""
    responses: Ragged
    """Token ids, ``[B]`` rows of at least one token."""

    def gather(self, rows: Tensor) -> "Sequences":
        return Sequences(prompts=self.prompts.gather(rows), responses=self.responses.gather(rows))


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """``b`` rows for the model; of none a single token that predicts nothing, so that a rank without rows runs too."""

    rows: Tensor
    """``int64[b]``: rows of the sequences, longest first."""
    input_ids: Tensor
    """``int64[b, L]``, padded on the right with 0: causal attention keeps real tokens from seeing the padding.
    Packed ``int64[1, T]``: the rows one after another."""
    predicts: Tensor
    """``int64[n]``: positions in ``input_ids.flatten()`` whose output predicts a response token."""
    targets: Tensor
    """``int64[n]``: those response tokens, row by row."""
    offsets: Tensor
    """``int64[b+1]``: of the rows in ``targets``."""
    position_ids: Tensor | None
    """``int64[1, T]``, packed only: each row begins at 0."""
    row_offsets: Tensor | None
    """``int32[b+1]``, packed only: of the rows in ``input_ids``."""
    longest: int
    """Tokens of the longest row; at least 1."""
    tokens: int
    """Tokens of all rows, without padding."""

    @property
    def computed(self) -> int:
        """Tokens that the model computes, padding included."""
        return self.input_ids.numel()

    @cached_property
    def _packed_rows(self) -> PackedRows:
        assert self.row_offsets is not None
        return PackedRows(self.row_offsets)

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for the backbone of a Transformers model; packed, one of `use_packed_attention`."""
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "use_cache": False}
        if self.row_offsets is None:
            return inputs
        return inputs | {
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.row_offsets,
            "cu_seq_lens_k": self.row_offsets,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
            "packed_rows": self._packed_rows,
        }

    def to(self, device: torch.device) -> "MicroBatch":
        """The same with what the model reads on ``device``; row numbers and offsets stay on the CPU."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            predicts=self.predicts.to(device),
            targets=self.targets.to(device),
            position_ids=None if self.position_ids is None else self.position_ids.to(device),
            row_offsets=None if self.row_offsets is None else self.row_offsets.to(device),
        )


def plan(lengths: Tensor, max_tokens: int, layout: Layout, ranks: int = 1) -> list[list[Tensor]]:
    """Row indices ``int64[b]`` by rank and step: long rows first, every row once, and as many steps in each rank.

    Padded, ``b * longest <= max_tokens``; packed, the rows' tokens are at most ``max_tokens``. The ranks of one step
    have about the same work; one that has none gets no rows.

    Args:
        lengths: ``int64[B]``: tokens of each row.

    Raises:
        ConfigError: a row is longer than the budget.
    """
    if len(lengths) == 0:
        return [[] for _ in range(ranks)]
    order = torch.argsort(lengths, descending=True, stable=True)
    longest_first = lengths[order]
    if longest_first[0] > max_tokens:
        raise ConfigError(
            f"a row of {longest_first[0]} tokens does not fit into trainer.max_tokens={max_tokens}; raise it, "
            "or lower rollout.max_new_tokens"
        )
    cut = _rectangles if layout == "padded" else _packs
    chosen = [order[each] for each in cut(longest_first, max_tokens, ranks)]
    chosen += [order[:0]] * (-len(chosen) % ranks)
    return [chosen[rank::ranks] for rank in range(ranks)]


def _rectangles(longest_first: Tensor, max_tokens: int, ranks: int) -> list[Tensor]:
    """Consecutive rows, as many as fit; for several ranks the smallest budget that takes no further step."""
    lengths = longest_first.tolist()
    starts = _starts(lengths, max_tokens)
    if ranks > 1:
        most = -(-len(starts) // ranks) * ranks
        budgets = range(lengths[0], max_tokens)
        starts = _starts(
            lengths, lengths[0] + bisect_left(budgets, True, key=lambda b: len(_starts(lengths, b)) <= most)
        )
    parts = list(torch.arange(len(lengths)).tensor_split(starts[1:]))
    while len(parts) % ranks and len(parts) < len(lengths):
        largest = max(range(len(parts)), key=lambda i: (len(parts[i]) > 1) * len(parts[i]) * lengths[parts[i][0]])
        parts[largest : largest + 1] = parts[largest].tensor_split(2)
    return parts


def _starts(longest_first: list[int], max_tokens: int) -> list[int]:
    """The first row of each rectangle."""
    starts, start = [], 0
    while start < len(longest_first):
        starts.append(start)
        start += max_tokens // longest_first[start]
    return starts


def _packs(longest_first: Tensor, max_tokens: int, ranks: int) -> list[Tensor]:
    """Rows in about as few bins as hold them, of about equal tokens; fullest bin first."""
    lengths = longest_first.numpy()
    least = max(-(-int(lengths.sum()) // max_tokens), int((2 * lengths > max_tokens).sum()))  # no two of the latter fit
    count = -(-least // ranks) * ranks
    while (chosen := _dealt(lengths, max_tokens, count)) is None:
        count += ranks * max(1, count // (64 * ranks))  # few tries when there are many bins
    tokens = np.bincount(chosen, weights=lengths, minlength=count)
    fullest_first = np.argsort(-tokens, kind="stable")
    in_bins = torch.from_numpy(np.argsort(np.argsort(fullest_first)[chosen], kind="stable"))
    sizes = np.bincount(chosen, minlength=count)[fullest_first]
    return list(in_bins.split(sizes.tolist()))


def _dealt(lengths: NDArray[np.int64], max_tokens: int, count: int) -> NDArray[np.int64] | None:
    """The bin of each row: in rounds the longest rows left go to the emptiest bins; None: they don't all fit."""
    chosen = np.empty(len(lengths), dtype=np.int64)
    free, left = np.full(count, max_tokens), np.arange(len(lengths))
    while len(left):
        emptiest = np.argsort(-free, kind="stable")[: len(left)]
        candidates = left[: len(emptiest)]
        fits = lengths[candidates] <= free[emptiest]
        if not fits.any():
            shorter = np.flatnonzero(lengths[left] <= free[emptiest[0]])  # than those that find no place now
            if not len(shorter):
                return None
            candidates, emptiest, fits = left[shorter[:1]], emptiest[:1], np.array([True])
        rows, bins = candidates[fits], emptiest[fits]
        chosen[rows] = bins
        free[bins] -= lengths[rows]
        left = left[~np.isin(left, rows, assume_unique=True)]
    return chosen


def micro_batch(sequences: Sequences, rows: Tensor, layout: Layout = "padded") -> MicroBatch:
    """The given rows in a layout. The causal shift stands here and nowhere else."""
    chosen = sequences.gather(rows)
    tokens = concat_rows(chosen.prompts, chosen.responses) if len(rows) else _DUMMY
    longest = int(tokens.lengths.max())
    position_ids = row_offsets = None
    if layout == "packed":
        starts, row_offsets = tokens.offsets[:-1], tokens.offsets.int()
        input_ids = tokens.values[None].long()
        position_ids = (torch.arange(len(tokens.values)) - repeat_rows(starts, tokens.offsets))[None]
    else:
        starts, column = torch.arange(tokens.rows) * longest, torch.arange(longest)
        index = tokens.offsets[:-1, None] + column
        real = column < tokens.lengths[:, None]
        input_ids = torch.where(real, tokens.values[index.clamp(max=len(tokens.values) - 1)].long(), 0)
    # The first response token is predicted at the last prompt position, and so on.
    offsets = chosen.responses.offsets
    first = starts[: len(rows)] + chosen.prompts.lengths - 1
    return MicroBatch(
        rows=rows,
        input_ids=input_ids,
        predicts=repeat_rows(first - offsets[:-1], offsets) + torch.arange(int(offsets[-1])),
        targets=chosen.responses.values.long(),
        offsets=offsets,
        position_ids=position_ids,
        row_offsets=row_offsets,
        longest=longest,
        tokens=len(tokens.values) if len(rows) else 0,
    )


_DUMMY = Ragged(values=torch.tensor([0]), offsets=torch.tensor([0, 1]))
"""What a model runs on that has no rows."""
