"""`grpo score`: a reward function over responses in a file, as somebody uses it who is writing one."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

import flows.cli.main
from flows.cli.main import app

ROWS: list[dict[str, Any]] = [
    {"prompt": "2+3", "response": "#### 5", "reference": "5", "data_source": "plus", "level": 1},
    {"prompt": "4+4", "response": "#### 9", "reference": "8", "data_source": "plus", "level": 2},
    {"prompt": "7-5", "response": "It is 2.", "reference": "2", "data_source": "minus", "level": 1},
    {"prompt": "9-1", "response": "#### 8", "reference": "8", "data_source": "minus", "level": 3},
    {"prompt": "3-1", "response": "#### 2", "reference": "2", "data_source": "minus", "level": 3},
]
FUNCTIONS = """
from grpo_lib.types import RewardResult

calls = 0


def found(sample, *, bonus=0.0, needle=None):
    right = (sample.reference if needle is None else needle) in sample.response
    return RewardResult(value=right + bonus, components={"correct": float(right)}, answer=sample.response[-1:])


def every_third(sample):
    global calls
    calls += 1
    if calls % 3 == 0:
        raise RuntimeError("every third")
    return calls % 3 / 2


def by_level(samples):
    return [None if each.metadata["level"] == 2 else each.metadata["level"] for each in samples]


async def waits(sample):
    import asyncio

    await asyncio.sleep(0.01)
    return len(sample.prompt)


def talks(sample):
    print("looking at", sample.prompt)
    return 1.0


def parts(sample):
    return RewardResult(value=0.5, components={"answer": 2.0, "style": 0.25}, answer="a", text="a word")


def none(sample):
    return None


def wrong_parameter(response):
    return 1.0
"""


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pa.Table.from_pylist(list(rows)), path)


def write_arrow(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(list(rows))
    with pa.OSFile(str(path), "wb") as target, pa.ipc.new_file(target, table.schema) as writer:
        writer.write_table(table)


def write_stream(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """As Hugging Face's `save_to_disk`."""
    table = pa.Table.from_pylist(list(rows))
    with pa.OSFile(str(path), "wb") as target, pa.ipc.new_stream(target, table.schema) as writer:
        writer.write_table(table)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `my.py` and `some.jsonl`, in which the command is run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(FUNCTIONS)
    write_jsonl(tmp_path / "some.jsonl", ROWS)
    return tmp_path


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, ["score", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def summary(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown(*words, "--json"))
    return found


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command as the console script does, to its exit code 2; gives the one line that it says."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["grpo", "score", *words])
        with monkeypatch.context() as patch:
            patch.setattr(os, "_exit", leave)
            with pytest.raises(SystemExit) as left:
                flows.cli.main.main()
        said = capsys.readouterr()
        assert left.value.code == 2, said.err
        assert said.out == ""
        assert said.err.startswith("error: ")
        assert "Traceback" not in said.err
        return said.err.removeprefix("error: ").rstrip("\n")

    return run


# Files and functions


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("r.jsonl", write_jsonl),
        ("r.json", write_jsonl),
        ("r.parquet", write_parquet),
        ("r.arrow", write_arrow),
        ("r.feather", write_arrow),
        ("s.arrow", write_stream),
    ],
)
def test_a_file_of_any_kind_is_scored(name: str, write: Callable[[Path, Any], None], here: Path) -> None:
    write(here / name, ROWS)
    assert summary(name, "--reward", "gsm8k") == {
        "columns": {
            "prompt": "prompt",
            "response": "response",
            "reference": "reference",
            "data_source": "data_source",
        },
        "samples": 5,
        "scored": 5,
        "failed_fraction": 0.0,
        "mean": pytest.approx(0.6),
        "min": 0.0,
        "max": 1.0,
        "correct_mean": pytest.approx(0.6),
        "data_source": {
            "plus": {"scored": 2, "mean": 0.5},
            "minus": {"scored": 3, "mean": pytest.approx(2 / 3)},
        },
        "values": {"0": 2, "1": 3},
        "reasons": {},
    }


