"""Arrow columns to torch tensors and back, without padding, row loops or `to_pylist`.

A list column is offsets and values, which is what ``Ragged`` is: reading is a view of the Arrow buffers where Arrow
holds the column in one piece. The views are read-only by convention (the memory may be a mapped file).
"""

import warnings

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from grpo_lib.data.ragged import Ragged
from grpo_lib.errors import DataError

# Memory-mapped columns are read-only, and nothing here writes into them.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def ragged_column(table: pa.Table, name: str) -> Ragged:
    """The list column ``name`` of ``table``. Null rows and null values are refused."""
    column = _one_chunk(table, name)
    if column.null_count:
        raise DataError(f"column {name!r} holds {column.null_count} null rows; every row needs a list")
    values = column.flatten()
    if values.null_count:
        raise DataError(f"column {name!r} holds {values.null_count} null values")
    offsets = np.asarray(column.offsets).astype(np.int64)
    return Ragged(values=_tensor(values), offsets=torch.from_numpy(offsets - offsets[0]))


def flat_column(table: pa.Table, name: str) -> Tensor:
    """The numeric column ``name`` of ``table`` as ``[B]``; nulls of a float column become NaN."""
    column = _one_chunk(table, name)
    if column.null_count:
        return torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())
    return _tensor(column)


def flag_column(table: pa.Table, name: str) -> Tensor:
    """The boolean column ``name`` of ``table`` as ``bool[B]``; Arrow packs eight to a byte, so this is a copy."""
    return torch.from_numpy(table.column(name).to_numpy().astype(bool))


def list_array(rows: Ragged, type_: pa.DataType) -> pa.Array:
    """A ragged tensor as an Arrow list array of ``type_``."""
    values = pa.array(rows.values.detach().cpu().numpy(), type=type_.value_type)
    if len(values) >= 2**31:
        raise DataError(f"{len(values)} values in one part; Arrow's list offsets end at 2^31: use more rollout.shards")
    offsets = pa.array(rows.offsets.cpu().numpy().astype(np.int32))
    return pa.ListArray.from_arrays(offsets, values, type=type_)


def same_rows(first: pa.Table, second: pa.Table, what: str) -> None:
    """Raises DataError unless both tables hold the same ``rollout_id`` in the same order."""
    if not first.column("rollout_id").equals(second.column("rollout_id")):
        raise DataError(f"{what}: the rows do not belong to the same rollouts in the same order")


def _one_chunk(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _tensor(values: pa.Array) -> Tensor:
    return torch.from_numpy(values.to_numpy(zero_copy_only=True))
