"""Prompts of the user's own: formats, columns, and what is wrong with them said before a run."""

import datetime
import json
import os
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from grpo_lib.config_data import FilesData
from grpo_lib.errors import DataError
from grpo_lib.problems.files import load, prompt_files

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


def paths_of(chosen: FilesData) -> list[str]:
    return [file.path for file in prompt_files(chosen)]


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
        assert [Path(each).name for each in paths_of(chosen)] == [f"part-{part}.jsonl" for part in range(3)]
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


def test_texts_that_look_like_dates_stay_texts_and_values_of_other_columns_stay_what_they_are(tmp_path: Path) -> None:
    rows = [{"prompt": f"2026-01-0{n + 1}", "reference": "x", "mixed": n if n else "none"} for n in range(4)]
    train = load(options(jsonl(tmp_path / "dates.jsonl", rows)), "train", 0)
    assert train.column("prompt").to_pylist() == ["2026-01-01", "2026-01-02"]
    assert [json.loads(each) for each in train.column("metadata").to_pylist()] == [{"mixed": "none"}, {"mixed": 1}]


def test_a_file_may_hold_texts_and_chat_messages(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "b?"}]
    prompts = ["a?", turns, '[{"role": "user"}]', "d?", [{"role": "user", "content": "e?"}]]
    place = jsonl(tmp_path / "mixed.jsonl", [{"prompt": each, "reference": "x"} for each in prompts])
    train = load(options(place), "train", 0)
    assert train.column("prompt").to_pylist() == ["a?", "b?", '[{"role": "user"}]']
    assert train.column("messages").to_pylist() == [None, '[{"role": "user", "content": "b?"}]', None]


PARTS = [{"role": "user", "content": [{"type": "text", "text": "c?"}]}]


@pytest.mark.parametrize(("write", "name"), [(jsonl, "a.jsonl"), (parquet, "a.parquet")])
@pytest.mark.parametrize(
    ("others", "wrong", "message"),
    [
        ([{"role": "user", "content": "a"}], None, "1 of 5 rows have no prompt, the first is row 3"),
        ([{"role": "user", "content": "a"}], [], "1 of 5 rows have no prompt, the first is row 3"),
        ({"role": "user"}, {"role": "system"}, r"the prompt of row 0 must be a text or a list of messages, found \{"),
        (7, 7, "the prompt of row 0 must be a text or a list of messages, found 7"),
        (["a"], ["b"], "the prompt of row 0 has a message without a role or a content that are texts: a"),
        (PARTS, PARTS, "the prompt of row 0 has a message without a role or a content that are texts: .*c?"),
    ],
)
def test_a_prompt_that_is_neither_text_nor_messages_is_refused_with_its_row(
    tmp_path: Path, write: Callable[..., str], name: str, others: Any, wrong: Any, message: str
) -> None:
    rows = [{"prompt": wrong if row == 3 else others, "reference": "x"} for row in range(5)]
    with pytest.raises(DataError, match=message):
        load(options(write(tmp_path / name, rows)), "train", 0)


@pytest.mark.parametrize("wrong", [PARTS, {"role": "user", "content": "d"}, 7, True, ["d"]])
def test_one_such_prompt_among_texts_and_messages_is_refused_with_its_row(tmp_path: Path, wrong: Any) -> None:
    prompts = ["a", [{"role": "user", "content": "b"}], "c", wrong, "e"]
    place = jsonl(tmp_path / "a.jsonl", [{"prompt": each, "reference": "x"} for each in prompts])
    with pytest.raises(DataError, match="the prompt of row 3 "):
        load(options(place), "train", 0)


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        (pa.array(["A", "B", "A"]).dictionary_encode(), ["A", "B", "A"]),
        (pa.array([7, 8, 7]).dictionary_encode(), ["7", "8", "7"]),
        (pa.array(["A", "B", "C"], pa.string_view()), ["A", "B", "C"]),
        (pa.array(["A", "B", "C"], pa.large_string()), ["A", "B", "C"]),
        (pa.array([Decimal("12.50"), Decimal("0.00"), Decimal("-1.25")]), ["12.50", "0.00", "-1.25"]),
        (pa.array([Decimal("0.00000000")] * 3), ["0.00000000"] * 3),
        (pa.array([datetime.date(2026, 1, day) for day in (1, 2, 3)]), ["2026-01-01", "2026-01-02", "2026-01-03"]),
        (pa.array([datetime.datetime(2026, 1, 1, 13, 5)] * 3), ["2026-01-01 13:05:00"] * 3),
        (
            pa.array([0, 1, 2], pa.timestamp("ns")),
            [f"1970-01-01 00:00:00{end}" for end in ("", ".000000001", ".000000002")],
        ),
        (pa.array([1.0, 2.5, 0.1]), ["1", "2.5", "0.1"]),
        (pa.array([1.0, 2.5, 0.1], pa.float32()), ["1", "2.5", "0.1"]),
        (pa.array([True, False, True]), ["true", "false", "true"]),
        (pa.array([["a"], [], ["b"]]), ['["a"]', "[]", '["b"]']),
        (pa.array([{"in": 1}, {"in": 2}, {"in": None}]), ['{"in": 1}', '{"in": 2}', '{"in": null}']),
    ],
    ids=lambda each: str(each.type) if isinstance(each, pa.Array) else "",
)
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_columns_of_every_type_are_texts(tmp_path: Path, ending: str, column: pa.Array, texts: list[str]) -> None:
    table, path = pa.table({"prompt": pa.array(["a", "b", "c"]), "reference": column}), tmp_path / f"a.{ending}"
    if ending == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    both = [load(options(str(path)), split, 0) for split in ("train", "heldout")]
    assert [each for table in both for each in table.column("reference").to_pylist()] == texts