def test_what_came_out_is_shown_to_people() -> None:
    text = shown("some.jsonl", "--reward", "gsm8k")
    lines = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    assert lines[0] == "some.jsonl: gsm8k"
    assert "all 5 of 5 0.6000" in lines
    assert "plus 2 0.5000" in lines
    assert "minus 3 0.6667" in lines
    assert "correct 0.6000" in lines
    assert "columns: prompt, response, reference, data_source" in lines
    assert f"0 {'█' * 20} 2" in lines
    assert f"1 {'█' * 30} 3" in lines


@pytest.mark.parametrize(
    ("words", "mean", "values"),
    [
        (["gsm8k", "--option", "extraction=flexible"], 0.8, {"0": 1, "1": 4}),
        (["exact_match", "--option", r"pattern=#### (\d+)"], 0.6, {"0": 2, "1": 3}),
        (["length", "--option", "target=4"], 0.55, {"0.5": 4, "0.75": 1}),
        (["overlong", "--option", "max_length=3", "--option", "buffer=2"], -0.6, {"-1": 1, "-0.5": 4}),
        (["my.py:found"], 0.8, {"0": 1, "1": 4}),
        (["my:found", "--option", "bonus=1e-3"], 0.801, {"0.001": 1, "1.001": 4}),
        (["my.py:found", "--option", 'needle="5"', "--option", "bonus=0.5"], 0.7, {"0.5": 4, "1.5": 1}),
        (["my.py:waits", "--concurrency", "2"], 3.0, {"3": 5}),
    ],
)
def test_built_in_functions_and_ones_own_take_options(words: list[str], mean: float, values: dict[str, int]) -> None:
    found = summary("some.jsonl", "--reward", *words)
    assert found["mean"] == pytest.approx(mean)
    assert found["values"] == values
    assert found["scored"] == 5


def test_further_columns_are_metadata_and_a_batched_function_sees_all_samples() -> None:
    found = summary("some.jsonl", "--reward", "my.py:by_level")
    assert found["values"] == {"1": 2, "3": 2}
    assert found["reasons"] == {"TypeError: reward must be a number, found None": 1}


def test_of_many_different_values_none_is_listed(here: Path) -> None:
    write_jsonl(here / "many.jsonl", [{"response": "w " * count} for count in range(1, 41)])
    found = summary("many.jsonl", "--reward", "length", "--option", "target=100")
    assert found["values"] is None
    assert found["mean"] == pytest.approx(0.205)  # (0.01 + ... + 0.40) / 40
    assert "█" not in shown("many.jsonl", "--reward", "length", "--option", "target=100")


def test_what_a_function_prints_is_shown_beside_the_result(capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["score", "some.jsonl", "--reward", "my.py:talks", "--json"])
    assert json.loads(result.stdout)["mean"] == 1.0
    assert "talks printed: looking at 2+3\nlooking at 4+4\n" in result.stderr + capfd.readouterr().err


# Failures


def test_a_function_that_raises_every_third_time_is_counted_exactly(here: Path) -> None:
    write_jsonl(here / "many.jsonl", [{"response": f"number {place}"} for place in range(200)])
    found = summary("many.jsonl", "--reward", "my.py:every_third", "--output", "out.parquet")
    assert (found["samples"], found["scored"]) == (200, 134)
    assert found["reasons"] == {"RuntimeError: every third": 66}
    assert found["failed_fraction"] == pytest.approx(0.33)
    assert found["values"] == {"0.5": 67, "1": 67}
    assert found["mean"] == pytest.approx(0.75)
    rows = pyarrow.parquet.read_table("out.parquet").to_pylist()
    assert [row["value"] for row in rows] == ([0.5, 1.0, None] * 67)[:200]
    assert {row["reason"] for row in rows[2::3]} == {"RuntimeError: every third"}


def test_a_function_that_scores_nothing_is_shown_with_its_reason() -> None:
    text = shown("some.jsonl", "--reward", "my.py:none", "--output", "out.parquet")
    assert "0 of 5" in text
    assert "5 x TypeError: reward must be a number, found None" in text
    assert {field.name: str(field.type) for field in pyarrow.parquet.read_schema("out.parquet")} == {
        "prompt_id": "string",
        "value": "double",
        "reason": "string",
        "answer": "string",
        "text": "string",
    }


