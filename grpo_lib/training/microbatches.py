"""Rows into micro-batches of at most so many tokens, dealt to ranks.

Padded, rows of nearly equal length share a rectangle. Packed, rows stand one after another without padding, those of
one prompt behind that prompt, which is computed once; attention keeps them apart (``attention.py``). What is padded is
known from lengths, never from token values. The gradient does not depend on the cut (``algorithms/aggregation.py``).
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_lib.data.ragged import Ragged, concat_rows, lengths_to_offsets, places, repeat_rows
from grpo_lib.errors import ConfigError
from grpo_lib.training.rectangles import PackedRows
from grpo_lib.training.row_gather import RowGather

Layout = Literal["padded", "packed"]


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Responses to score, and their prompts, which several may share."""

    prompts: Ragged
    """Token ids, ``[P]`` rows of at least one token."""
    responses: Ragged
    """Token ids, ``[B]`` rows of at least one token."""
    prompt_of: Tensor | None = None
    """``int64[B]``: the prompt of each response; None: each has its own, in order."""

    @property
    def prompt_rows(self) -> Tensor:
        """``prompt_of``, also where that is None."""
        return torch.arange(self.responses.rows) if self.prompt_of is None else self.prompt_of

    @property
    def prompt_lengths(self) -> Tensor:
        """``int64[B]``: of each response's prompt."""
        return self.prompts.lengths[self.prompt_rows]

    @property
    def lengths(self) -> Tensor:
        """``int64[B]``: of prompt and response."""
        return self.prompt_lengths + self.responses.lengths

    def gather(self, rows: Tensor) -> "Sequences":
        """The given responses with the prompts that they need."""
        needed, prompt_of = torch.unique(self.prompt_rows[rows], return_inverse=True)
        return Sequences(
            prompts=self.prompts.gather(needed), responses=self.responses.gather(rows), prompt_of=prompt_of
        )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """``b`` rows for the model; of none a single token that predicts nothing, so that a rank without rows runs too."""

    rows: Tensor
    """``int64[b]``: rows of the sequences; packed, those of one prompt are neighbours."""
    input_ids: Tensor
    """``int64[b, L]``, padded on the right with 0: causal attention keeps real tokens from seeing the padding.
    Packed ``int64[1, T]``: prompt by prompt, the prompt and then its responses."""
    predicting: RowGather
    """Of positions in ``input_ids.flatten()``: those whose outputs predict the response tokens."""
    targets: Tensor
    """``int64[n]``: those response tokens, row by row."""
    offsets: Tensor
    """``int64[b+1]``: of the rows in ``targets``."""
    position_ids: Tensor | None
    """``int64[1, T]``, packed only: each prompt begins at 0, and each response goes on from its prompt."""
    row_offsets: Tensor | None
    """``int32[b+1]``, packed only: of whole rows, each with its prompt, one after another."""
    row_tokens: Tensor | None
    """``int64[E]``: the tokens of whole rows, as places in ``input_ids``; None: these are whole rows already. It stays
    on the CPU, where what attention needs is derived from it."""
    longest: int
    """Tokens of the longest row; at least 1."""
    tokens: int
    """Tokens without padding, a shared prompt once."""
    squares: float
    """Twice the pairs of tokens of which one sees the other, those of a shared prompt once."""

    @property
    def predicts(self) -> Tensor:
        """``int64[n]``: those positions."""
        return self.predicting.source

    @property
    def computed(self) -> int:
        """Tokens that the model computes, padding included."""
        return self.input_ids.numel()

    @cached_property
    def _packed_rows(self) -> PackedRows:
        assert self.row_offsets is not None
        return PackedRows(self.row_offsets, self.row_tokens, self.input_ids.numel())

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
            predicting=self.predicting.to(device),
            targets=self.targets.to(device),
            position_ids=None if self.position_ids is None else self.position_ids.to(device),
            row_offsets=None if self.row_offsets is None else self.row_offsets.to(device),
        )


