import json
import re
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lib.config_data import CountdownData
from grpo_lib.config_reward import RewardConfig
from grpo_lib.errors import DataError
from grpo_lib.problems.arithmetic import parse_arithmetic
from grpo_lib.problems.common import answer_of
from grpo_lib.problems.countdown import PROBLEM, demonstrate, load, make_puzzles, make_reward
from grpo_lib.types import RewardResult, Sample

SMALL = CountdownData(train_prompts=300, heldout_prompts=100)


def sample(response: str, numbers: tuple[int, ...] = (30, 12, 7), target: int = 25) -> Sample:
    return Sample(
        prompt=f"<nums>{','.join(map(str, numbers))}<target>{target}",
        response=response,
        reference=json.dumps({"numbers": numbers, "target": target}),
        data_source="countdown",
        response_tokens=len(response),
        finish_reason="stop",
    )


def judged(response: str, operators: str = "+-", **puzzle: object) -> RewardResult:
    result = make_reward(CountdownData(operators=operators), RewardConfig())(sample(response, **puzzle))  # type: ignore[arg-type]
    assert isinstance(result, RewardResult)
    return result


def answered(answer: str, operators: str = "+-", **puzzle: object) -> RewardResult:
    return judged(f"<think>30-12=18v</think><answer>{answer}</answer>", operators, **puzzle)


# The parser


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("30-12+7", Fraction(25)),
        ("2+3*4", Fraction(14)),
        ("(2+3)*4", Fraction(20)),
        ("8/4/2", Fraction(1)),
        ("8-4-2", Fraction(2)),
        ("1/3", Fraction(1, 3)),
        ("1/3*3", Fraction(1)),
        ("-7+30", Fraction(23)),
        ("30--7", Fraction(37)),
        ("-(3-5)*2", Fraction(4)),
        ("2*-3", Fraction(-6)),
        (" 30 - 12\t+ 7 ", Fraction(25)),
        ("007", Fraction(7)),
    ],
)
def test_arithmetic_is_read_exactly(text: str, value: Fraction) -> None:
    read = parse_arithmetic(text)
    assert read is not None
    assert read.value == value


@pytest.mark.parametrize("text", ["1/0", "5/(3-3)", "0/0", "1+2/(4-2*2)", "-(1/0)", "1/0*0"])
def test_a_division_by_zero_is_read_and_has_no_value(text: str) -> None:
    read = parse_arithmetic(text)
    assert read is not None
    assert read.value is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "()",
        "+",
        "-",
        "+5",
        "5+",
        "5 5",
        "(5",
        "5)",
        ")5(",
        "5(3)",
        "2**9",
        "9//2",
        "9%2",
        "2^3",
        "1.5+1",
        "1e3",
        "1_000",
        "0x10",
        "30-12+7=25",
        "30,12",
        "٣+٤",  # digits, but not ours
        "²",
        "30\u221212",  # a typographic minus
        "3\n+4",
        "__import__('os').system('true')",
        "().__class__",
        "lambda:0",
        "a",
        "1;2",
        "1" * 201,
        "(" * 100 + "1" + ")" * 100,
        "-" * 199 + "1",
        "(" * 21 + "1" + ")" * 21,
    ],
)
def test_what_is_no_arithmetic_is_not_read(text: str) -> None:
    assert parse_arithmetic(text) is None


def test_the_longest_and_deepest_answers_allowed_are_read() -> None:
    assert parse_arithmetic("9" * 200) is not None
    assert parse_arithmetic("(" * 20 + "1" + ")" * 20) is not None


def test_numbers_and_operators_of_an_answer_are_listed() -> None:
    read = parse_arithmetic("-(30*2)/7")
    assert read is not None
    assert read.numbers == (30, 2, 7)
    assert read.operators == {"-", "*", "/"}


