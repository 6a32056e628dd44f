import itertools

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.data.columns import flat_column, list_array, ragged_column, same_rows
from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.data.schemas import FLOATS, MASK, TOKENS
from grpo_lib.errors import DataError

FEW = settings(deadline=None, max_examples=40)
ROWS = [[1, 2], [], [3], [4, 5, 6], [7]]
tables = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), max_size=7)


def table_of(rows: list[list[int]], type_: pa.DataType = TOKENS) -> pa.Table:
    return pa.table({"ids": pa.array(rows, type=type_)})


def lists(rows: Ragged) -> list[list[int]]:
    starts = rows.offsets.tolist()
    return [rows.values[a:b].tolist() for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("type_", [TOKENS, FLOATS, MASK, pa.large_list(pa.int64())])
def test_a_list_column_is_read_with_its_type(type_: pa.DataType) -> None:
    column = ragged_column(table_of(ROWS, type_), "ids")
    assert lists(column) == ROWS
    expected = {"int32": torch.int32, "float": torch.float32, "uint8": torch.uint8, "int64": torch.int64}
    assert column.values.dtype == expected[str(type_.value_type)]


@pytest.mark.parametrize(("start", "length"), [(0, 5), (1, 3), (2, 2), (4, 1), (3, 0), (1, 1)])
def test_a_slice_is_read_from_its_own_start(start: int, length: int) -> None:
    column = ragged_column(table_of(ROWS).slice(start, length), "ids")
    assert lists(column) == ROWS[start : start + length]
    assert column.offsets[0] == 0


def test_a_column_in_several_pieces_is_joined() -> None:
    table = pa.concat_tables([table_of(ROWS).slice(1, 2), table_of(ROWS).slice(3), table_of([[9]])])
    assert table.column("ids").num_chunks == 3
    assert lists(ragged_column(table, "ids")) == [[], [3], [4, 5, 6], [7], [9]]
    flat = pa.table({"x": pa.chunked_array([[1.5], [2.5, 3.5]])})
    assert flat_column(flat, "x").tolist() == [1.5, 2.5, 3.5]


def test_a_table_without_rows_gives_no_rows() -> None:
    empty = table_of([])
    assert ragged_column(empty, "ids").rows == 0
    assert ragged_column(empty.schema.empty_table(), "ids").rows == 0
    assert flat_column(pa.table({"x": pa.array([], pa.int64())}), "x").tolist() == []


@pytest.mark.parametrize("start", [0, 2])
def test_values_of_one_piece_are_not_copied(start: int) -> None:
    table = pa.table({"ids": pa.array(ROWS, TOKENS), "x": pa.array([1.0, 2.0, 3.0, 4.0, 5.0])}).slice(start)
    lists_address = table.column("ids").chunk(0).values.buffers()[1].address
    skipped = sum(map(len, ROWS[:start]))
    assert ragged_column(table, "ids").values.data_ptr() == lists_address + 4 * skipped
    assert flat_column(table, "x").data_ptr() == table.column("x").chunk(0).buffers()[1].address + 8 * start


def test_null_rows_are_refused_and_counted() -> None:
    table = pa.table({"ids": pa.array([[1], None, None, [2]], TOKENS)})
    with pytest.raises(DataError, match="column 'ids' holds 2 null rows"):
        ragged_column(table, "ids")
    assert lists(ragged_column(table.slice(3), "ids")) == [[2]]


def test_null_values_are_refused_and_counted() -> None:
    table = pa.table({"ids": pa.array([[1, None], [2]], TOKENS)})
    with pytest.raises(DataError, match="column 'ids' holds 1 null values"):
        ragged_column(table, "ids")
    assert lists(ragged_column(table.slice(1), "ids")) == [[2]]


@pytest.mark.parametrize("start", [0, 1])
def test_nulls_of_a_number_column_become_nan(start: int) -> None:
    table = pa.table({"x": pa.array([0.5, None, 2.5], pa.float64())}).slice(start)
    values = flat_column(table, "x")
    np.testing.assert_array_equal(values.numpy(), np.array([0.5, np.nan, 2.5])[start:])
    assert values.dtype == torch.float64


@FEW
@given(rows=tables)
def test_what_is_written_is_read_back(rows: list[list[int]]) -> None:
    values = torch.tensor([value for row in rows for value in row], dtype=torch.int32)
    offsets = lengths_to_offsets(torch.tensor([len(row) for row in rows], dtype=torch.int64))
    array = list_array(Ragged(values=values, offsets=offsets), TOKENS)
    assert array.type == TOKENS
    assert array.to_pylist() == rows
    back = ragged_column(pa.table({"ids": array}), "ids")
    assert torch.equal(back.values, values) and torch.equal(back.offsets, offsets)


@FEW
@given(rows=tables, data=st.data())
def test_any_slice_of_any_pieces_is_read_right(rows: list[list[int]], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(rows)))
    start = data.draw(st.integers(0, len(rows)))
    length = data.draw(st.integers(0, len(rows)))
    table = pa.concat_tables([table_of(rows[:cut]), table_of(rows[cut:])]).slice(start, length)
    assert lists(ragged_column(table, "ids")) == rows[start : start + length]


def test_a_tensor_with_gradient_can_be_written() -> None:
    values = torch.tensor([0.5, 1.5], requires_grad=True)
    assert list_array(Ragged(values=values, offsets=torch.tensor([0, 2])), FLOATS).to_pylist() == [[0.5, 1.5]]


def test_tables_of_other_rows_or_another_order_are_refused() -> None:
    ids = pa.table({"rollout_id": ["0-0-0", "0-0-1"]})
    same_rows(ids, pa.concat_tables([ids.slice(0, 1), ids.slice(1)]), "reward")
    for other in (ids.take(pa.array([1, 0])), ids.slice(1), pa.concat_tables([ids, ids])):
        with pytest.raises(DataError, match="reward: the rows do not belong to the same rollouts in the same order"):
            same_rows(ids, other, "reward")
