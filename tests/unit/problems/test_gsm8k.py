import json
import os
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lib.config_data import Gsm8kData
from grpo_lib.config_reward import RewardConfig
from grpo_lib.errors import DataError
from grpo_lib.problems.gsm8k import demonstrate, flexible_number, load, make_reward, strict_number
from grpo_lib.types import RewardResult, Sample


def judged(response: str, reference: str, extraction: str) -> RewardResult:
    options = Gsm8kData(path="unused.jsonl", extraction=extraction)
    result = make_reward(options, RewardConfig())(
        Sample(
            prompt="How many?",
            response=response,
            reference=reference,
            data_source="gsm8k",
            response_tokens=len(response),
            finish_reason="stop",
        )
    )
    assert isinstance(result, RewardResult)
    return result


def write_rows(path: Path, count: int, first: int = 0) -> Path:
    rows = [
        {"question": f"What is {n} and one?", "answer": f"It is {n + 1}.\n#### {n + 1}"}
        for n in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# Numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 72", "72"),
        ("####72", "72"),
        ("so it is 5\n#### 72\n", "72"),
        ("#### 72\nSome more words, 99 of them.", "72"),
        ("#### 71\n#### 72", "72"),
        ("#### 1,200", "1200"),
        ("#### 1,234,567", "1234567"),
        ("#### $1,200 dollars", "1200"),
        ("#### $ 5", "5"),
        ("#### 50%", "50"),
        ("#### 18.00", "18"),
        ("#### 18.5", "37/2"),
        ("#### .5", "1/2"),
        ("#### 72.", "72"),
        ("#### -3", "-3"),
        ("#### \u22123", "-3"),
        ("#### -$3.50.", "-7/2"),
        ("#### $-3", "-3"),
        ("#### 72 clips", "72"),
        ("#### 072", "72"),
    ],
)
def test_the_number_after_the_marker_is_read(text: str, value: str) -> None:
    assert strict_number(text) == Fraction(value)
    assert flexible_number(text) == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "72",
        "### 72",
        "####",
        "#### ",
        "####\n72",
        "#### about 72",
        "#### seventy-two",
        "#### 71 or 72",
        "#### 7,2",
        "#### 1,2345",
        "#### 144/2",
        "#### 72.5.1",
        "#### 7.2e1",
        "#### 60+12",
        "#### 72\n#### none",
        "#### ٧٢",
        "#### " + "7" * 5000,
    ],
)
def test_anything_else_is_no_strict_number(text: str) -> None:
    assert strict_number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("48 + 24 = 72", 72),
        ("The answer is 72.", 72),
        ("It costs $1,200 dollars!", 1200),
        ("He owes -3", -3),
        ("75-3", 3),  # a subtraction, not minus three
        ("(80)-8", 8),
        ("72 is what 24 comes to", 24),
        ("#### 72 \n with 24 left", 72),
        ("#### none, so 24", 24),
    ],
)
def test_flexible_takes_the_marked_or_the_last_number(text: str, value: int) -> None:
    assert flexible_number(text) == value


@given(st.text(alphabet="#0123456789,.-$% \nx", max_size=60) | st.text(max_size=60))
def test_extraction_never_raises(text: str) -> None:
    strict_number(text)
    flexible_number(text)


# The reward


@pytest.mark.parametrize("extraction", ["strict", "flexible"])
def test_an_equal_number_is_right_however_it_is_written(extraction: str) -> None:
    right = RewardResult(value=1.0, components={"correct": 1.0, "format": 1.0})
    for written in ("1200", "1,200", "$1,200", "1200.00", "1,200 dollars.", "01200"):
        assert judged(f"So\n#### {written}", "1,200", extraction) == right


def test_equal_numbers_vote_together_and_no_number_does_not_vote() -> None:
    answers = [judged(text, "72", "strict").answer for text in ("#### 1,200.50", "#### $1200.5", "1200.5")]
    assert answers == ["2401/2", "2401/2", None]


@pytest.mark.parametrize("extraction", ["strict", "flexible"])
@pytest.mark.parametrize("written", ["71", "73", "-72", "7.2", "72.01", "720", "0.72", "7,200"])
def test_another_number_is_wrong(written: str, extraction: str) -> None:
    result = judged(f"72 is first.\n#### {written}", "72", extraction)
    assert result == RewardResult(value=0.1, components={"correct": 0.0, "format": 1.0})


def test_a_right_number_without_the_marker_counts_only_when_flexible() -> None:
    assert judged("It is 72.", "72", "strict") == RewardResult(value=0.0, components={"correct": 0.0, "format": 0.0})
    assert judged("It is 72.", "72", "flexible") == RewardResult(value=1.0, components={"correct": 1.0, "format": 0.0})


def test_the_right_number_elsewhere_does_not_count() -> None:
    assert judged("72\n#### 71", "72", "strict").components["correct"] == 0.0
    assert judged("72\n#### 71", "72", "flexible").components["correct"] == 0.0
    assert judged("#### 72\n#### 71", "72", "flexible").components["correct"] == 0.0
    assert judged("It is 72, of 100.", "72", "flexible").components["correct"] == 0.0


def test_a_reference_without_a_number_is_an_error_not_a_wrong_answer() -> None:
    with pytest.raises(DataError, match="'many' is no number"):
        judged("#### 72", "many", "strict")


# Files


def test_rows_become_prompts_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.jsonl", 3)
    write_rows(tmp_path / "test.jsonl", 2, first=50)
    table = load(Gsm8kData(path=str(path)), "train", 0)
    assert table.to_pylist()[1] == {
        "prompt_id": "gsm8k-train-2",
        "prompt": "What is 1 and one?",
        "reference": "2",
        "data_source": "gsm8k",
        "demonstration": "It is 2.\n#### 2",
    }
    assert demonstrate(Gsm8kData(path=str(path)), table, 0)[0] == "It is 1.\n#### 1"


