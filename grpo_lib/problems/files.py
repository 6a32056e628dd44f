"""Prompts of the user's own: jsonl, Parquet and Arrow files, data sets that Hugging Face saved to disk, here or on S3.

They bring no reward: ``reward.functions`` does.
"""

import fnmatch
import glob
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_lib.algorithms.registry import nearest
from grpo_lib.config import StoreConfig
from grpo_lib.config_data import FilesData
from grpo_lib.config_reward import RewardConfig
from grpo_lib.data.files import ENDINGS, read_table
from grpo_lib.errors import ConfigError, DataError
from grpo_lib.storage.objects import open_store
from grpo_lib.types import Problem, RewardFunction

logger = logging.getLogger(__name__)

MAPPED = ("prompt_id", "prompt", "reference", "data_source", "demonstration")
SCHEMA = pa.schema([(name, pa.string()) for name in (*MAPPED, "messages", "metadata")])
Reader = Callable[[], bytes]
NOT_DATA = ("dataset_info.json", "state.json", "dataset_dict.json")
"""That Hugging Face puts beside its data."""


def load(options: FilesData, split: str, seed: int) -> pa.Table:
    """The rows of one split in the order of the files; ``seed`` is not used.

    Raises:
        DataError: a file is missing, empty or unreadable, a column is not there, or a prompt is empty.
    """
    train, heldout = _both(options)
    if split == "train":
        return train
    if split == "heldout":
        return heldout
    raise DataError(f"there is no split {split!r}: use train or heldout")


def make_reward(options: FilesData, reward: RewardConfig) -> RewardFunction:
    raise ConfigError("data.problem=files brings no reward; name functions in reward.functions (`grpo score --help`)")


def data_paths(options: FilesData) -> list[str]:
    """Every file that prompts come from, in order."""
    return [path for each in (*options.train, *options.heldout) for path, _ in _files(each, options.endpoint_url)]


def read_data(path: str, endpoint_url: str | None) -> bytes:
    """A file, here or on S3."""
    for _, data in _files(path, endpoint_url):
        return data()
    raise DataError(f"there is no file {path}")


@lru_cache(maxsize=2)
def _both_of(text: str) -> tuple[pa.Table, pa.Table]:
    options = FilesData.model_validate_json(text)
    train = _rows(options, options.train, "train")
    if options.heldout:
        heldout = _rows(options, options.heldout, "heldout").slice(0, options.heldout_prompts)
    else:
        if train.num_rows <= options.heldout_prompts:
            raise DataError(
                f"data.train holds {train.num_rows} prompts, and data.heldout_prompts={options.heldout_prompts} of "
                "them are to be held out: nothing is left to train on; lower it, or name data.heldout"
            )
        first = train.num_rows - options.heldout_prompts
        train, heldout = train.slice(0, first), train.slice(first)
    both = pc.is_in(train.column("prompt"), value_set=heldout.column("prompt").combine_chunks())
    count = pc.sum(both).as_py() or 0
    if count and options.duplicates == "refuse":
        raise DataError(f"{count} prompts of data.train are held out too; remove them, or set data.duplicates=drop")
    if count and options.duplicates == "drop":
        logger.warning("left out %d training prompts that are held out too", count)
        train = train.filter(pc.invert(both))
    if train.num_rows == 0:
        raise DataError("every prompt of data.train is held out too: nothing is left to train on")
    return train, heldout


def _both(options: FilesData) -> tuple[pa.Table, pa.Table]:
    return _both_of(options.model_dump_json())


def _rows(options: FilesData, places: Sequence[str], split: str) -> pa.Table:
    tables = []
    for place in places:
        for path, data in _files(place, options.endpoint_url):
            tables.append(_mapped(read_table(path, data()), options, path, split))
    table = pa.concat_tables(tables)
    first = _first_of_each(table.column("prompt"))
    again = table.num_rows - len(first)
    if again and options.duplicates == "refuse":
        raise DataError(f"{again} prompts of the {split} split stand there twice; remove them, or set data.duplicates")
    if again and options.duplicates == "drop":
        logger.warning("left out %d prompts of the %s split that stand there twice", again, split)
        table = table.take(pa.array(first))
    return table.combine_chunks()


def _first_of_each(column: pa.ChunkedArray) -> np.ndarray:
    """Rows at which each value stands first, in order."""
    codes = column.combine_chunks().dictionary_encode().indices.to_numpy()
    return np.sort(np.unique(codes, return_index=True)[1])