@given(st.text(alphabet="0123456789+-*/() ", max_size=40) | st.text(max_size=40))
def test_the_parser_never_raises_and_agrees_with_python(text: str) -> None:
    read = parse_arithmetic(text)
    if read is None or re.search(r"\b0[0-9]", text) or re.search(r"//|\*\*", text):
        return
    exact = re.sub(r"([0-9]+)", r"Fraction(\1)", text.strip())
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        expected = None
    assert read.value == expected


# The reward


def test_answers_vote_by_their_expression_without_spaces_and_no_answer_does_not_vote() -> None:
    assert answered("30 - 12+7").answer == answered("30-12+7").answer == "30-12+7"
    assert answered("thirty").answer is None


def test_the_right_answer_earns_the_full_reward() -> None:
    assert answered("30-12+7") == RewardResult(value=1.0, components={"correct": 1.0, "format": 1.0})
    assert answered("7+30-12").value == 1.0
    assert answered("30-(12-7)").value == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "30-12+8",  # not one of the numbers
        "30-12-7",  # the target is missed
        "25",  # the target itself
        "30-5",
        "30-12+7+7-7",  # a number used more than once
        "30-12+7-0",  # a number that is not there
        "-(30-12+7)",  # the wrong sign
        "(30-12+7)/(7-7)",
        "30-12+7/(7-7)",
        "3012-7",
    ],
)
def test_a_wrong_answer_in_the_right_format_earns_the_format_reward(answer: str) -> None:
    assert answered(answer) == RewardResult(value=0.1, components={"correct": 0.0, "format": 1.0})


@pytest.mark.parametrize(
    "response",
    [
        "",
        "25",
        "30-12+7",
        "<answer>30-12+7</answer>",
        "<think></think><answer>30-12+7",
        "<think></think><answer>30-12+7=25</answer>",
        "<think></think><answer></answer>",
        "<think></think><answer>25.0</answer>",
        "<think></think><answer>30-12+7</answer> so 25",
        "so <think></think><answer>30-12+7</answer>",
        "<think></think> so <answer>30-12+7</answer>",
        "<answer>30-12+7</answer><think></think>",
        "<think></think><think></think><answer>30-12+7</answer>",
        "<think></think><answer>1</answer><answer>30-12+7</answer>",
        "<think><answer>1</answer></think><answer>30-12+7</answer>",
        "<think></think><answer><answer>30-12+7</answer></answer>",
        "<THINK></THINK><ANSWER>30-12+7</ANSWER>",
    ],
)
def test_a_response_out_of_format_earns_nothing(response: str) -> None:
    assert judged(response) == RewardResult(value=0.0, components={"correct": 0.0, "format": 0.0})


def test_an_operator_outside_the_options_is_wrong_but_well_formed() -> None:
    puzzle = {"numbers": (6, 4), "target": 24}
    assert answered("6*4", "+-*", **puzzle).value == 1.0
    assert answered("6*4", "+-", **puzzle) == RewardResult(value=0.1, components={"correct": 0.0, "format": 1.0})
    assert answered("-4+6", "+", numbers=(6, 4), target=2).components["correct"] == 0.0


def test_fractions_on_the_way_are_exact() -> None:
    assert answered("8/(3-8/3)", "+-*/", numbers=(8, 8, 3), target=24).value == 0.1  # 3 twice, 8 twice
    assert answered("8/(3-8/3)", "+-*/", numbers=(8, 8, 3, 3), target=24).value == 1.0


def test_a_number_listed_twice_must_be_used_twice() -> None:
    assert answered("5+5", numbers=(5, 5), target=10).value == 1.0
    assert answered("5", numbers=(5, 5), target=5).components["correct"] == 0.0