def test_heldout_rows_come_from_the_named_file(tmp_path: Path) -> None:
    path, other = write_rows(tmp_path / "train.jsonl", 3), write_rows(tmp_path / "other.jsonl", 5, first=90)
    write_rows(tmp_path / "test.jsonl", 2, first=50)
    options = Gsm8kData(path=str(path), heldout_path=str(other), heldout_prompts=2)
    assert load(options, "heldout", 0)["reference"].to_pylist() == ["91", "92"]


def test_heldout_rows_come_from_the_test_file_beside(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.jsonl", 3)
    write_rows(tmp_path / "test.jsonl", 2, first=50)
    assert load(Gsm8kData(path=str(path)), "heldout", 0)["prompt_id"].to_pylist() == [
        "gsm8k-heldout-1",
        "gsm8k-heldout-2",
    ]


@pytest.mark.parametrize("name", ["mine.jsonl", "test.jsonl"])
def test_without_another_file_the_last_rows_are_held_out(tmp_path: Path, name: str) -> None:
    options = Gsm8kData(path=str(write_rows(tmp_path / name, 5)), heldout_prompts=2)
    assert load(options, "train", 0)["reference"].to_pylist() == ["1", "2", "3"]
    assert load(options, "heldout", 0)["reference"].to_pylist() == ["4", "5"]


def test_holding_every_row_out_is_refused(tmp_path: Path) -> None:
    options = Gsm8kData(path=str(write_rows(tmp_path / "mine.jsonl", 5)), heldout_prompts=5)
    with pytest.raises(DataError, match=r"has 5 rows, and data\.heldout_prompts=5"):
        load(options, "train", 0)


def test_a_question_that_is_held_out_is_left_out_of_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_rows(tmp_path / "train.jsonl", 4)
    write_rows(tmp_path / "test.jsonl", 2, first=3)
    assert load(Gsm8kData(path=str(path)), "train", 0)["reference"].to_pylist() == ["1", "2", "3"]
    assert "left out 1 rows" in caplog.text
    same = Gsm8kData(path=str(path), heldout_path=str(path))
    with pytest.raises(DataError, match="every question is also held out"):
        load(same, "train", 0)


GOOD = b'{"question": "q?", "answer": "#### 1"}\n'


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"question": "q?", "answer": "####', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON in UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
        (b'["q?", "#### 1"]', "must be a JSON object, found list"),
        (b'{"answer": "#### 1"}', "the field 'question' is missing"),
        (b'{"question": "q?"}', "the field 'answer' is missing"),
        (b'{"question": 5, "answer": "#### 1"}', "'question' must be a text"),
        (b'{"question": " ", "answer": "#### 1"}', "'question' must be a text"),
        (b'{"question": "q?", "answer": null}', "'answer' must be a text"),
        (b'{"question": "\\ud800", "answer": "#### 1"}', "half of a surrogate pair"),
        (b'{"question": "q?", "answer": "It is 1."}', "the answer has no ####"),
        (b'{"question": "q?", "answer": "It is one. #### one"}', "no number follows ####, found 'one'"),
    ],
)
def test_a_malformed_line_is_named_with_its_fault(tmp_path: Path, line: bytes, fault: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(DataError) as caught:
        load(Gsm8kData(path=str(path)), "train", 0)
    assert f"{path}, line 3: " in str(caught.value)
    assert fault in str(caught.value)


def test_an_empty_or_missing_file_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"\n\n")
    with pytest.raises(DataError, match=r"empty\.jsonl is empty"):
        load(Gsm8kData(path=str(empty)), "train", 0)
    with pytest.raises(DataError, match=r"can't read .*none\.jsonl: No such file"):
        load(Gsm8kData(path=str(tmp_path / "none.jsonl")), "train", 0)
    good = write_rows(tmp_path / "good.jsonl", 2)
    with pytest.raises(DataError, match=r"can't read .*none\.jsonl: No such file"):
        load(Gsm8kData(path=str(good), heldout_path=str(tmp_path / "none.jsonl")), "heldout", 0)


def test_a_file_without_a_final_newline_or_with_windows_ones_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD.replace(b"\n", b"\r\n") + GOOD.replace(b"q?", "q\u2028é?".encode()).rstrip())
    options = Gsm8kData(path=str(path), heldout_prompts=1)
    assert load(options, "heldout", 0)["prompt"].to_pylist() == ["q\u2028é?"]


def test_an_unknown_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no split 'test'"):
        load(Gsm8kData(path=str(write_rows(tmp_path / "train.jsonl", 2))), "test", 0)


@pytest.mark.skipif(
    "GRPO_TEST_GSM8K" not in os.environ,
    reason="set GRPO_TEST_GSM8K to the folder with GSM8K's train.jsonl and test.jsonl",
)
@pytest.mark.parametrize("extraction", ["strict", "flexible"])
def test_all_8792_gold_answers_are_right(extraction: str) -> None:
    path = Path(os.environ["GRPO_TEST_GSM8K"]) / "train.jsonl"
    options = Gsm8kData(path=str(path), extraction=extraction)
    rows = load(options, "train", 0).to_pylist() + load(options, "heldout", 0).to_pylist()
    assert len(rows) == 8792
    judge = make_reward(options, RewardConfig())
    for row in rows:
        result = judge(
            Sample(
                prompt=row["prompt"],
                response=row["demonstration"],
                reference=row["reference"],
                data_source="gsm8k",
                response_tokens=1,
                finish_reason="stop",
            )
        )
        assert result == RewardResult(value=1.0, components={"correct": 1.0, "format": 1.0}), row["prompt_id"]