def _files(place: str, endpoint_url: str | None) -> Iterator[tuple[str, Reader]]:
    """Paths, and how to read them.

    Raises:
        DataError: there is nothing.
    """
    found = list(_on_s3(place, endpoint_url) if place.startswith("s3://") else _here(place))
    if not found:
        raise DataError(f"data: nothing at {place}; name a file, a folder or a pattern with {', '.join(ENDINGS)} files")
    yield from found


def _here(place: str) -> Iterator[tuple[str, Reader]]:
    path = Path(place).expanduser()
    if path.is_dir():
        names = sorted(str(each) for each in path.rglob("*") if each.suffix in ENDINGS and each.name not in NOT_DATA)
    else:
        names = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))
    for name in names:
        yield name, Path(name).read_bytes


def _on_s3(place: str, endpoint_url: str | None) -> Iterator[tuple[str, Reader]]:
    bucket, _, key = place.removeprefix("s3://").partition("/")
    objects = open_store(StoreConfig(uri=f"s3://{bucket}", endpoint_url=endpoint_url))
    fixed = key.split("*")[0].rpartition("/")[0] if "*" in key else key
    names = [info.path for info in objects.list(fixed)] or ([key] if objects.exists(key) else [])
    for name in sorted(names):
        wanted = fnmatch.fnmatch(name, key) if "*" in key else True
        if wanted and Path(name).suffix in ENDINGS and Path(name).name not in NOT_DATA:
            yield f"s3://{bucket}/{name}", partial(objects.get, name)


def _mapped(table: pa.Table, options: FilesData, path: str, split: str) -> pa.Table:
    """The columns that a problem gives; all others are metadata."""
    count, there = table.num_rows, table.column_names
    taken = {name: name for name in MAPPED} | {str(name): column for name, column in options.columns.items()}
    for name, column in taken.items():
        needed = name == "prompt" or (name == "reference" and options.needs_reference) or name in options.columns
        if column not in there and needed:
            raise DataError(
                f"{path} has no column {column!r} for the {name}; {nearest(column, there)}. Set data.columns, e.g. "
                f"{{{name}: {there[0] if there else '...'}}}"
            )
    columns = {name: _texts(table.column(column)) for name, column in taken.items() if column in there}
    messages = _messages(table.column(taken["prompt"]), path)
    if messages is not None:
        columns["prompt"] = pa.array(["\n\n".join(turn["content"] for turn in each or []) for each in messages])
    for name in ("prompt", *(["reference"] if options.needs_reference else [])):
        lacking = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(columns[name]), ""), True).to_numpy(
            zero_copy_only=False
        )
        if lacking.any():
            raise DataError(
                f"{path}: {int(lacking.sum())} of {count} rows have no {name}, the first is row "
                f"{int(np.argmax(lacking))}; mend or remove them"
                + ("" if name == "prompt" else ", or set data.needs_reference=false")
            )
    others = [name for name in there if name not in taken.values()]
    extra = [json.dumps(row, default=str) for row in table.select(others).to_pylist()] if others else [None] * count
    made = {
        "prompt_id": columns.get("prompt_id", pa.array([f"{split}-{Path(path).name}-{row}" for row in range(count)])),
        "prompt": columns["prompt"],
        "reference": pc.fill_null(columns["reference"], "") if "reference" in columns else pa.repeat("", count),
        "data_source": pc.fill_null(columns["data_source"], options.name)
        if "data_source" in columns
        else pa.repeat(options.name, count),
        "demonstration": columns.get("demonstration", pa.nulls(count, pa.string())),
        "messages": pa.nulls(count, pa.string())
        if messages is None
        else pa.array([json.dumps(each) for each in messages]),
        "metadata": pa.array(extra, pa.string()),
    }
    return pa.table(made, schema=SCHEMA)


def _messages(column: pa.ChunkedArray, path: str) -> list[list[dict[str, str]]] | None:
    """The prompts where they are chat messages: lists of ``role`` and ``content``."""
    kind = column.type
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not listed or not pa.types.is_struct(kind.value_type):
        return None
    rows: list[list[dict[str, str]]] = column.to_pylist()
    for number, row in enumerate(rows):
        for turn in row or []:
            if not isinstance(turn.get("role"), str) or not isinstance(turn.get("content"), str):
                raise DataError(
                    f"{path}: the prompt of row {number} has a message without a role or a content that are texts: "
                    f"{str(turn)[:160]}"
                )
    return [[{"role": turn["role"], "content": turn["content"]} for turn in row or []] for row in rows]


def _texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Strings as they are, numbers as text, everything else as JSON."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.string())
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type):
        return column.cast(pa.string())
    return pa.chunked_array(
        [pa.array([None if each is None else json.dumps(each, default=str) for each in column.to_pylist()])]
    )


PROBLEM = Problem(name="files", load=load, make_reward=make_reward)