def test_the_rewards_are_those_of_the_configuration() -> None:
    judge = make_reward(CountdownData(), RewardConfig(correct=5.0, format_only=-1.0))
    assert judge(sample("<think></think><answer>30-12+7</answer>")).value == 5.0  # type: ignore[union-attr]
    assert judge(sample("<think></think><answer>30</answer>")).value == -1.0  # type: ignore[union-attr]
    assert judge(sample("30")).value == 0.0  # type: ignore[union-attr]


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "3", "+", "\n"]), max_size=9))
def test_only_one_think_and_one_answer_block_have_an_answer(pieces: list[str]) -> None:
    text = "".join(pieces)
    answer = answer_of(text)
    tags = [piece for piece in pieces if piece.startswith("<")]
    assert answer is None or tags == ["<think>", "</think>", "<answer>", "</answer>"]
    assert answer is None or text.strip().endswith(f"<answer>{answer}</answer>")


# Puzzles


def test_the_default_space_has_22202_puzzles() -> None:
    assert len(set(make_puzzles(CountdownData(), 22_202, seed=0))) == 22_202


def test_asking_for_more_puzzles_than_there_are_says_how_many_there_are() -> None:
    options = CountdownData(numbers=2, max_number=2)  # 1+1, 1-1, 2+1, 2-1, 2+2, 2-2
    assert sorted(make_puzzles(options, 6, seed=0)) == [
        ((1, 1), 0),
        ((1, 1), 2),
        ((2, 1), 1),
        ((2, 1), 3),
        ((2, 2), 0),
        ((2, 2), 4),
    ]
    with pytest.raises(DataError, match=r"7 unique puzzles are asked for, and only 6 could be found.*lower data"):
        make_puzzles(options, 7, seed=0)


def test_prompts_have_the_documented_form() -> None:
    table = load(SMALL, "train", 0)
    assert table.column_names == ["prompt_id", "prompt", "reference", "data_source"]
    assert table.num_rows == 300
    for row in table.to_pylist():
        puzzle = json.loads(row["reference"])
        numbers, target = puzzle["numbers"], puzzle["target"]
        assert row["prompt"] == f"<nums>{numbers[0]},{numbers[1]},{numbers[2]}<target>{target}"
        assert row["prompt_id"] == f"countdown-{numbers[0]}_{numbers[1]}_{numbers[2]}-{target}"
        assert numbers == sorted(numbers, reverse=True)
        assert all(1 <= number <= 33 for number in numbers)
        assert 0 <= target <= 99


def test_no_puzzle_stands_in_both_splits_or_twice() -> None:
    train, heldout = load(SMALL, "train", 0), load(SMALL, "heldout", 0)
    prompts = train["prompt"].to_pylist() + heldout["prompt"].to_pylist()
    ids = train["prompt_id"].to_pylist() + heldout["prompt_id"].to_pylist()
    assert len(set(prompts)) == len(set(ids)) == 400


def test_puzzles_depend_on_the_seed_alone() -> None:
    assert load(SMALL, "train", 3).equals(load(SMALL, "train", 3))
    assert not load(SMALL, "train", 3).equals(load(SMALL, "train", 4))


def test_more_training_puzzles_leave_the_heldout_ones_as_they_are() -> None:
    more = CountdownData(train_prompts=500, heldout_prompts=100)
    assert load(SMALL, "heldout", 0).equals(load(more, "heldout", 0))


def test_every_default_puzzle_is_solved_by_a_chain_over_the_listed_numbers() -> None:
    for (first, second, third), target in make_puzzles(CountdownData(), 2000, seed=1):
        assert target in {
            first + second + third,
            first + second - third,
            first - second + third,
            first - second - third,
        }


@pytest.mark.parametrize(("numbers", "operators"), [(2, "*/"), (4, "+-*/"), (6, "+-"), (6, "+-*/"), (3, "/"), (2, "+")])
def test_other_counts_of_numbers_and_operators_make_puzzles(numbers: int, operators: str) -> None:
    options = CountdownData(numbers=numbers, operators=operators, train_prompts=20, heldout_prompts=5)
    table = load(options, "train", 0)
    for row, text in zip(table.to_pylist(), demonstrate(options, table, 0), strict=True):
        puzzle = json.loads(row["reference"])
        assert len(puzzle["numbers"]) == numbers
        assert 0 <= puzzle["target"] <= 99
        judge = make_reward(options, RewardConfig())
        result = judge(sample(text, tuple(puzzle["numbers"]), puzzle["target"]))
        assert isinstance(result, RewardResult)
        assert result.components["format"] == 1.0
        assert result.components["correct"] == float("v</think>" in text)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(DataError, match="no split 'test'"):
        load(SMALL, "test", 0)