def test_the_commonest_reasons_are_shown_and_the_others_counted(here: Path) -> None:
    (here / "odd.py").write_text("def odd(sample):\n    raise ValueError(sample.response[0])\n")
    write_jsonl(here / "odd.jsonl", [{"response": letter, "id": f"id-{letter}"} for letter in "aaabbcdefg"])
    text = shown("odd.jsonl", "--reward", "odd.py:odd")
    assert text.index("3 x ValueError: a") < text.index("2 x ValueError: b") < text.index("1 x ValueError: c")
    assert "2 x ValueError: b\n    row 3 (from 0), id-b: 'b'\n" in text
    assert "and 2 more reasons" in text
    assert "ValueError: g" not in text


# Columns


def test_columns_are_found_by_their_usual_names(here: Path) -> None:
    write_jsonl(here / "q.jsonl", [{"question": "2+3", "answer": "5", "completion": "#### 5", "source": "s", "id": 7}])
    found = summary("q.jsonl", "--reward", "gsm8k", "--output", "out.parquet")
    assert found["columns"] == {
        "prompt": "question",
        "response": "completion",
        "reference": "answer",
        "data_source": "source",
        "prompt_id": "id",
    }
    assert (found["mean"], list(found["data_source"])) == (1.0, ["s"])
    assert pyarrow.parquet.read_table("out.parquet").column("prompt_id").to_pylist() == ["7"]
    assert "prompt from question, response from completion" in shown("q.jsonl", "--reward", "gsm8k")


def test_columns_with_other_names_are_named(here: Path) -> None:
    write_jsonl(here / "o.jsonl", [{"said": "#### 5", "gold": "5", "response": "#### 6"}])
    words = ["o.jsonl", "--reward", "gsm8k", "--column", "reference=gold"]
    assert summary(*words)["mean"] == 0.0
    assert summary(*words, "--column", "response=said")["mean"] == 1.0


def test_a_column_that_is_named_for_one_thing_is_not_taken_for_another_unasked(here: Path) -> None:
    write_jsonl(here / "a.jsonl", [{"answer": "#### 5"}])
    found = summary("a.jsonl", "--reward", "gsm8k", "--column", "response=answer")
    assert found["columns"] == {"response": "answer"}
    assert found["reasons"] == {"ValueError: the reference '' is no number": 1}
    both = ["--column", "response=answer", "--column", "reference=answer"]
    assert summary("a.jsonl", "--reward", "gsm8k", *both)["mean"] == 1.0


def test_texts_stay_texts_and_all_else_becomes_text(here: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"response": "2024-01-05", "reference": "2024-01-05"},
        {"response": "3", "reference": 3},
        {"response": "3.5", "reference": 3.5},
        {"response": "true", "reference": True},
        {"response": '{"a": [1]}', "reference": {"a": [1]}},
        {"response": "日本 é", "reference": "日本 É"},
    ]
    write_jsonl(here / "t.jsonl", rows)
    assert summary("t.jsonl", "--reward", "exact_match")["values"] == {"1": 6}
    write_jsonl(
        here / "c.jsonl",
        [{"response": "<think>x</think><answer>1+2</answer>", "reference": {"numbers": [1, 2], "target": 3}}],
    )
    assert summary("c.jsonl", "--reward", "countdown")["mean"] == 1.0


def test_a_response_that_is_null_is_not_judged_and_one_that_is_empty_is(here: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"completion": "a b", "reference": "a b"},
        {"completion": None, "reference": "", "id": "lost"},
        {"completion": "", "reference": "a"},
        {"reference": "a"},
    ]
    write_jsonl(here / "null.jsonl", rows)
    found = summary("null.jsonl", "--reward", "exact_match", "--output", "out.parquet")
    assert (found["samples"], found["scored"], found["values"]) == (4, 2, {"0": 1, "1": 1})
    assert found["reasons"] == {"the column 'completion' is null": 2}
    assert found["mean"] == 0.5
    rows = pyarrow.parquet.read_table("out.parquet").to_pylist()
    assert [row["value"] for row in rows] == [1.0, None, 0.0, None]
    text = shown("null.jsonl", "--reward", "exact_match")
    assert "2 x the column 'completion' is null\n    row 1 (from 0), lost: ''\n" in text
    write_parquet(here / "nan.parquet", [{"response": 3.0}, {"response": math.nan}])
    found = summary("nan.parquet", "--reward", "length", "--option", "target=2")
    assert (found["values"], found["reasons"]) == ({"0.5": 1}, {"the column 'response' is null": 1})


