"""Ragged tensors: one flat tensor of values plus row offsets, exactly as Arrow stores a list column.

Nothing is ever padded to the longest row. ``B`` is the number of rows, ``N`` the number of values; a *segment* is a
row's slice of the values. ``group_ids`` (``int64[B]``) say which rows belong together; they need not be adjacent.
"""

from dataclasses import dataclass

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
    """One value a row ``[B]`` -> the row's value at each of its tokens ``[N]``."""
    return torch.repeat_interleave(values, offsets.diff(), output_size=int(offsets[-1]))


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each row, ``[N] -> [B]``; 0 for an empty row. Differentiable."""
    rows = repeat_rows(torch.arange(len(offsets) - 1, device=values.device), offsets)
    return torch.zeros(len(offsets) - 1, dtype=values.dtype, device=values.device).index_add(0, rows, values)


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
    values[_positions(first, offsets[:-1])] = first.values
    values[_positions(second, offsets[:-1] + first.lengths)] = second.values.to(values.dtype)
    return Ragged(values=values, offsets=offsets)


def _positions(rows: Ragged, starts: Tensor) -> Tensor:
    """Where the values of ``rows`` go when row ``i`` starts at ``starts[i]``."""
    shift = repeat_rows(starts - rows.offsets[:-1], rows.offsets)
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


def group_statistics(values: Tensor, group_ids: Tensor) -> GroupStatistics:
    """Statistics of ``values [B]`` within the groups of ``group_ids int64[B]``, in float64."""
    values = values.double()
    unique, group = torch.unique(group_ids, return_inverse=True)
    groups = len(unique)
    size = torch.bincount(group, minlength=groups)
    mean = values.new_zeros(groups).index_add(0, group, values) / size
    squares = values.new_zeros(groups).index_add(0, group, (values - mean[group]) ** 2)
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    highest = values.new_full((groups,), -torch.inf).scatter_reduce(0, group, values, "amax")
    lowest = values.new_full((groups,), torch.inf).scatter_reduce(0, group, values, "amin")
    return GroupStatistics(size=size[group], mean=mean[group], std=std[group], constant=(highest == lowest)[group])
