"""Responses in a file of the user's, for reward functions that are being written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet

from grpo_lib.algorithms.registry import nearest
from grpo_lib.errors import DataError
from grpo_lib.types import Sample

COLUMNS = {
    "prompt": ("prompt", "question", "problem", "instruction"),
    "response": ("response", "completion", "text", "output"),
    "reference": ("reference", "answer", "solution", "target", "ground_truth"),
    "data_source": ("data_source", "source"),
    "response_tokens": ("response_tokens", "tokens"),
    "finish_reason": ("finish_reason",),
    "prompt_id": ("prompt_id", "id"),
}
"""What a reward function sees, and the columns it is taken from where nothing else is said."""
NEEDED = ("response",)


def read_table(path: Path) -> pa.Table:
    """A jsonl, Parquet or Arrow file.

    Raises:
        DataError: it can't be read.
    """
    try:
        if path.suffix in (".jsonl", ".json"):
            return pyarrow.json.read_json(path)
        if path.suffix == ".parquet":
            return pyarrow.parquet.read_table(path)
        if path.suffix in (".arrow", ".feather"):
            with pa.memory_map(str(path)) as file:
                return pa.ipc.open_file(file).read_all()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"can't read {path}: {error}") from error
    raise DataError(f"{path}: name a file that ends in .jsonl, .parquet or .arrow")


def samples_in(table: pa.Table, columns: Mapping[str, str]) -> list[Sample]:
    """A sample for each row; what is no known column is metadata.

    Args:
        columns: names of columns by what they are taken for, e.g. ``{"response": "completion"}``.

    Raises:
        DataError: a column is not there.
    """
    there = set(table.column_names)
    chosen: dict[str, str] = {}
    for name, usual in COLUMNS.items():
        given = columns.get(name)
        if given is not None and given not in there:
            raise DataError(f"there is no column {given!r}; {nearest(given, table.column_names)}")
        found = given or next((each for each in usual if each in there), None)
        if found is not None:
            chosen[name] = found
        elif name in NEEDED:
            raise DataError(
                f"no column holds the responses ({', '.join(usual)}); there are {', '.join(table.column_names)}: "
                f"name it with --column {name}=..."
            )
    values = {name: table.column(column).to_pylist() for name, column in chosen.items()}
    others = [name for name in table.column_names if name not in chosen.values()]
    metadata = table.select(others).to_pylist() if others else [{}] * table.num_rows

    def text(name: str, row: int) -> str:
        value = values[name][row] if name in values else None
        if value is None:
            return ""
        return value if isinstance(value, str) else json.dumps(value)

    return [
        Sample(
            prompt=text("prompt", row),
            response=text("response", row),
            reference=text("reference", row),
            data_source=text("data_source", row) or "file",
            response_tokens=_count(values, row),
            finish_reason=text("finish_reason", row) or "stop",
            prompt_id=text("prompt_id", row) or str(row),
            metadata=metadata[row],
        )
        for row in range(table.num_rows)
    ]


def _count(values: Mapping[str, list[Any]], row: int) -> int:
    """Tokens of a response; words, where nobody counted tokens."""
    if "response_tokens" in values and values["response_tokens"][row] is not None:
        return int(values["response_tokens"][row])
    return len(str(values["response"][row] or "").split())