def test_without_references_what_compares_with_them_gives_no_value(here: Path) -> None:
    write_jsonl(here / "bare.jsonl", [{"response": ""}, {"response": "a"}])
    for name in ("regex", "exact_match"):
        found = summary("bare.jsonl", "--reward", name)
        assert (found["scored"], found["reasons"]) == (0, {"ValueError: the reference is empty": 2})


def test_tokens_are_counted_by_whoever_did_else_words_are(here: Path) -> None:
    def lengths(rows: list[dict[str, Any]], name: str = "n.jsonl") -> dict[str, int]:
        (write_parquet if name.endswith("parquet") else write_jsonl)(here / name, rows)
        values: dict[str, int] = summary(name, "--reward", "length", "--option", "target=10")["values"]
        return values

    assert lengths([{"response": "a b c"}, {"response": ""}]) == {"0": 1, "0.3": 1}
    assert lengths([{"response": "a b c", "tokens": 5}, {"response": "a b", "tokens": None}]) == {"0.2": 1, "0.5": 1}
    assert lengths([{"response": "a b c", "tokens": ["a", "b"]}]) == {"0.3": 1}
    with_nan = [{"response": "a", "tokens": 4.0}, {"response": "a b", "tokens": math.nan}]
    assert lengths(with_nan, "n.parquet") == {"0.2": 1, "0.4": 1}


# Output


@pytest.mark.parametrize("name", ["out.parquet", "out.arrow"])
def test_every_value_is_kept(name: str) -> None:
    shown("some.jsonl", "--reward", "my.py:parts", "--output", name)
    table = (
        pyarrow.parquet.read_table(name) if name == "out.parquet" else pa.ipc.open_file(pa.memory_map(name)).read_all()
    )
    assert table.num_rows == 5
    assert table.slice(1, 1).to_pylist() == [
        {
            "prompt_id": "1",
            "value": 0.5,
            "reason": None,
            "answer": "a",
            "text": "a word",
            "component_answer": 2.0,  # beside the column of that name
            "style": 0.25,
        }
    ]


