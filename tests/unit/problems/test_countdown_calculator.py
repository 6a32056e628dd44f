import json
import re

import pytest

from grpo_lib.config_data import CountdownCalculatorData, CountdownData
from grpo_lib.config_reward import RewardConfig
from grpo_lib.generation.tools import ToolError, calculator
from grpo_lib.models import make_tokenizer
from grpo_lib.problems import countdown
from grpo_lib.problems.countdown_calculator import PROBLEM, demonstrate, load
from grpo_lib.types import RewardResult, Sample

SMALL = CountdownCalculatorData(train_prompts=200, heldout_prompts=50)
TRY = re.compile(r"<calc>([^<]+)</calc><result>([^<]+)</result>([vx])")


def persistent(share: float, **options: object) -> CountdownCalculatorData:
    return CountdownCalculatorData.model_validate(
        {"train_prompts": 200, "heldout_prompts": 1, "persistence": share, **options}
    )


def said(expression: str) -> str:
    try:
        return calculator(expression)
    except ToolError as error:
        return f"error: {error}"


def judged(options: CountdownCalculatorData) -> list[tuple[str, RewardResult]]:
    table = load(options, "train", 0)
    judge = PROBLEM.make_reward(options, RewardConfig())
    pairs = []
    for row, text in zip(table.to_pylist(), demonstrate(options, table, 0), strict=True):
        result = judge(
            Sample(
                prompt=row["prompt"],
                response=text,
                reference=row["reference"],
                data_source=row["data_source"],
                response_tokens=len(text),
                finish_reason="stop",
            )
        )
        assert isinstance(result, RewardResult)
        pairs.append((text, result))
    return pairs


def test_the_puzzles_are_those_of_countdown() -> None:
    ours = load(SMALL, "train", 3)
    theirs = countdown.load(CountdownData(train_prompts=200, heldout_prompts=50), "train", 3)
    assert ours.drop(["data_source"]).equals(theirs.drop(["data_source"]))
    assert set(ours["data_source"].to_pylist()) == {"countdown_calculator"}


def test_a_demonstration_calls_the_calculator_for_each_try() -> None:
    numbers = json.dumps({"numbers": [30, 12, 7], "target": 25})
    table = load(SMALL, "train", 0).slice(0, 1).set_column(2, "reference", [[numbers]])
    texts = {demonstrate(persistent(1.0), table, seed)[0] for seed in range(20)}
    assert "<think><calc>30-12+7-25</calc><result>0</result>v</think><answer>30-12+7</answer>" in texts
    assert (
        "<think><calc>30+12-7-25</calc><result>10</result>x;<calc>30-12+7-25</calc><result>0</result>v</think>"
        "<answer>30-12+7</answer>" in texts
    )
    assert len(texts) == 4, "one for each pattern to start from"


@pytest.mark.parametrize("operators", ["+-", "+-*/"])
def test_results_and_checks_of_demonstrations_are_true(operators: str) -> None:
    options = persistent(0.5, operators=operators)
    table = load(options, "train", 0)
    for reference, text in zip(table["reference"].to_pylist(), demonstrate(options, table, 0), strict=True):
        thought = text.removeprefix("<think>").partition("</think>")[0]
        assert "".join(TRY.sub("", thought)).strip(";") == ""
        for expression, result, check in TRY.findall(thought):
            assert expression.endswith(f"-{json.loads(reference)['target']}")
            assert result == said(expression)
            assert (check == "v") == (result == "0")


def test_persistent_writers_are_right_and_the_others_hand_in_their_first_try() -> None:
    assert all(result.value == 1.0 for _, result in judged(persistent(1.0)))
    first = judged(persistent(0.0))
    assert all(text.count("<calc>") == 1 and result.components["format"] == 1.0 for text, result in first)
    assert 0.2 < sum(result.components["correct"] for _, result in first) / len(first) < 0.4


def test_the_tags_are_tokens_and_anything_a_tool_says_can_be_written() -> None:
    tokenizer = make_tokenizer(PROBLEM.tags, PROBLEM.alphabet)
    ids = tokenizer("<calc>1+1</calc><result>2</result>")["input_ids"]
    assert len(ids) == 4 + 3 + 1
    said = "error: Ünexpected <eos>\n"
    assert tokenizer.decode(tokenizer(said)["input_ids"]) == said
