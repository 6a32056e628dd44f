"""Prompts of the user's own: jsonl, Parquet and Arrow files, data sets that Hugging Face saved to disk, here or on S3.

They bring no reward: ``reward.functions`` does.
"""

import fnmatch
import glob
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_lib.algorithms.registry import nearest
from grpo_lib.config import StoreConfig
from grpo_lib.config_data import FilesData
from grpo_lib.config_reward import RewardConfig
from grpo_lib.data.files import ENDINGS, read_columns
from grpo_lib.errors import ConfigError, DataError
from grpo_lib.storage.objects import open_store
from grpo_lib.types import Problem, RewardFunction

logger = logging.getLogger(__name__)

MAPPED = ("prompt_id", "prompt", "reference", "data_source", "demonstration")
SCHEMA = pa.schema([(name, pa.string()) for name in (*MAPPED, "messages", "metadata")])
NOT_DATA = ("dataset_info.json", "state.json", "dataset_dict.json")
"""That Hugging Face puts beside its data."""


@dataclass(frozen=True, kw_only=True)
class PromptFile:
    """A file, here or on S3."""

    path: str
    read: Callable[[], bytes]
    version: Callable[[], str]
    """Another one once the content is another."""


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


def prompt_files(options: FilesData) -> list[PromptFile]:
    """Every file that prompts come from, in order."""
    return files_at((*options.train, *options.heldout), options.endpoint_url)


def files_at(places: Sequence[str], endpoint_url: str | None) -> list[PromptFile]:
    """Every file with prompts that these places name, in order.

    Raises:
        DataError: there is nothing at one of them.
    """
    return [file for place in places for file in _files(place, endpoint_url)]


def files_so_far(places: Sequence[str], endpoint_url: str | None) -> list[PromptFile]:
    """The same of places in which files arrive: nothing there yet is no error.

    Raises:
        DataError: a folder here that does not exist.
    """
    for place in places:
        folder = Path(place.partition("*")[0]).expanduser()
        if not place.startswith("s3://") and not (folder.exists() or (folder.parent.is_dir() and "*" in place)):
            raise DataError(f"data: there is no {place}; name the folder in which prompt files arrive, or make it")
    return [file for place in places for file in _found(place, endpoint_url)]


def _both(options: FilesData) -> tuple[pa.Table, pa.Table]:
    return _both_of(options.model_dump_json(), tuple((file.path, file.version()) for file in prompt_files(options)))


@lru_cache(maxsize=2)
def _both_of(text: str, _versions: tuple[tuple[str, str], ...]) -> tuple[pa.Table, pa.Table]:
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
    _check_ids([*train.column("prompt_id").to_pylist(), *heldout.column("prompt_id").to_pylist()], options)
    return train, heldout


def _check_ids(ids: Sequence[str], options: FilesData) -> None:
    again = [each for each, count in Counter(ids).items() if count > 1]
    if again:
        raise DataError(
            f"{len(again)} prompt ids stand for several prompts, e.g. {again[0]!r}; make the column "
            f"{options.columns.get('prompt_id', 'prompt_id')!r} unique over all files of both splits, or rename it: "
            "prompts without one get ids from their file and row"
        )


def _rows(options: FilesData, places: Sequence[str], split: str) -> pa.Table:
    tables, named = [], Counter[str]()
    for place in places:
        for file in _files(place, options.endpoint_url):
            name = Path(file.path).name
            named[name] += 1
            ids = f"{split}-{name}" if named[name] == 1 else f"{split}-{name}.{named[name]}"
            tables.append(_mapped(read_columns(file.path, file.read()), options, file.path, ids))
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


def _files(place: str, endpoint_url: str | None) -> list[PromptFile]:
    """The files that a place names.

    Raises:
        DataError: there is nothing, or a data set of several splits.
    """
    found = _found(place, endpoint_url)
    if not found:
        raise DataError(f"data: nothing at {place}; name a file, a folder or a pattern with {', '.join(ENDINGS)} files")
    return found


def _found(place: str, endpoint_url: str | None) -> list[PromptFile]:
    return _on_s3(place, endpoint_url) if place.startswith("s3://") else _here(place)


def _here(place: str) -> list[PromptFile]:
    def file(path: Path) -> PromptFile:
        return PromptFile(path=str(path), read=path.read_bytes, version=partial(_version, path))

    path = Path(place).expanduser()
    if path.is_dir():
        return _data_of([file(each) for each in sorted(path.rglob("*"), key=str) if each.is_file()])
    return (
        [file(path)] if path.is_file() else [file(Path(name)) for name in sorted(glob.glob(str(path), recursive=True))]
    )


def _version(path: Path) -> str:
    info = path.stat()
    return f"{info.st_size} {info.st_mtime_ns}"


def _on_s3(place: str, endpoint_url: str | None) -> list[PromptFile]:
    bucket, _, key = place.removeprefix("s3://").partition("/")
    key = key.rstrip("/")
    objects = open_store(StoreConfig(uri=f"s3://{bucket}", endpoint_url=endpoint_url))

    def file(name: str, version: Callable[[], str]) -> PromptFile:
        return PromptFile(path=f"s3://{bucket}/{name}", read=partial(objects.get, name), version=version)

    fixed = key.split("*")[0].rpartition("/")[0] if "*" in key else key
    found = {info.path: f"{info.size} {info.modified}" for info in objects.list(fixed)}
    files = [file(name, partial(str, found[name])) for name in sorted(found)]
    if "*" in key:
        return [each for each in files if fnmatch.fnmatch(each.path, f"s3://{bucket}/{key}") and _is_data(each.path)]
    if not files and key and _is_data(key) and objects.exists(key):
        return [file(key, lambda: objects.sha256(key)[1])]  # a store lists folders only
    return _data_of(files)


