"""Ragged tensors: one flat tensor of values plus row offsets, exactly as Arrow stores a list column.

Nothing is ever padded to the longest row. ``B`` is the number of rows, ``N`` the number of values; a *segment* is a
row's slice of the values. ``group_ids`` (``int64[B]``) say which rows belong together; they need not be adjacent.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """``B`` rows of different lengths."""

    values: Tensor
    """``[N]``, any dtype: the rows one after another."""
    offsets: Tensor
    """``int64[B+1]``: row ``i`` is ``values[offsets[i]:offsets[i+1]]``."""

    def __post_init__(self) -> None:
        assert self.offsets.dtype == torch.int64, f"offsets are int64, not {self.offsets.dtype}"
        assert int(self.offsets[0]) == 0, "offsets start at 0"
        assert int(self.offsets[-1]) == len(self.values), "offsets do not cover values"

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """``int64[B]``."""
        return self.offsets.diff()

    def row_ids(self) -> Tensor:
        """``int64[N]``: the row that each value belongs to."""
        return repeat_rows(torch.arange(self.rows, device=self.offsets.device), self.offsets)

    def with_values(self, values: Tensor) -> "Ragged":
        """The same rows holding other values."""
        return Ragged(values=values, offsets=self.offsets)

    def gather(self, rows: Tensor) -> "Ragged":
        """The given rows, in the given order.

        >>> r = Ragged(values=torch.tensor([1, 2, 3]), offsets=torch.tensor([0, 2, 3]))
        >>> r.gather(torch.tensor([1, 0])).values.tolist()
        [3, 1, 2]
        """
        offsets = lengths_to_offsets(self.lengths[rows])
        starts = repeat_rows(self.offsets[:-1][rows] - offsets[:-1], offsets)
        return Ragged(values=self.values[starts + torch.arange(len(starts), device=starts.device)], offsets=offsets)


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """``int64[B]`` -> ``int64[B+1]``."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def repeat_rows(values: Tensor, offsets: Tensor) -> Tensor:
    """One value a row ``[B]`` -> the row's value at each of its tokens ``[N]``. Differentiable."""
    return _RepeatRows.apply(values, offsets)


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each row, ``[N] -> [B]``; 0 for an empty row. Differentiable."""
    return _SegmentSum.apply(values, offsets)


class _RepeatRows(torch.autograd.Function):
    """On the CPU numpy's repeat is several times as fast as torch's, and makes no index of N integers."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        if values.is_cpu:
            return torch.from_numpy(np.repeat(values.numpy(), offsets.diff().numpy()))
        return torch.repeat_interleave(values, offsets.diff(), output_size=int(offsets[-1]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return segment_sum(gradients[0], ctx.saved_tensors[0]), None


class _SegmentSum(torch.autograd.Function):
    """On the CPU numpy's reduceat is several times as fast as adding by index."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        if values.is_cpu:
            return _reduce(np.add, values, offsets, 0)
        rows = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=values.device), offsets.diff())
        return torch.zeros(len(offsets) - 1, dtype=values.dtype, device=values.device).index_add(0, rows, values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return repeat_rows(gradients[0], ctx.saved_tensors[0]), None


def segment_mean(values: Tensor, offsets: Tensor) -> Tensor:
    """Mean of each row, ``[N] -> [B]``; 0 for an empty row. Differentiable."""
    return segment_sum(values, offsets) / offsets.diff().clamp(min=1)


def segment_std(values: Tensor, offsets: Tensor) -> Tensor:
    """Unbiased standard deviation of each row, ``[N] -> float64[B]``; 0 for a row of fewer than two values."""
    values = values.double()
    squares = (values - repeat_rows(segment_mean(values, offsets), offsets)).square()
    return (segment_sum(squares, offsets) / (offsets.diff() - 1).clamp(min=1)).sqrt()


def segment_max(values: Tensor, offsets: Tensor) -> Tensor:
    """Largest value of each row, ``[N] -> [B]``; ``-inf`` for an empty row. Without gradient."""
    if values.is_cpu:
        return _reduce(np.maximum, values, offsets, -np.inf)
    rows = repeat_rows(torch.arange(len(offsets) - 1, device=values.device), offsets)
    return values.new_full((len(offsets) - 1,), -torch.inf).scatter_reduce(0, rows, values.detach(), "amax")


def _reduce(operation: np.ufunc, values: Tensor, offsets: Tensor, empty: float) -> Tensor:
    """The ufunc over each row; ``reduceat`` itself knows no empty rows."""
    starts, numbers = offsets[:-1].numpy(), values.detach().numpy()
    filled = np.diff(offsets.numpy()) > 0
    if len(filled) and filled.all():
        return torch.from_numpy(operation.reduceat(numbers, starts))
    result = values.new_full((len(offsets) - 1,), empty)
    if filled.any():
        result.numpy()[filled] = operation.reduceat(numbers, starts[filled])
    return result


def reverse_scan(values: Tensor, offsets: Tensor, decay: float) -> Tensor:
    """``y_t = x_t + decay * y_{t+1}`` within each row, ``float64[N]``.

    A parallel scan by doubling: after the step ``s`` every ``y_t`` holds the terms up to ``t + 2s - 1``; so the
    number of steps is the logarithm of the longest row. Blocks of whole rows stay in the processor's cache.
    """
    result = torch.empty(len(values), dtype=torch.float64, device=values.device)
    for rows in row_blocks(offsets):
        tokens = slice(int(offsets[rows.start]), int(offsets[rows.stop]))
        inside = offsets[rows.start : rows.stop + 1] - tokens.start
        y = values[tokens].to(torch.float64, copy=True)  # worked on in place
        left = repeat_rows(inside[1:], inside) - torch.arange(len(y), device=y.device)  # to the row's end
        step, factor = 1, float(decay)
        longest = int(inside.diff().max()) if len(y) else 0
        while step < longest and factor != 0:
            y[:-step] += (factor * y[step:]).masked_fill_(left[:-step] <= step, 0.0)
            step, factor = 2 * step, factor * factor
        result[tokens] = y
    return result


BLOCK_TOKENS = 2**17
"""Tokens that a pass over columns works on at a time: what fits into a processor's cache."""


def row_blocks(offsets: Tensor, tokens: int = BLOCK_TOKENS) -> Iterator[slice]:
    """Slices of whole rows, each of at most ``tokens`` tokens or one row that is longer.

    >>> [(each.start, each.stop) for each in row_blocks(torch.tensor([0, 3, 4, 9]), tokens=4)]
    [(0, 2), (2, 3)]
    """
    rows, first, ends = len(offsets) - 1, 0, offsets.cpu().numpy()
    while first < rows:
        fits = int(np.searchsorted(ends, ends[first] + tokens, side="right")) - 1
        last = min(rows, max(first + 1, fits))
        yield slice(first, last)
        first = last


def spread_rows(values: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """One value a row ``[B]`` at each of its tokens with ``mask bool[N]``, 0 elsewhere: ``float32[N]``, no gradient."""
    result = torch.from_numpy(np.empty(len(mask), dtype=np.float32))
    values = values.detach().float()
    for rows in row_blocks(offsets):  # no temporary of N values
        tokens = slice(int(offsets[rows.start]), int(offsets[rows.stop]))
        repeated = repeat_rows(values[rows], offsets[rows.start : rows.stop + 1] - tokens.start)
        torch.mul(repeated, mask[tokens], out=result[tokens])
    return result


def compress(values: Tensor, mask: Tensor) -> Tensor:
    """``values[mask]``, without gradient; numpy is several times as fast on the CPU."""
    return torch.from_numpy(values.detach().numpy()[mask.numpy()]) if values.is_cpu else values.detach()[mask]


def expand(values: Tensor, mask: Tensor) -> Tensor:
    """The inverse of ``compress``: ``[N]`` with the values where ``mask bool[N]`` is true, 0 elsewhere."""
    result = torch.zeros(len(mask), dtype=values.dtype, device=values.device)
    if values.is_cpu:
        result.numpy()[mask.numpy()] = values.numpy()
    else:
        result[mask] = values
    return result


def place_rows(values: Tensor, rows: Tensor, everything: Ragged) -> Ragged:
    """``float32``: the values of the rows with ``rows bool[B]``, at their places in ``everything``; 0 in the others."""
    return everything.with_values(expand(values.float(), repeat_rows(rows, everything.offsets)))


def kept_offsets(mask: Tensor, offsets: Tensor) -> Tensor:
    """Offsets of the rows when only the values with ``mask`` stay: ``values[mask]`` with these is ragged again."""
    return lengths_to_offsets(segment_sum(mask.long(), offsets))


def from_padded(values: Tensor, mask: Tensor) -> Ragged:
    """``[B, T]`` with padding anywhere -> the values where ``mask [B, T]`` is true, row by row.

    >>> from_padded(torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])).values.tolist()
    [1, 2, 3]
    """
    assert values.shape == mask.shape, f"values {tuple(values.shape)} and mask {tuple(mask.shape)} differ in shape"
    mask = mask.bool()
    return Ragged(values=values[mask], offsets=lengths_to_offsets(mask.sum(1)))


def to_padded(rows: Ragged, fill: float = 0) -> tuple[Tensor, Tensor]:
    """``[B, T]`` padded on the right to the longest row, and its ``bool[B, T]`` mask. Differentiable.

    >>> to_padded(Ragged(values=torch.tensor([1, 2, 3]), offsets=torch.tensor([0, 2, 3])))[0].tolist()
    [[1, 2], [3, 0]]
    """
    width = int(rows.lengths.max()) if rows.rows else 0
    mask = torch.arange(width, device=rows.offsets.device) < rows.lengths[:, None]
    padded = rows.values.new_full((rows.rows, width), fill)
    return padded.masked_scatter(mask, rows.values), mask


def concat_rows(first: Ragged, second: Ragged) -> Ragged:
    """Row by row: ``first[i]`` followed by ``second[i]``.

    >>> a = Ragged(values=torch.tensor([1, 2]), offsets=torch.tensor([0, 1, 2]))
    >>> b = Ragged(values=torch.tensor([7, 8, 9]), offsets=torch.tensor([0, 2, 3]))
    >>> concat_rows(a, b).values.tolist()
    [1, 7, 8, 2, 9]
    """
    assert first.rows == second.rows
    offsets = first.offsets + second.offsets
    values = first.values.new_empty(int(offsets[-1]))
    values[places(first.offsets, offsets[:-1])] = first.values
    values[places(second.offsets, offsets[:-1] + first.lengths)] = second.values.to(values.dtype)
    return Ragged(values=values, offsets=offsets)


def places(offsets: Tensor, starts: Tensor) -> Tensor:
    """``int64[N]``: where the values of rows with these offsets go when row ``i`` starts at ``starts[i]``.

    >>> places(torch.tensor([0, 2, 3]), torch.tensor([5, 0])).tolist()
    [5, 6, 0]
    """
    shift = repeat_rows(starts - offsets[:-1], offsets)
    return shift + torch.arange(len(shift), device=shift.device)


@dataclass(frozen=True, kw_only=True)
class GroupStatistics:
    """Of the group that each row belongs to; every field is ``[B]``."""

    size: Tensor
    """Rows in the group, ``int64``."""
    mean: Tensor
    """``float64``."""
    std: Tensor
    """Unbiased (divided by size - 1), ``float64``; 0 in a group of one."""
    constant: Tensor
    """``bool``: all values of the group are equal (also in a group of one)."""


def dense_groups(group_ids: Tensor) -> tuple[Tensor, int]:
    """Group numbers ``int64[B]`` from 0, and how many there are; some may be empty where ids have gaps."""
    if len(group_ids) == 0:
        return group_ids, 0
    lowest, highest = int(group_ids.min()), int(group_ids.max())
    if highest - lowest < 4 * len(group_ids):
        return group_ids - lowest, highest - lowest + 1
    unique, group = torch.unique(group_ids, return_inverse=True)
    return group, len(unique)


def group_sum(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Sum of each group, ``[B] -> [groups]``, of the numbers that ``dense_groups`` gives."""
    return values.new_zeros(groups).index_add(0, group, values)


def group_max(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Largest value of each group, ``[B] -> [groups]``; ``-inf`` in an empty one."""
    return values.new_full((groups,), -torch.inf).scatter_reduce(0, group, values, "amax")


def group_statistics(values: Tensor, group_ids: Tensor) -> GroupStatistics:
    """Statistics of ``values [B]`` within the groups of ``group_ids int64[B]``, in float64."""
    values = values.double()
    group, groups = dense_groups(group_ids)
    size = torch.bincount(group, minlength=groups)
    mean = group_sum(values, group, groups) / size.clamp(min=1)
    squares = group_sum((values - mean[group]) ** 2, group, groups)
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    constant = group_max(values, group, groups) == -group_max(-values, group, groups)
    return GroupStatistics(size=size[group], mean=mean[group], std=std[group], constant=constant[group])
