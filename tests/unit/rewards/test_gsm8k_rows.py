"""The built-in `gsm8k` on every row of GSM8K: the gold answer is right, and answers near it are wrong.

Strict is the number after the last ``####``. What may stand around it is pinned here: OpenAI's extractor, the
``strict-match`` of lm-evaluation-harness and verl all read the number and let units behind it be, and so does this.
"""

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from grpo_lib.rewards.builtin import gsm8k
from grpo_lib.types import RewardResult, Sample

Extraction = Literal["strict", "flexible"]
SPLITS = {"train": 7473, "test": 1319}
both = pytest.mark.parametrize("extraction", ["strict", "flexible"])


@pytest.fixture(scope="module")
def solutions() -> list[str]:
    """The `answer` field of every row."""
    if "GRPO_TEST_GSM8K" not in os.environ:
        pytest.skip("set GRPO_TEST_GSM8K to the folder with GSM8K's train.jsonl and test.jsonl")
    found = []
    for split, count in SPLITS.items():
        text = (Path(os.environ["GRPO_TEST_GSM8K"]) / f"{split}.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(line)["answer"] for line in text.splitlines()]
        assert len(rows) == count
        found += rows
    return found


def gold_of(solution: str) -> str:
    return solution.rpartition("####")[2].strip()


def judged(response: str, gold: str, extraction: Extraction) -> RewardResult:
    sample = Sample(
        prompt="", response=response, reference=gold, data_source="gsm8k", response_tokens=1, finish_reason="stop"
    )
    return gsm8k(sample, extraction=extraction)


RIGHT = (1.0, {"correct": 1.0})
WRONG = (0.0, {"correct": 0.0})


def misjudged(
    solutions: list[str],
    extraction: Extraction,
    write: Callable[[str], list[str]],
    expected: tuple[float, dict[str, float]],
) -> tuple[int, list[tuple[str, str]]]:
    """How many responses were judged, and those (with their gold answer) whose value or `correct` differ."""
    count, found = 0, []
    for solution in solutions:
        gold = gold_of(solution)
        for response in write(gold):
            result = judged(response, gold, extraction)
            count += 1
            if (result.value, result.components) != expected:
                found.append((gold, response))
    return count, found


# The right number, in every row


@both
def test_the_gold_solution_of_all_8792_rows_is_right(solutions: list[str], extraction: Extraction) -> None:
    values = Counter(judged(each, gold_of(each), extraction).value for each in solutions)
    assert values == {1.0: 8792}


@both
def test_the_gold_number_is_right_in_every_usual_spelling(solutions: list[str], extraction: Extraction) -> None:
    def write(gold: str) -> list[str]:
        plain = gold.replace(",", "")
        digits = plain.lstrip("-")
        grouped = f"{int(plain):,}"
        dollars = f"-${digits}" if plain.startswith("-") else f"${digits}"
        written = [
            gold,
            plain,
            grouped,
            f"{plain}.0",
            f"{plain}.00",
            f"{gold}.",
            dollars,
            f"{gold} dollars",
            f"{gold}%",
        ]
        return [f"1 + 1 = 2\n#### {each}" for each in written]

    assert misjudged(solutions, extraction, write, RIGHT) == (8792 * 9, [])


# A wrong number, in every row


def wrong_numbers(gold: str) -> list[str]:
    """Numbers, and what looks like one, that are not the gold number but near it."""
    value = int(gold.replace(",", ""))
    digits = str(abs(value))
    wrong = [
        f"{value + 1}",
        f"{value - 1}",
        f"{value}.5",  # 18.5
        f"{value}.01",
        f"1,{digits:0>3}",  # 1,018
    ]
    if value == 0:
        return wrong
    wrong += [f"{-value:,}", f"0.{digits}", f"{value}0"]
    if len(digits) > 1:
        wrong.append(f"{digits[0]}.{digits[1:]}")  # 1.8
    if len(digits) > 3:
        wrong += [
            f"{digits[:-2]},{digits[-2:]}",  # 12,34 is no number
            digits[:-3],  # 1,000 is not 1
            f"{digits[:-3]},{digits[-3:]},000",
        ]
    return wrong


def test_the_wrong_numbers_are_these() -> None:
    assert wrong_numbers("0") == ["1", "-1", "0.5", "0.01", "1,000"]
    assert wrong_numbers("18") == ["19", "17", "18.5", "18.01", "1,018", "-18", "0.18", "180", "1.8"]
    assert wrong_numbers("1,234") == [
        *("1235", "1233", "1234.5", "1234.01", "1,1234", "-1,234", "0.1234", "12340", "1.234"),
        *("12,34", "1", "1,234,000"),
    ]


@both
def test_a_wrong_number_after_the_marker_is_worth_nothing_in_every_row(
    solutions: list[str], extraction: Extraction
) -> None:
    count, found = misjudged(
        solutions, extraction, lambda gold: [f"#### {each}" for each in wrong_numbers(gold)], WRONG
    )
    assert found == []
    assert count > 8 * 8792


@both
def test_the_gold_number_elsewhere_does_not_make_a_wrong_one_right(
    solutions: list[str], extraction: Extraction
) -> None:
    def write(gold: str) -> list[str]:
        other = int(gold.replace(",", "")) + 1
        return [
            f"The answer is {gold}.\n#### {other}",
            f"#### {gold}\n#### {other}",
            f"#### {other}\nAnd {gold} of them are red: {gold}.",
            f"{gold} #### {other} dollars",
        ]

    assert misjudged(solutions, extraction, write, WRONG) == (8792 * 4, [])


def test_strict_wants_the_marker_and_one_number_in_its_line(solutions: list[str]) -> None:
    def write(gold: str) -> list[str]:
        return [
            gold,
            f"The answer is {gold}.",
            f"### {gold}",
            f"####\n{gold}",
            f"#### about {gold}",
            f"#### {gold} or 3",
            f"#### {gold}\n#### none",
            f"#### {gold} dollars and 50 cents",
            f"#### 1 * {gold}",
        ]

    assert misjudged(solutions, "strict", write, WRONG) == (8792 * 9, [])


def test_flexible_takes_the_last_number_where_no_marker_is(solutions: list[str]) -> None:
    def right(gold: str) -> list[str]:
        return [f"First 7, then {gold}.", f"so **{gold}**", f"The answer is ${gold}", f"7 #### none, so {gold} dollars"]

    def wrong(gold: str) -> list[str]:
        return [f"It is {gold}, of {each}" for each in wrong_numbers(gold)[:5]]

    positive = [each for each in solutions if not gold_of(each).startswith("-")]
    assert misjudged(positive, "flexible", right, RIGHT) == (4 * len(positive), [])
    count, found = misjudged(solutions, "flexible", wrong, WRONG)
    assert found == []
    assert count > 4 * 8792


@both
@pytest.mark.parametrize(
    "response", ["", "####", "#### ", "no idea", "#### eighteen", "#### NaN", "#### ١٨", "#### 1,2,3"]
)
def test_a_response_without_a_number_is_worth_nothing(response: str, extraction: Extraction) -> None:
    result = judged(response, "18", extraction)
    assert (result.value, result.components) == WRONG
    assert result.answer is None


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("1.5", "3/2"),
        ("1,500", "1500"),
        (".5", "1/2"),
        ("So it is...18", "18"),
        ("No.18", "18"),
        ("6, 7, 18", "18"),
        ("48/18", "18"),
        ("at 12:18.", "18"),
        ("18, no: 1,448000", None),
        ("18, no: 12,34", None),
        ("18, no: 7.2.18", None),
        ("in 6,7,18", None),
    ],
)
def test_the_end_of_a_malformed_number_is_no_number(response: str, answer: str | None) -> None:
    assert judged(response, "0", "flexible").answer == answer


def test_a_reference_without_a_number_is_an_error_and_not_a_wrong_answer() -> None:
    with pytest.raises(ValueError, match="the reference 'many' is no number"):
        judged("#### 18", "many", "strict")
