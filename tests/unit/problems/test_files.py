"""Prompts of the user's own: formats, columns, and what is wrong with them said before a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from grpo_lib.config_data import FilesData
from grpo_lib.errors import DataError
from grpo_lib.problems.files import data_paths, load

ROWS = [{"prompt": f"{number} + 1", "reference": str(number + 1), "level": number % 3} for number in range(10)]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def arrow_file(path: Path, rows: list[dict[str, Any]]) -> str:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return str(path)


def saved_to_disk(path: Path, rows: list[dict[str, Any]]) -> str:
    """As Hugging Face's datasets do: a folder with a stream and two JSON files."""
    folder, table = path.with_suffix(""), pa.Table.from_pylist(rows)
    folder.mkdir()
    with pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as w:
        w.write_table(table)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    (folder / "dataset_info.json").write_text("{}")
    return str(folder)


def options(*train: str, **more: Any) -> FilesData:
    return FilesData.model_validate({"train": list(train), "heldout_prompts": 2} | more)


@pytest.mark.parametrize(
    ("write", "name"), [(jsonl, "a.jsonl"), (parquet, "a.parquet"), (arrow_file, "a.arrow"), (saved_to_disk, "a.x")]
)
def test_every_format_gives_the_same_rows(tmp_path: Path, write: Callable[..., str], name: str) -> None:
    place = write(tmp_path / name, ROWS)
    train, heldout = (load(options(place), split, 0) for split in ("train", "heldout"))
    assert train.column("prompt").to_pylist() == [row["prompt"] for row in ROWS[:8]]
    assert heldout.column("reference").to_pylist() == ["9", "10"]
    assert set(train.column("data_source").to_pylist()) == {"files"}
    assert [json.loads(each) for each in train.column("metadata").to_pylist()] == [{"level": k % 3} for k in range(8)]
    ids = [*train.column("prompt_id").to_pylist(), *heldout.column("prompt_id").to_pylist()]
    assert len(set(ids)) == 10


def test_columns_are_mapped_and_numbers_are_texts(tmp_path: Path) -> None:
    place = jsonl(tmp_path / "a.jsonl", [{"q": f"q{k}", "a": k, "from": "x"} for k in range(5)])
    columns = {"prompt": "q", "reference": "a", "data_source": "from"}
    train = load(options(place, columns=columns), "train", 0)
    assert train.column("reference").to_pylist() == ["0", "1", "2"]
    assert train.column("data_source").to_pylist() == ["x"] * 3
    assert train.column("metadata").to_pylist() == [None] * 3


def test_folders_patterns_and_several_files_are_read_in_order(tmp_path: Path) -> None:
    for part in range(3):
        jsonl(tmp_path / f"part-{part}.jsonl", [{"prompt": f"{part}.{k}", "reference": "r"} for k in range(2)])
    (tmp_path / "notes.txt").write_text("no data")
    for place in (str(tmp_path), str(tmp_path / "part-*.jsonl")):
        chosen = options(place)
        assert [Path(each).name for each in data_paths(chosen)] == [f"part-{part}.jsonl" for part in range(3)]
        assert load(chosen, "train", 0).column("prompt").to_pylist() == ["0.0", "0.1", "1.0", "1.1"]


def test_prompts_that_stand_there_twice_are_dropped_refused_or_kept(tmp_path: Path) -> None:
    rows = [{"prompt": text, "reference": "r"} for text in ("a", "b", "a", "c", "b", "d", "e")]
    place = jsonl(tmp_path / "a.jsonl", rows)
    assert load(options(place), "train", 0).column("prompt").to_pylist() == ["a", "b", "c"]
    with pytest.raises(DataError, match="2 prompts of the train split stand there twice"):
        load(options(place, duplicates="refuse"), "train", 0)
    assert load(options(place, duplicates="keep"), "train", 0).num_rows == 5


def test_a_training_prompt_that_is_held_out_too_is_dropped(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "a.jsonl", [{"prompt": text, "reference": "r"} for text in "abc"])
    held = jsonl(tmp_path / "b.jsonl", [{"prompt": text, "reference": "r"} for text in "cd"])
    assert load(options(train, heldout=[held]), "train", 0).column("prompt").to_pylist() == ["a", "b"]
    with pytest.raises(DataError, match=r"1 prompts of data\.train are held out too"):
        load(options(train, heldout=[held], duplicates="refuse"), "train", 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "reference": "r"}, {"prompt": "  ", "reference": "r"}], "1 of 2 rows have no prompt.*row 1"),
        ([{"prompt": "a", "reference": None}, {"prompt": "b", "reference": "r"}], "no reference, the first is row 0"),
        ([{"question": "a", "reference": "r"}], "no column 'prompt'"),
        ([{"prompt": "a", "answer": "r"}], "no column 'reference'"),
    ],
)
def test_what_is_missing_is_named_with_its_row(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(options(jsonl(tmp_path / "a.jsonl", rows)), "train", 0)


def test_a_file_that_is_not_there_or_is_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing at .*missing\.jsonl"):
        load(options(str(tmp_path / "missing.jsonl")), "train", 0)
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"can't read .*bad\.parquet"):
        load(options(str(tmp_path / "bad.parquet")), "train", 0)


def test_a_prefix_on_s3_is_read_like_a_folder(s3_endpoint: str, tmp_path: Path) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1")
    client.create_bucket(Bucket="prompts")
    for part in range(2):
        file = jsonl(tmp_path / "part.jsonl", [{"prompt": f"{part}.{k}", "reference": "r"} for k in range(3)])
        client.upload_file(file, "prompts", f"set/part-{part}.jsonl")
    for place in ("s3://prompts/set", "s3://prompts/set/*.jsonl"):
        chosen = options(place, endpoint_url=s3_endpoint)
        assert load(chosen, "train", 0).column("prompt").to_pylist() == ["0.0", "0.1", "0.2", "1.0"]


@pytest.mark.parametrize(("write", "name"), [(jsonl, "a.jsonl"), (parquet, "a.parquet")])
def test_chat_messages_are_kept_and_read_as_text_by_rewards(
    tmp_path: Path, write: Callable[..., str], name: str
) -> None:
    rows = [
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{n}?"}], "reference": "x"}
        for n in range(4)
    ]
    train = load(options(write(tmp_path / name, rows)), "train", 0)
    assert train.column("prompt").to_pylist() == ["Be brief.\n\n0?", "Be brief.\n\n1?"]
    assert [json.loads(each) for each in train.column("messages").to_pylist()] == [row["prompt"] for row in rows[:2]]


def test_a_message_without_text_is_refused_with_its_row(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "a"}], "reference": "x"} for _ in range(5)]
    rows[3] = {"prompt": [{"role": "user", "content": None}], "reference": "x"}
    with pytest.raises(DataError, match="the prompt of row 3 has a message without a role or a content"):
        load(options(jsonl(tmp_path / "chat.jsonl", rows)), "train", 0)


def test_texts_that_look_like_dates_stay_texts_and_mixed_columns_are_json(tmp_path: Path) -> None:
    rows = [{"prompt": f"2026-01-0{n + 1}", "reference": "x", "mixed": n if n else "none"} for n in range(4)]
    train = load(options(jsonl(tmp_path / "dates.jsonl", rows)), "train", 0)
    assert train.column("prompt").to_pylist() == ["2026-01-01", "2026-01-02"]
    assert [json.loads(each) for each in train.column("metadata").to_pylist()] == [{"mixed": "none"}, {"mixed": "1"}]