def test_prompts_and_ids_that_are_categories_are_texts(tmp_path: Path) -> None:
    column = pa.array(["A", "B", "C"]).dictionary_encode()
    pyarrow.parquet.write_table(pa.table({"prompt": column, "prompt_id": column, "of": column}), tmp_path / "a.parquet")
    train = load(options(str(tmp_path), needs_reference=False), "train", 0)
    assert [train.column(name)[0].as_py() for name in ("prompt", "prompt_id", "metadata")] == ["A", "A", '{"of": "A"}']


def test_bytes_are_refused_with_their_row(tmp_path: Path) -> None:
    place = parquet(tmp_path / "a.parquet", [{"prompt": "a", "reference": each} for each in (None, b"b", b"c")])
    with pytest.raises(DataError, match="the reference of row 1 is bytes; save that column as text"):
        load(options(place), "train", 0)


def saved_dict(path: Path) -> str:
    for split, first in (("train", 0), ("test", 5)):
        path.mkdir(exist_ok=True)
        saved_to_disk(path / f"{split}.x", ROWS[first : first + 5])
        saved_to_disk(path / "left.x", ROWS[:1])  # what Dataset.map leaves there
        (path / "left" / "data-00000-of-00001.arrow").rename(path / split / "cache-4f2a.arrow")
        for each in (path / "left").iterdir():
            each.unlink()
        (path / "left").rmdir()
    (path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return str(path)


def test_a_saved_data_set_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    place = saved_dict(tmp_path / "set")
    remedy = f"{place} holds several splits; name the folders of those you want: {place}/test, {place}/train"
    for wrong in (options(place), options(str(tmp_path)), options(f"{place}/train", heldout=[place])):
        with pytest.raises(DataError) as caught:
            load(wrong, "train", 0)
        assert str(caught.value) == remedy
    chosen = options(f"{place}/train", heldout=[f"{place}/test"])
    assert load(chosen, "train", 0).column("prompt").to_pylist() == ["0 + 1", "1 + 1", "2 + 1", "3 + 1", "4 + 1"]
    assert load(chosen, "heldout", 0).column("prompt").to_pylist() == ["5 + 1", "6 + 1"]


def test_a_saved_data_set_is_the_files_that_it_lists(tmp_path: Path) -> None:
    place = Path(saved_dict(tmp_path / "set")) / "train"
    assert sorted(each.name for each in place.iterdir()) == [
        "cache-4f2a.arrow",
        "data-00000-of-00001.arrow",
        "dataset_info.json",
        "state.json",
    ]
    assert paths_of(options(str(place))) == [f"{place}/data-00000-of-00001.arrow"]
    (place / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match=r"state\.json lists .*data-00000-of-00001\.arrow, which is not there"):
        paths_of(options(str(place)))
    (place / "state.json").write_text('{"_data_files": [')
    with pytest.raises(DataError, match=r"can't read .*state\.json"):
        paths_of(options(str(place)))
    (place / "state.json").write_text('{"state": "somebody else\'s"}')
    assert paths_of(options(str(place))) == [f"{place}/cache-4f2a.arrow"]


def test_saved_data_sets_on_s3_are_read_like_those_here(s3_endpoint: str, tmp_path: Path) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1")
    client.create_bucket(Bucket="saved")
    here = Path(saved_dict(tmp_path / "set"))
    for each in here.rglob("*.*"):
        client.upload_file(str(each), "saved", f"sets/{each.relative_to(here)}")
    with pytest.raises(DataError) as caught:
        paths_of(options("s3://saved/sets", endpoint_url=s3_endpoint))
    assert str(caught.value) == (
        "s3://saved/sets holds several splits; name the folders of those you want: "
        "s3://saved/sets/test, s3://saved/sets/train"
    )
    for place in ("s3://saved/sets/train", "s3://saved/sets/train/"):
        chosen = options(place, endpoint_url=s3_endpoint)
        assert paths_of(chosen) == ["s3://saved/sets/train/data-00000-of-00001.arrow"]
        assert load(chosen, "train", 0).column("prompt").to_pylist() == ["0 + 1", "1 + 1", "2 + 1"]


def test_a_file_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    chosen = options(str(tmp_path))
    jsonl(tmp_path / "a.jsonl", [{"prompt": each, "reference": "r"} for each in "abcd"])
    assert load(chosen, "train", 0).column("prompt").to_pylist() == ["a", "b"]
    assert load(chosen, "train", 0) is load(chosen, "train", 0)
    jsonl(tmp_path / "a.jsonl", [{"prompt": each, "reference": "r"} for each in "efgh"])  # as long as before
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    assert load(chosen, "train", 0).column("prompt").to_pylist() == ["e", "f"]
    jsonl(tmp_path / "b.jsonl", [{"prompt": each, "reference": "r"} for each in "ij"])
    assert load(chosen, "train", 0).column("prompt").to_pylist() == ["e", "f", "g", "h"]


@pytest.mark.parametrize("place", ["s3://again", "s3://again/a.jsonl"])
def test_an_object_that_was_written_again_is_read_again(s3_endpoint: str, place: str) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1")
    client.create_bucket(Bucket="again")
    for texts in ("abcd", "efghi"):
        body = "".join(json.dumps({"prompt": each, "reference": "r"}) + "\n" for each in texts)
        client.put_object(Bucket="again", Key="a.jsonl", Body=body.encode())
        train = load(options(place, endpoint_url=s3_endpoint), "train", 0)
        assert train.column("prompt").to_pylist() == list(texts[:-2])


def test_files_of_the_same_name_give_ids_of_their_own(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        jsonl(tmp_path / folder / "x.jsonl", [{"prompt": f"{folder}{k}", "reference": "r"} for k in range(2)])
    chosen = options(str(tmp_path / "a"), str(tmp_path / "b"), heldout=[str(tmp_path / "*" / "x.jsonl")])
    chosen = chosen.model_copy(update={"duplicates": "keep"})
    train, heldout = (load(chosen, split, 0).column("prompt_id").to_pylist() for split in ("train", "heldout"))
    assert train == ["train-x.jsonl-0", "train-x.jsonl-1", "train-x.jsonl.2-0", "train-x.jsonl.2-1"]
    assert heldout == ["heldout-x.jsonl-0", "heldout-x.jsonl-1"]


@pytest.mark.parametrize("column", ["prompt_id", "number"])
def test_ids_that_stand_for_several_prompts_are_refused(tmp_path: Path, column: str) -> None:
    places = [
        jsonl(tmp_path / f"{text}.jsonl", [{"prompt": f"{text}{k}", "reference": "r", column: k} for k in range(3)])
        for text in "ab"
    ]
    columns = {} if column == "prompt_id" else {"prompt_id": column}
    for chosen in (options(*places, columns=columns), options(places[0], heldout=[places[1]], columns=columns)):
        with pytest.raises(DataError) as caught:
            load(chosen, "train", 0)
        assert str(caught.value).partition("prompt ids ")[2] == (
            f"stand for several prompts, e.g. '0'; make the column '{column}' unique over all files of both splits, or "
            "rename it: prompts without one get ids from their file and row"
        )


def test_ids_of_prompts_that_are_dropped_may_stand_there_again(tmp_path: Path) -> None:
    rows = [{"prompt": text, "reference": "r", "prompt_id": text} for text in ("a", "b", "a", "c", "d")]
    place = jsonl(tmp_path / "a.jsonl", rows)
    assert load(options(place), "train", 0).column("prompt_id").to_pylist() == ["a", "b"]
    with pytest.raises(DataError, match=r"1 prompt ids stand for several prompts, e\.g\. 'a'"):
        load(options(place, duplicates="keep"), "train", 0)


def test_a_row_without_an_id_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": text, "reference": "r", "prompt_id": None if text == "b" else text} for text in "abcd"]
    with pytest.raises(DataError, match="1 of 4 rows have no prompt_id, the first is row 1"):
        load(options(jsonl(tmp_path / "a.jsonl", rows)), "train", 0)
