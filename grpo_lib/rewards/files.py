"""Responses in a file of the user's, for reward functions that are being written."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lib.algorithms.registry import nearest
from grpo_lib.data.files import read_rows
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

Row = Mapping[str, Any]


def rows_of(path: Path) -> list[Row]:
    """The rows of a jsonl, Parquet or Arrow file.

    Raises:
        DataError: it can't be read, or has no rows.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    try:
        rows: list[Row] = [*read_rows(str(path), path.read_bytes())]
    except OSError as error:
        raise DataError(f"can't read {path}: {error}") from error
    if not rows:
        raise DataError(f"{path} has no rows")
    return rows


def chosen_columns(rows: Sequence[Row], given: Mapping[str, str]) -> dict[str, str]:
    """The column that each thing a reward function sees is taken from; what is not there has none.

    Args:
        given: some of them, e.g. ``{"response": "completion"}``; these are taken for nothing else unasked.

    Raises:
        DataError: there is no such thing or column.
    """
    there = dict.fromkeys(name for row in rows for name in row)
    for name, column in given.items():
        if name not in COLUMNS:
            raise DataError(f"no column is needed for {name!r}; {nearest(name, COLUMNS)}")
        if column not in there:
            raise DataError(f"there is no column {column!r} for the {name}; {nearest(column, there)}")
    free = [name for name in there if name not in given.values()]
    chosen: dict[str, str] = {}
    for name, usual in COLUMNS.items():
        found = given.get(name) or next((each for each in usual if each in free), None)
        if name == "response_tokens" and found is not None and not all(_is_count(row.get(found)) for row in rows):
            if name in given:
                raise DataError(f"the column {found!r} for the response_tokens must hold whole numbers")
            found = None  # the tokens themselves, perhaps
        if found is not None:
            chosen[name] = found
        elif name in NEEDED:
            raise DataError(
                f"no column holds the responses ({', '.join(usual)}); there are {', '.join(there)}: "
                f"name it with --column {name}=..."
            )
    return chosen


def samples_in(rows: Sequence[Row], chosen: Mapping[str, str]) -> list[Sample]:
    """A sample for each row; all columns that are not ``chosen`` are metadata. One without a response is a failure."""
    others = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in chosen.values()]

    def text(row: Row, name: str) -> str:
        value = row.get(chosen[name]) if name in chosen else None
        if _is_null(value):
            return ""
        if isinstance(value, str):
            return value
        return json.dumps(value, default=str) if isinstance(value, dict | list | bool) else str(value)

    return [
        Sample(
            prompt=text(row, "prompt"),
            response=text(row, "response"),
            reference=text(row, "reference"),
            data_source=text(row, "data_source") or "file",
            response_tokens=_count(row, chosen),
            finish_reason=text(row, "finish_reason") or "stop",
            failure=f"the column {chosen['response']!r} is null" if _is_null(row.get(chosen["response"])) else None,
            prompt_id=text(row, "prompt_id") or str(place),
            metadata={name: row.get(name) for name in others},
        )
        for place, row in enumerate(rows)
    ]


def _is_null(value: object) -> bool:
    """None, or NaN: pandas has no other null for numbers."""
    return value is None or (isinstance(value, float) and value != value)


def _is_count(value: object) -> bool:
    if isinstance(value, float):
        return value != value or (value >= 0 and value.is_integer())
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def _count(row: Row, chosen: Mapping[str, str]) -> int:
    """Tokens of a response; words, where nobody counted tokens."""
    value: Any = row.get(chosen["response_tokens"]) if "response_tokens" in chosen else None
    if _is_null(value):
        return len(str(row.get(chosen["response"]) or "").split())
    return int(value)