# What is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("none.jsonl --reward gsm8k", "there is no file none.jsonl"),
        (". --reward gsm8k", "there is no file ."),
        ("my.py --reward gsm8k", "my.py: name a file that ends in .jsonl, .parquet or .arrow"),
        ("empty.jsonl --reward gsm8k", "empty.jsonl has no rows"),
        ("broken.jsonl --reward gsm8k", "broken.jsonl, line 2: not a JSON object a line, in UTF-8 ("),
        ("list.jsonl --reward gsm8k", "list.jsonl, line 1: must be a JSON object, found list"),
        ("latin.jsonl --reward gsm8k", "latin.jsonl, line 1: not a JSON object a line, in UTF-8 ("),
        ("broken.parquet --reward gsm8k", "can't read broken.parquet: "),
        ("broken.arrow --reward gsm8k", "can't read broken.arrow: "),
        ("some.jsonl", "Missing option '--reward'"),
        ("--reward gsm8k", "Missing argument 'file'"),
        ("some.jsonl --reward gsmk8", "unknown reward function 'gsmk8'; did you mean gsm8k?"),
        ("some.jsonl --reward my.py", "--reward my.py: name a function, as my_reward.py:function, or one that"),
        ("some.jsonl --reward my.py:", "--reward my.py:: name a function, as my_reward.py:function"),
        ("some.jsonl --reward other.py:found", "--reward='other.py:found': there is no file other.py"),
        ("some.jsonl --reward my.py:fond", "--reward='my.py:fond': there is no 'fond' in it; did you mean found?"),
        ("some.jsonl --reward my.py:wrong_parameter", "--reward: my.py:wrong_parameter(response) must take `sample`"),
        ("some.jsonl --reward fails.py:f", "--reward='fails.py:f' fails when it is imported: ZeroDivisionError"),
        ("some.jsonl --reward my.py:found --option bonu=1", "got an unexpected keyword argument 'bonu'"),
        ("some.jsonl --reward my.py:found --option bonus", "--option bonus: give KEY=VALUE"),
        ("some.jsonl --reward my.py:found --option bonus=[", "--option bonus=[: the value is no YAML ("),
        ("some.jsonl --reward my.py:found --option bonus=2024-01-05", "--option bonus datetime.date(2024, 1, 5): "),
        ("some.jsonl --reward gsm8k --option extraction=lenient", "--option extraction='lenient': Input should be"),
        ("some.jsonl --reward gsm8k --option strict=1", "--option strict: reward function 'gsm8k' has no such option"),
        ("some.jsonl --reward length", "--option target: reward function 'length' needs it"),
        ("some.jsonl --reward gsm8k --column response=respons", "there is no column 'respons' for the response; did"),
        ("some.jsonl --reward gsm8k --column respons=response", "no column is needed for 'respons'; did you mean"),
        ("some.jsonl --reward gsm8k --column response", "--column response: give NAME=COLUMN"),
        ("said.jsonl --reward gsm8k", "no column holds the responses (response, completion, text, output); there are"),
        ("said.jsonl --reward gsm8k --column response=said --column response_tokens=said", "must hold whole numbers"),
        ("some.jsonl --reward gsm8k --processes 0", "'--processes': "),
        ("some.jsonl --reward gsm8k --concurrency 0", "'--concurrency': "),
        ("some.jsonl --reward gsm8k --timeout-seconds 0", "--timeout-seconds 0.0: Input should be greater than 0"),
        ("some.jsonl --reward gsm8k --timeout-seconds nan", "--timeout-seconds nan: "),
        ("some.jsonl --reward gsm8k --timeout-seconds soon", "'--timeout-seconds': "),
        ("some.jsonl --reward gsm8k --output out.csv", "--output out.csv: name a file in a folder that exists, ending"),
        ("some.jsonl --reward gsm8k --output no/out.parquet", "--output no/out.parquet: name a file in a folder"),
        ("some.parquet --reward gsm8k --output some.parquet", "--output some.parquet is the file that is read"),
        ("some.jsonl --reward gsm8k --output folder.parquet", "--output folder.parquet: can't write it: "),
    ],
)  # fmt: skip
def test_what_cant_be_is_refused_with_one_line_and_code_2(
    words: str, message: str, here: Path, refused: Callable[..., str]
) -> None:
    (here / "empty.jsonl").write_text("\n\n")
    (here / "broken.jsonl").write_text('{"response": "a"}\n{"response"')
    (here / "list.jsonl").write_text('[{"response": "a"}]')
    (here / "latin.jsonl").write_bytes('{"response": "é"}'.encode("latin-1"))
    (here / "broken.parquet").write_bytes(b"PAR1 and so on")
    (here / "broken.arrow").write_bytes(b"ARROW1 and so on")
    (here / "fails.py").write_text("1 / 0\n")
    write_jsonl(here / "said.jsonl", [{"said": "a"}])
    write_parquet(here / "some.parquet", ROWS)
    (here / "folder.parquet").mkdir()
    said = refused(*words.split())
    assert message in said
    assert "reward.functions" not in said, "nobody has written a configuration"
    assert "\n" not in said


# As a command of its own


def test_help_names_every_function_that_is_built_in() -> None:
    from grpo_lib.rewards.judges import BUILT_IN
    from grpo_lib.rewards.registry import REWARDS

    for module in BUILT_IN:
        __import__(module)
    text = CliRunner(env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}).invoke(app, ["score", "--help"]).output
    assert [entry.name for entry in REWARDS if not entry.source and entry.name not in text] == []
    for name in ("question", "completion", "ground_truth", "metadata"):
        assert name in text


def test_the_command_needs_neither_a_model_nor_prefect() -> None:
    code = (
        "import sys; from flows.cli.main import app; "
        "app(['score', 'some.jsonl', '--reward', 'gsm8k', '--json'], standalone_mode=False); "
        "print(sorted({'transformers', 'prefect', 'vllm', 'mlflow'} & sys.modules.keys()))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(flows.cli.main.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