def plan_sequences(
    sequences: Sequences, max_tokens: int, layout: Layout, ranks: int = 1, rows: Tensor | None = None
) -> list[list[Tensor]]:
    """As `plan`; packed, whole groups or parts of them stay together, for which their prompt is computed once.

    Attention works on whole rows all the same. Those of a micro-batch have at most ``4 max_tokens`` tokens.

    Args:
        rows: ``int64[r]``: responses that are planned, each once; None: all.
    """
    rows = torch.arange(sequences.responses.rows) if rows is None else rows
    lengths, of_prompt = sequences.lengths[rows], sequences.prompt_rows[rows]
    used, of_prompt = torch.unique(of_prompt, return_inverse=True)
    if layout == "padded" or len(used) == len(lengths):
        return [[rows[step] for step in steps] for steps in plan(lengths, max_tokens, layout, ranks)]
    _check_longest(lengths, max_tokens)
    prompts = sequences.prompts.lengths[used].numpy()
    cost = torch.maximum(sequences.responses.lengths[rows], (lengths + 3) // 4).numpy()
    # Whole groups save most; parts of them fill micro-batches better, and give each rank its share.
    everything = int(prompts.sum() + cost.sum())
    largest = max_tokens if ranks == 1 else min(max_tokens, -(-everything // (4 * ranks)))
    plans = []
    for most in (largest, min(largest, max_tokens // 4)):
        unit, costs = _units(prompts, of_prompt.numpy(), cost, max(most, int(lengths.max())))
        found = plan(torch.from_numpy(costs), max_tokens, layout, ranks)
        plans.append((len(found[0]), int(costs.sum()), unit, found))
    _, _, unit, found = min(plans, key=lambda each: each[:2])
    by_unit = rows[torch.from_numpy(np.argsort(unit, kind="stable"))]
    members = Ragged(values=by_unit, offsets=lengths_to_offsets(torch.from_numpy(np.bincount(unit))))
    return [[members.gather(step).values for step in steps] for steps in found]


def _units(
    prompts: NDArray[np.int64], of_prompt: NDArray[np.int64], cost: NDArray[np.int64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of a prompt in as few even parts as cost no more than ``most`` each, the prompt included.

    Args:
        prompts: ``[P]``: lengths of prompts, each of which has rows.
        of_prompt: ``[B]``.
        cost: ``[B]``: of the rows; no prompt with one row has more than ``most`` tokens.

    Returns:
        The part of each row ``[B]``, and the cost of each part.
    """
    room = np.maximum(most - prompts, 1)  # 0 only with empty rows, which add nothing
    cost = np.minimum(cost, room[of_prompt])
    order = np.lexsort((-cost, of_prompt))
    counts = np.bincount(of_prompt)
    place = np.empty_like(of_prompt)  # among the rows of its prompt, the most expensive first
    place[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    parts = -(-np.bincount(of_prompt, weights=cost).astype(np.int64) // room)
    while True:
        mine = parts[of_prompt]
        turn = place % (2 * mine)  # dealt to and fro
        part = (np.cumsum(parts) - parts)[of_prompt] + np.minimum(turn, 2 * mine - 1 - turn)
        costs = np.bincount(part, weights=cost, minlength=int(parts.sum())).astype(np.int64)
        owner = np.repeat(np.arange(len(parts)), parts)
        full = costs > room[owner]
        if not full.any():
            return part, np.minimum(costs + prompts[owner], most)
        parts[np.unique(owner[full])] += 1


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
    _check_longest(lengths, max_tokens)
    order = torch.argsort(lengths, descending=True, stable=True)
    longest_first = lengths[order]
    cut = _rectangles if layout == "padded" else _packs
    chosen = [order[each] for each in cut(longest_first, max_tokens, ranks)]
    chosen += [order[:0]] * (-len(chosen) % ranks)
    return [chosen[rank::ranks] for rank in range(ranks)]


def _check_longest(lengths: Tensor, max_tokens: int) -> None:
    if len(lengths) and lengths.max() > max_tokens:
        raise ConfigError(
            f"a row of {lengths.max()} tokens does not fit into trainer.max_tokens={max_tokens}; raise it, "
            "or lower rollout.max_new_tokens"
        )


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
    if len(rows) == 0:
        return _without_rows(rows, layout)
    return (_packed if layout == "packed" else _padded)(sequences, rows)


def _packed(sequences: Sequences, rows: Tensor) -> MicroBatch:
    """Prompt by prompt, in the order in which the rows name them first."""
    prompt_of = sequences.prompt_rows[rows]
    first = torch.full((sequences.prompts.rows,), len(rows)).scatter_reduce(
        0, prompt_of, torch.arange(len(rows)), "amin"
    )
    order = torch.argsort(first[prompt_of], stable=True)
    rows, prompt_of = rows[order], prompt_of[order]
    needed, counts = torch.unique_consecutive(prompt_of, return_counts=True)
    prompts, responses = sequences.prompts.gather(needed), sequences.responses.gather(rows)
    row_bounds = lengths_to_offsets(counts)
    together = Ragged(values=responses.values, offsets=responses.offsets[row_bounds])  # the responses of each prompt
    tokens = concat_rows(prompts, together)
    of_row = repeat_rows(torch.arange(len(needed)), row_bounds)
    prompt_starts, prompt_lengths = tokens.offsets[:-1][of_row], prompts.lengths[of_row]
    # Before a response stand its prompt and the others, prompts and responses, that come earlier.
    starts = responses.offsets[:-1] + prompts.offsets[1:][of_row]
    response_places = places(responses.offsets, starts)
    row_offsets = responses.offsets + lengths_to_offsets(prompt_lengths)
    row_tokens = None
    if len(needed) < len(rows):
        prompt_offsets = lengths_to_offsets(prompt_lengths)
        row_tokens = concat_rows(
            Ragged(values=places(prompt_offsets, prompt_starts), offsets=prompt_offsets),
            Ragged(values=response_places, offsets=responses.offsets),
        ).values
    positions = places(prompts.offsets, torch.zeros_like(needed)), places(responses.offsets, prompt_lengths)
    position_ids = torch.empty_like(tokens.values, dtype=torch.int64)
    position_ids[places(prompts.offsets, tokens.offsets[:-1])], position_ids[response_places] = positions
    lengths = row_offsets.diff().double()
    shared = prompts.lengths.double().square().sum() - prompt_lengths.double().square().sum()
    return MicroBatch(
        rows=rows,
        input_ids=tokens.values[None].long(),
        predicting=_shifted(response_places, responses.offsets, prompt_starts + prompt_lengths - 1, len(tokens.values)),
        targets=responses.values.long(),
        offsets=responses.offsets,
        position_ids=position_ids[None],
        row_offsets=row_offsets.int(),
        row_tokens=row_tokens,
        longest=int(lengths.max()),
        tokens=len(tokens.values),
        squares=float(lengths.square().sum() + shared),
    )


def _padded(sequences: Sequences, rows: Tensor) -> MicroBatch:
    prompts, responses = sequences.prompts.gather(sequences.prompt_rows[rows]), sequences.responses.gather(rows)
    tokens = concat_rows(prompts, responses)
    longest = int(tokens.lengths.max())
    column = torch.arange(longest)
    index = tokens.offsets[:-1, None] + column
    real = column < tokens.lengths[:, None]
    starts = torch.arange(tokens.rows) * longest + prompts.lengths
    return MicroBatch(
        rows=rows,
        input_ids=torch.where(real, tokens.values[index.clamp(max=len(tokens.values) - 1)].long(), 0),
        predicting=_shifted(places(responses.offsets, starts), responses.offsets, starts - 1, real.numel()),
        targets=responses.values.long(),
        offsets=responses.offsets,
        position_ids=None,
        row_offsets=None,
        row_tokens=None,
        longest=longest,
        tokens=len(tokens.values),
        squares=float(tokens.lengths.double().square().sum()),
    )


def _shifted(response_places: Tensor, offsets: Tensor, last_of_prompt: Tensor, positions: int) -> RowGather:
    """The place before each response token; before the first one the prompt's last."""
    predicts, filled = response_places - 1, offsets.diff() > 0
    predicts[offsets[:-1][filled]] = last_of_prompt[filled]
    return RowGather.of(predicts, positions)


def _without_rows(rows: Tensor, layout: Layout) -> MicroBatch:
    """A single token that predicts nothing."""
    packed, nothing, token = layout == "packed", torch.zeros(0, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    return MicroBatch(
        rows=rows,
        input_ids=token,
        predicting=RowGather.of(nothing, 1),
        targets=nothing,
        offsets=torch.zeros(1, dtype=torch.int64),
        position_ids=token if packed else None,
        row_offsets=torch.tensor([0, 1], dtype=torch.int32) if packed else None,
        row_tokens=None,
        longest=1,
        tokens=0,
        squares=0.0,
    )
