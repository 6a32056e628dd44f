"""Rows in files of the user's own: jsonl, Parquet, Arrow (a file, or the stream that Hugging Face saves)."""

import io
import json
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from grpo_lib.errors import DataError

ENDINGS = (".jsonl", ".json", ".parquet", ".arrow", ".feather")


def read_rows(name: str, data: bytes) -> list[dict[str, Any]]:
    """Every row as it stands there; one that lacks a column of others may lack its key.

    Raises:
        DataError: the name's ending is not known, or the content can't be read.
    """
    return list(_lines(name, data)) if _is_lines(name) else _table(name, data).to_pylist()


def read_columns(name: str, data: bytes) -> dict[str, list[Any]]:
    """The same by column, as Python values; a row that lacks a column has None there.

    Raises:
        DataError: as `read_rows`, or a value is none of Python's.
    """
    if _is_lines(name):
        rows = list(_lines(name, data))
        return {
            column: [row.get(column) for row in rows] for column in dict.fromkeys(key for row in rows for key in row)
        }
    table = _table(name, data)
    try:
        return {column: _values(table.column(column)) for column in table.column_names}
    except (pa.ArrowException, ValueError, OverflowError, KeyError) as error:
        raise DataError(f"can't read {name}: {error}") from error


def _is_lines(name: str) -> bool:
    ending = PurePath(name).suffix
    if ending not in ENDINGS:
        raise DataError(f"{name}: name a file that ends in .jsonl, .parquet or .arrow")
    return ending in (".jsonl", ".json")


def _lines(name: str, data: bytes) -> Iterator[dict[str, Any]]:
    """Read line by line: Arrow's reader would make dates of texts, and wants one type a column."""
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name}, line {number}: not a JSON object a line, in UTF-8 ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{name}, line {number}: must be a JSON object, found {type(row).__name__}")
        yield row


def _values(column: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_float16(column.type) or pa.types.is_float32(column.type):
        column = column.cast(pa.string()).cast(pa.float64())  # 0.1 stays 0.1
    values: list[Any] = column.to_pylist()
    return values


def _table(name: str, data: bytes) -> pa.Table:
    try:
        if name.endswith(".parquet"):
            return pyarrow.parquet.read_table(io.BytesIO(data))
        return (pa.ipc.open_file(data) if data[:6] == b"ARROW1" else pa.ipc.open_stream(data)).read_all()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"can't read {name}: {error}") from error
