"""Two artifacts of one stage: equal bit for bit, or how far apart, column by column."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import save

from grpo_lib.storage.compare import Comparison, compare_artifacts

LISTS = pa.list_(pa.float32())
PARTS = pa.map_(pa.string(), pa.float64())


def table(**columns: pa.Array) -> dict[str, pa.Buffer]:
    """One part, as a stage stores it."""
    sink, made = pa.BufferOutputStream(), pa.table(columns)
    with pa.ipc.new_file(sink, made.schema) as writer:
        writer.write_table(made)
    return {"part-00000.arrow": sink.getvalue()}


def compared(old: dict[str, pa.Buffer], new: dict[str, pa.Buffer]) -> dict[str, Comparison]:
    return {each.place: each for each in compare_artifacts(old, new, {}, {})}


def of_column(old: Any, new: Any, kind: pa.DataType) -> Comparison:
    return compared(table(x=pa.array(old, kind)), table(x=pa.array(new, kind)))["x"]


def test_equal_tables_are_equal_whatever_their_chunks_and_bytes() -> None:
    one = table(x=pa.array([1.0, 2.0]), y=pa.array([[0.5], [0.25, 1.0]], LISTS))
    two = table(x=pa.array([1.0]), y=pa.array([[0.5]], LISTS))
    three = table(x=pa.array([2.0]), y=pa.array([[0.25, 1.0]], LISTS))
    parted = {"part-00000.arrow": two["part-00000.arrow"], "part-00001.arrow": three["part-00000.arrow"]}
    found = compared(one, parted)
    assert set(found) == {"x", "y"} and all(each.equal for each in found.values())


def test_of_numbers_the_largest_difference_and_the_count_are_told() -> None:
    found = of_column([[1.0, 2.0], [3.0]], [[1.0, 2.5], [2.75]], LISTS)
    assert (found.equal, found.max_difference, found.note) == (False, 0.5, "2 of 3 differ")


def test_the_last_bit_counts() -> None:
    found = of_column([1.0], [float(np.nextafter(1.0, 2.0))], pa.float64())
    assert not found.equal and found.max_difference == 2.0**-52


def test_nans_are_equal_to_nans_and_to_nothing_else() -> None:
    assert of_column([float("nan"), 1.0], [float("nan"), 1.0], pa.float64()).equal
    found = of_column([float("nan"), 1.0], [0.0, 1.0], pa.float64())
    assert not found.equal and found.max_difference is None and "infinite or NaN" in found.note
    beside = of_column([float("inf"), 1.0], [float("inf"), 1.5], pa.float64())
    assert beside.max_difference == 0.5


@pytest.mark.parametrize(
    ("old", "new", "kind", "note"),
    [
        ([[1.0], [2.0]], [[1.0], [2.0, 3.0]], LISTS, "1 of 2 rows have other lengths"),
        ([1.0, None], [1.0, 2.0], pa.float64(), "1 nulls -> 0"),
        ([None, 2.0], [2.0, None], pa.float64(), "1 nulls -> 1"),
        (["a", "b"], ["a", "c"], pa.string(), "1 of 2 differ"),
        ([True, None], [False, None], pa.bool_(), "1 of 2 differ"),
        ([[("a", 1.0)]], [[("b", 1.0)]], PARTS, "other names"),
    ],
)
def test_what_is_not_a_number_tells_what_differs(old: Any, new: Any, kind: pa.DataType, note: str) -> None:
    found = of_column(old, new, kind)
    assert (found.equal, found.note) == (False, note)


def test_a_map_is_compared_by_its_values() -> None:
    old, new = [[("a", 1.0), ("b", 2.0)], []], [[("a", 1.0), ("b", 2.25)], []]
    assert of_column(old, old, PARTS).equal
    assert of_column(old, new, PARTS).max_difference == 0.25


def test_columns_and_rows_that_come_or_go_are_named() -> None:
    old, new = table(x=pa.array([1]), y=pa.array([1])), table(x=pa.array([1.0]), z=pa.array([1]))
    assert {place: each.note for place, each in compared(old, new).items()} == {
        "x": "int64 -> double", "y": "is gone", "z": "is new",
    }  # fmt: skip
    assert compared(table(x=pa.array([1, 2])), table(x=pa.array([1])))["table"].note == "2 rows -> 1"
    assert compared(table(x=pa.array([1])), {})["table"].note == "is gone"


def test_tensors_that_differ_are_named_with_the_largest_difference() -> None:
    old = {"a": torch.ones(2), "b": torch.zeros(2, 2), "c": torch.ones(1)}
    new = {"a": torch.ones(2), "b": torch.tensor([[0.0, 0.5], [0.0, -0.25]]), "c": torch.ones(2)}
    files = [{"model.safetensors": pa.py_buffer(save(each)), "config.json": pa.py_buffer(b"{}")} for each in (old, new)]
    found = compared(files[0], files[1])
    assert found["config.json"].equal and "model.safetensors/a" not in found
    assert (found["model.safetensors/b"].max_difference, found["model.safetensors/b"].note) == (0.5, "2 of 4 differ")
    assert not found["model.safetensors/c"].equal
    assert compared(files[0], files[0])["model.safetensors"].equal


def test_other_files_are_compared_by_their_bytes() -> None:
    old, new = ({"state.json": pa.py_buffer(json.dumps({"step": step}).encode())} for step in (1, 22))
    assert compared(old, new)["state.json"].note == "11 bytes -> 12, or other ones"


def test_summaries_are_compared_but_for_what_depends_on_the_machine() -> None:
    old = {"mean": 0.5, "tokens_per_second": 10.0, "policy_digest": "a", "gone": 1}
    new = {"mean": 0.75, "tokens_per_second": 99.0, "policy_digest": "b"}
    found = {each.place: each for each in compare_artifacts({}, {}, old, new)}
    assert set(found) == {"summary/mean", "summary/policy_digest", "summary/gone"}
    assert found["summary/mean"].max_difference == 0.25
    assert found["summary/policy_digest"].note == "'a' -> 'b'"