def _is_data(path: str) -> bool:
    return Path(path).suffix in ENDINGS and Path(path).name not in NOT_DATA


def _data_of(files: Sequence[PromptFile]) -> list[PromptFile]:
    """Of all files in a folder those with prompts: where Hugging Face saved a data set, exactly what it lists.

    Raises:
        DataError: a data set of several splits, or one that is not whole.
    """
    there = {file.path for file in files}
    saved: dict[str, set[str]] = {}
    for file in files:
        folder, _, name = file.path.rpartition("/")
        if name == "dataset_dict.json":
            inside = [path.removeprefix(f"{folder}/") for path in there if path.startswith(f"{folder}/")]
            splits = sorted({f"{folder}/{path.split('/')[0]}" for path in inside if "/" in path})
            raise DataError(f"{folder} holds several splits; name the folders of those you want: {', '.join(splits)}")
        if name == "state.json" and (listed := _listed(file)) is not None:
            saved[folder] = {f"{folder}/{each}" for each in listed}
            if lost := sorted(saved[folder] - there):
                raise DataError(f"{file.path} lists {lost[0]}, which is not there; save the data set again")
    return [
        file
        for file in files
        if _is_data(file.path) and file.path in saved.get(file.path.rpartition("/")[0], {file.path})
    ]


def _listed(state: PromptFile) -> list[str] | None:
    """Names of the data files that Hugging Face's state.json lists; None: it is something else."""
    try:
        return [each["filename"] for each in json.loads(state.read())["_data_files"]]
    except (KeyError, TypeError):
        return None
    except ValueError as error:
        raise DataError(f"can't read {state.path}: {error}; save the data set again") from error


def _mapped(there: dict[str, list[Any]], options: FilesData, path: str, ids: str) -> pa.Table:
    """The columns that a problem gives; all others are metadata.

    Args:
        ids: what the ids of prompts without one begin with.
    """
    taken = {name: name for name in MAPPED} | {str(name): column for name, column in options.columns.items()}
    for name, column in taken.items():
        needed = name == "prompt" or (name == "reference" and options.needs_reference) or name in options.columns
        if column not in there and needed:
            raise DataError(
                f"{path} has no column {column!r} for the {name}; {nearest(column, there)}. Set data.columns, e.g. "
                f"{{{name}: {next(iter(there), '...')}}}"
            )
    prompts = there[taken["prompt"]]
    count = len(prompts)
    messages = [_messages(each, f"{path}: the prompt of row {row}") for row, each in enumerate(prompts)]
    columns: dict[str, list[str | None]] = {
        name: [_text(each, f"{path}: the {name} of row {row}") for row, each in enumerate(there[column])]
        for name, column in taken.items()
        if name != "prompt" and column in there
    }
    columns["prompt"] = [
        text if turns is None else "\n\n".join(turn["content"] for turn in turns)
        for text, turns in zip(prompts, messages, strict=True)
    ]
    needed_of_all = {"prompt": "", "prompt_id": ""} | (
        {"reference": ", or set data.needs_reference=false"} if options.needs_reference else {}
    )
    for name, remedy in needed_of_all.items():
        lacking = [row for row, text in enumerate(columns.get(name, ())) if not (text or "").strip()]
        if lacking:
            raise DataError(
                f"{path}: {len(lacking)} of {count} rows have no {name}, the first is row {lacking[0]}; mend or remove "
                f"them{remedy}"
            )
    others = [name for name in there if name not in taken.values()]
    made = {
        "prompt_id": columns.get("prompt_id", [f"{ids}-{row}" for row in range(count)]),
        "prompt": columns["prompt"],
        "reference": [each or "" for each in columns.get("reference", [None] * count)],
        "data_source": [options.name if each is None else each for each in columns.get("data_source", [None] * count)],
        "demonstration": columns.get("demonstration", [None] * count),
        "messages": [None if turns is None else json.dumps(turns) for turns in messages],
        "metadata": [
            json.dumps({name: there[name][row] for name in others}, default=str) if others else None
            for row in range(count)
        ],
    }
    return pa.table(made, schema=SCHEMA)


def _messages(prompt: object, place: str) -> list[dict[str, str]] | None:
    """The turns of a prompt that is chat messages, a list of ``role`` and ``content``; None: it is a text, or null.

    Raises:
        DataError: it is something else.
    """
    if prompt is None or isinstance(prompt, str):
        return None
    if not isinstance(prompt, list):
        raise DataError(f"{place} must be a text or a list of messages, found {str(prompt)[:160]}")
    for turn in prompt:
        known = isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        if not known:
            raise DataError(f"{place} has a message without a role or a content that are texts: {str(turn)[:160]}")
    return [{"role": turn["role"], "content": turn["content"]} for turn in prompt]


def _text(value: object, place: str) -> str | None:
    """Texts as they are, lists and dicts as JSON, numbers and dates as they are written.

    >>> [_text(each, "") for each in ("a", 2, 2.0, Decimal("12.50"), True, ["a"])]
    ['a', '2', '2', '12.50', 'true', '["a"]']
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        raise DataError(f"{place} is bytes; save that column as text")
    if isinstance(value, bool | list | dict):
        return json.dumps(value, default=str)
    return f"{value:f}" if isinstance(value, Decimal) else str(value).removesuffix(".0")


PROBLEM = Problem(name="files", load=load, make_reward=make_reward)