# Demonstrations


def demonstrations(options: CountdownData) -> list[tuple[str, RewardResult]]:
    table = load(options, "train", 0)
    judge: Callable[[Sample], object] = make_reward(options, RewardConfig())
    pairs = []
    for row, text in zip(table.to_pylist(), demonstrate(options, table, 0), strict=True):
        puzzle = json.loads(row["reference"])
        result = judge(sample(text, tuple(puzzle["numbers"]), puzzle["target"]))
        assert isinstance(result, RewardResult)
        pairs.append((text, result))
    return pairs


def test_persistent_writers_are_right() -> None:
    options = CountdownData(train_prompts=300, heldout_prompts=1, persistence=1.0)
    assert all(result.value == 1.0 for _, result in demonstrations(options))


def test_writers_without_persistence_hand_in_their_first_try() -> None:
    options = CountdownData(train_prompts=300, heldout_prompts=1, persistence=0.0)
    pairs = demonstrations(options)
    assert all(";" not in text for text, _ in pairs)
    assert 0.2 < sum(result.components["correct"] for _, result in pairs) / 300 < 0.4
    assert all(result.components["format"] == 1.0 for _, result in pairs)


@pytest.mark.parametrize("operators", ["+-", "+-*/"])
def test_every_check_and_every_step_is_true(operators: str) -> None:
    options = CountdownData(train_prompts=200, heldout_prompts=1, persistence=0.5, operators=operators)
    table = load(options, "train", 0)
    for row, text in zip(table.to_pylist(), demonstrate(options, table, 0), strict=True):
        target = json.loads(row["reference"])["target"]
        thought = text.removeprefix("<think>").partition("</think>")[0]
        for tried in thought.split(";"):
            steps, check = tried[:-1].split(","), tried[-1]
            for step in steps:
                left, _, result = step.partition("=")
                read = parse_arithmetic(left)
                assert read is not None and read.value == int(result)
            assert check == ("v" if int(steps[-1].partition("=")[2]) == target else "x")


def test_tries_follow_the_fixed_cycle_of_patterns() -> None:
    options = CountdownData(train_prompts=300, heldout_prompts=1, persistence=1.0)
    order = ["++", "+-", "-+", "--"]
    for text, _ in demonstrations(options):
        thought = text.removeprefix("<think>").partition("</think>")[0]
        patterns = [re.sub(r"=-?\d+|\d+", "", re.sub(r"=-?\d+,-?\d+", "", tried))[:2] for tried in thought.split(";")]
        start = order.index(patterns[0])
        assert patterns == [order[(start + offset) % 4] for offset in range(len(patterns))]


def test_demonstrations_depend_on_the_seed_alone() -> None:
    table = load(SMALL, "train", 0)
    assert demonstrate(SMALL, table, 1) == demonstrate(SMALL, table, 1)
    assert demonstrate(SMALL, table, 1) != demonstrate(SMALL, table, 2)


def test_the_small_tokenizer_knows_all_that_is_written() -> None:
    options = CountdownData(train_prompts=200, heldout_prompts=1, persistence=1.0, operators="+-*/")
    table = load(options, "train", 0)
    text = "".join(table["prompt"].to_pylist() + demonstrate(options, table, 0))
    for tag in PROBLEM.tags:
        text = text.replace(tag, "")
    assert PROBLEM.alphabet is not None
    assert set(text) <= set(PROBLEM.alphabet)
