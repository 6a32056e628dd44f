import re

import pytest

from grpo_lib.config_data import ExpressionsData
from grpo_lib.config_reward import RewardConfig
from grpo_lib.errors import DataError
from grpo_lib.problems.arithmetic import parse_arithmetic
from grpo_lib.problems.expressions import PROBLEM, demonstrate, evaluate, load, make_expressions, make_reward
from grpo_lib.types import RewardResult, Sample

SMALL = ExpressionsData(train_prompts=300, heldout_prompts=100)


def judged(response: str, reference: str = "13") -> RewardResult:
    result = make_reward(ExpressionsData(), RewardConfig())(
        Sample(
            prompt="<expr>8-3+2*4",
            response=response,
            reference=reference,
            data_source="expressions",
            response_tokens=len(response),
            finish_reason="stop",
        )
    )
    assert isinstance(result, RewardResult)
    return result


def test_results_come_in_the_order_of_the_operations() -> None:
    assert evaluate((8, 3, 2, 4), ("-", "+", "*"), precedence=True) == [8, 5, 13]
    assert evaluate((8, 3, 2, 4), ("-", "+", "*"), precedence=False) == [5, 7, 28]


def test_asking_for_more_expressions_than_there_are_says_how_many_there_are() -> None:
    options = ExpressionsData(operands=3, max_operand=2)
    found = make_expressions(options, 5, seed=0)
    assert sorted(found) == [
        ((1, 1, 2), ("+", "*")),
        ((1, 2, 2), ("+", "*")),
        ((2, 1, 2), ("+", "*")),
        ((2, 1, 2), ("-", "*")),
        ((2, 2, 2), ("+", "*")),
    ]
    with pytest.raises(DataError, match=r"6 unique puzzles .* only 5 could be found.*raise data\.max_operand"):
        make_expressions(options, 6, seed=0)


def test_every_result_on_the_way_is_in_range_and_precedence_matters() -> None:
    for operands, operators in make_expressions(ExpressionsData(), 2000, seed=0):
        right = evaluate(operands, operators, precedence=True)
        habitual = evaluate(operands, operators, precedence=False)
        assert all(0 <= result <= 99 for result in right + habitual)
        assert right[-1] != habitual[-1]


def test_prompts_and_references_agree_with_exact_arithmetic() -> None:
    table = load(SMALL, "train", 0)
    assert table.column_names == ["prompt_id", "prompt", "reference", "data_source"]
    for row in table.to_pylist():
        assert re.fullmatch(r"<expr>[1-9]([-+*][1-9]){3}", row["prompt"])
        read = parse_arithmetic(row["prompt"].removeprefix("<expr>"))
        assert read is not None and read.value == int(row["reference"])
        assert 0 <= int(row["reference"]) <= 99


def test_no_expression_stands_in_both_splits_or_twice() -> None:
    train, heldout = load(SMALL, "train", 0), load(SMALL, "heldout", 0)
    assert len(set(train["prompt_id"].to_pylist() + heldout["prompt_id"].to_pylist())) == 400


def test_expressions_depend_on_the_seed_alone() -> None:
    assert load(SMALL, "train", 3).equals(load(SMALL, "train", 3))
    assert not load(SMALL, "train", 3).equals(load(SMALL, "train", 4))


@pytest.mark.parametrize("operands", [3, 5, 6])
def test_other_counts_of_operands_make_expressions(operands: int) -> None:
    options = ExpressionsData(operands=operands, train_prompts=50, heldout_prompts=5, max_operand=12, precedence=1.0)
    table = load(options, "train", 0)
    for row, text in zip(table.to_pylist(), demonstrate(options, table, 0), strict=True):
        assert judged(text, row["reference"]).value == 1.0


def test_the_value_as_plain_digits_is_right() -> None:
    right = RewardResult(value=1.0, components={"correct": 1.0, "format": 1.0})
    assert judged("<think>8-3+8;5+8;13</think><answer>13</answer>") == right
    assert judged("<think></think><answer>-2</answer>", "-2") == right


def test_equal_values_vote_together() -> None:
    answers = [judged(f"<think></think><answer>{text}</answer>").answer for text in ("13", " 013", "-2", "x")]
    assert answers == ["13", "13", "-2", None]


@pytest.mark.parametrize("answer", ["12", "14", "-13", "28", "130", "1", "0"])
def test_another_value_earns_the_format_reward(answer: str) -> None:
    result = judged(f"<think></think><answer>{answer}</answer>")
    assert result == RewardResult(value=0.1, components={"correct": 0.0, "format": 1.0})


@pytest.mark.parametrize(
    "response",
    [
        "13",
        "<think>13</think>",
        "<think></think><answer></answer>",
        "<think></think><answer>5+8</answer>",
        "<think></think><answer>13.0</answer>",
        "<think></think><answer>1,3</answer>",
        "<think></think><answer>+13</answer>",
        "<think></think><answer>--13</answer>",
        "<think></think><answer>13 apples</answer>",
        "<think></think><answer>12 13</answer>",
        "<think></think><answer>١٣</answer>",
        "<think></think><answer>" + "1" * 5000 + "</answer>",
        "<think>13</think><answer>12</answer><answer>13</answer>",
        "<think></think><answer>13</answer>13",
    ],
)
def test_what_is_no_whole_number_in_one_answer_block_earns_nothing(response: str) -> None:
    assert judged(response) == RewardResult(value=0.0, components={"correct": 0.0, "format": 0.0})


def test_a_writer_who_respects_precedence_is_right_and_one_who_does_not_is_wrong() -> None:
    for precedence, correct in ((1.0, 1.0), (0.0, 0.0)):
        options = ExpressionsData(train_prompts=300, heldout_prompts=1, precedence=precedence)
        table = load(options, "train", 0)
        for row, text in zip(table.to_pylist(), demonstrate(options, table, 0), strict=True):
            assert judged(text, row["reference"]).components == {"correct": correct, "format": 1.0}


def test_each_step_carries_out_one_operation() -> None:
    options = ExpressionsData(train_prompts=100, heldout_prompts=1, precedence=1.0)
    table = load(options, "train", 0)
    for row, text in zip(table.to_pylist(), demonstrate(options, table, 0), strict=True):
        steps = text.removeprefix("<think>").partition("</think>")[0].split(";")
        assert [len(re.findall(r"[-+*]", step)) for step in steps] == [2, 1, 0]
        for step in steps:
            read = parse_arithmetic(step)
            assert read is not None and read.value == int(row["reference"])


def test_about_the_asked_fraction_of_demonstrations_respects_precedence() -> None:
    table = load(SMALL, "train", 0)
    texts = demonstrate(SMALL, table, 0)
    right = [judged(t, r).components["correct"] for t, r in zip(texts, table["reference"].to_pylist(), strict=True)]
    assert 0.2 < sum(right) / len(right) < 0.4
    assert texts == demonstrate(SMALL, table, 0)


def test_the_small_tokenizer_knows_all_that_is_written() -> None:
    table = load(SMALL, "train", 0)
    text = "".join(table["prompt"].to_pylist() + demonstrate(SMALL, table, 0))
    for tag in PROBLEM.tags:
        text = text.replace(tag, "")
    assert PROBLEM.alphabet is not None
    assert set(text) <= set(PROBLEM.alphabet)
