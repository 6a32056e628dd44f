"""The built-in reward functions on literal responses, and the options that they refuse before anything runs."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from grpo_lib.config_reward import RewardConfig, RewardFunctionConfig
from grpo_lib.errors import ConfigError
from grpo_lib.rewards.builtin import countdown, exact_match, format_tags, length, multiple_choice, overlong, regex
from grpo_lib.rewards.judges import Reward, make_judges
from grpo_lib.rewards.runner import score
from grpo_lib.types import RewardResult, Sample


def sample(response: str, reference: str = "", tokens: int = 1) -> Sample:
    return Sample(
        prompt="p",
        response=response,
        reference=reference,
        data_source="d",
        response_tokens=tokens,
        finish_reason="stop",
    )


def right_or_wrong(result: RewardResult) -> bool:
    """Whether it is right: value and component say the same."""
    assert result.value in (0.0, 1.0)
    assert result.components["correct"] == result.value
    return result.value == 1.0


# Countdown


PUZZLE = '{"numbers": [30, 12, 7], "target": 25}'


def answered(equation: str) -> str:
    return f"<think>So.</think><answer>{equation}</answer>"


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (answered("30-12+7"), True),
        (answered("7 + (30 - 12)"), True),
        (answered("-(12-30)+7"), True),
        (answered("30-12-7"), False),
        (answered("25"), False),
        (answered("30-5"), False),
        (answered("30-12+7+0"), False),
        (answered("30-12+7=25"), False),
        (answered("30-12+7*1"), False),
        (answered("307-12"), False),
        (answered(""), False),
        (answered("30/0+12+7"), False),
        (answered("30 - 12 \u2212 7"), False),
        (answered("__import__('os')"), False),
        ("30-12+7", False),
        ("<answer>30-12+7</answer>", False),
        (answered("30-12-7") + answered("30-12+7"), False),
        ("", False),
    ],
)
def test_countdown_wants_every_number_once_and_the_target(response: str, right: bool) -> None:
    assert right_or_wrong(countdown(sample(response, PUZZLE))) is right


def test_countdown_allows_the_operators_that_are_asked_for_alone() -> None:
    product = '{"numbers": [6, 4, 3], "target": 21}'
    assert right_or_wrong(countdown(sample(answered("6*4-3"), product)))
    assert not right_or_wrong(countdown(sample(answered("6*4-3"), product), operators="+-"))
    half = '{"numbers": [1, 2, 4], "target": 2}'
    assert right_or_wrong(countdown(sample(answered("1/2*4"), half)))


def test_of_a_well_formed_wrong_equation_format_is_known_and_worth_nothing() -> None:
    result = countdown(sample(answered("30-12-7"), PUZZLE))
    assert (result.value, result.components) == (0.0, {"correct": 0.0, "format": 1.0})


# Format


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>\na\nb</think>\n\n<answer>b</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>é 🍎 < > &</think> <answer>一</answer>", 1.0),
        ("", 0.0),
        ("a", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a</think>so<answer>b</answer>", 0.0),
        ("Well. <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> I hope.", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<think>a <answer></think><answer>b</answer>", 0.0),
        ("<THINK>a</THINK><answer>b</answer>", 0.0),
        ("<think >a</think><answer>b</answer>", 0.0),
        ("</think>a<think><answer>b</answer>", 0.0),
    ],
)
def test_format_wants_each_tag_once_in_order_and_nothing_else(response: str, value: float) -> None:
    result = format_tags(sample(response))
    assert (result.value, result.components) == (value, {"format": value})


def test_format_takes_other_tags_letter_by_letter() -> None:
    assert format_tags(sample("<plan.>a</plan.><code>b</code>"), tags=["plan.", "code"]).value == 1.0
    assert format_tags(sample("<planx>a</planx><code>b</code>"), tags=["plan.", "code"]).value == 0.0
    assert format_tags(sample("<a>b</a>"), tags=["a"]).value == 1.0
    assert format_tags(sample("<a>b</a><c>d</c>"), tags=["a"]).value == 0.0


# Length


@pytest.mark.parametrize(
    ("tokens", "tolerance", "value"),
    [
        (100, 0, 1.0),
        (90, 0, 0.9),
        (125, 0, 0.75),
        (0, 0, 0.0),
        (200, 0, 0.0),
        (10_000, 0, 0.0),
        (90, 10, 1.0),
        (110, 10, 1.0),
        (85, 10, 0.95),
        (0, 10, 0.1),
        (210, 10, 0.0),
    ],
)
def test_length_is_1_at_the_target_and_falls_in_a_line(tokens: int, tolerance: int, value: float) -> None:
    assert length(sample("", tokens=tokens), target=100, tolerance=tolerance) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("tokens", "value"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (5000, -1.0)],
)
def test_overlong_falls_from_0_to_minus_1_over_the_buffer(tokens: int, value: float) -> None:
    found = overlong(sample("", tokens=tokens), max_length=100, buffer=20)
    assert found == pytest.approx(value, abs=1e-12)
    assert str(found) != "-0.0", "people read it"


def test_a_buffer_longer_than_the_whole_is_an_error() -> None:
    assert overlong(sample("", tokens=5), max_length=10, buffer=10) == -0.5
    with pytest.raises(ValueError, match="buffer=11 must be at most max_length=10"):
        overlong(sample("", tokens=5), max_length=10, buffer=11)


# One spelling


@pytest.mark.parametrize(
    ("response", "reference", "right"),
    [
        ("Paris", "Paris", True),
        ("  paris\n", "Paris", True),
        ("New \n York", "new york", True),
        ("STRASSE", "straße", True),
        ("é", "É", True),
        ("", "Paris", False),
        ("Paris.", "Paris", False),
        ("Paris, France", "Paris", False),
        ("NewYork", "New York", False),
        ("\uff11", "1", False),
    ],
)
def test_exact_match_lets_case_and_white_space_be(response: str, reference: str, right: bool) -> None:
    assert right_or_wrong(exact_match(sample(response, reference))) is right


def test_exact_match_with_case() -> None:
    assert right_or_wrong(exact_match(sample("Paris", "Paris"), case=True))
    assert not right_or_wrong(exact_match(sample("paris", "Paris"), case=True))


@pytest.mark.parametrize(
    ("response", "pattern", "answer", "right"),
    [
        ("<answer>Rome</answer><answer> Paris </answer>", "<answer>(.*?)</answer>", "Paris", True),
        ("<answer>Paris</answer><answer>Rome</answer>", "<answer>(.*?)</answer>", "Rome", False),
        ("<answer>New\nParis</answer>", "<answer>(.*?)</answer>", "New Paris", False),
        ("no tags: Paris", "<answer>(.*?)</answer>", None, False),
        ("so Paris", "Paris|Rome", "Paris", True),  # no group: all that matched
        ("Paris", "(Rome)|Paris", None, False),  # the group is in the part that did not match
        ("It is: Paris (France)", r": (\w+) \((\w+)\)", "Paris", True),  # the first of two
        ("", "(.*)", "", False),
    ],
)
def test_exact_match_takes_the_answer_out_by_a_pattern(
    response: str, pattern: str, answer: str | None, right: bool
) -> None:
    result = exact_match(sample(response, "Paris"), pattern=pattern)
    assert right_or_wrong(result) is right
    assert result.answer == answer


# A pattern


@pytest.mark.parametrize(
    ("response", "reference", "options", "right"),
    [
        ("It is 42.", "", {"pattern": r"\b42\b"}, True),
        ("It is 421.", "", {"pattern": r"\b42\b"}, False),
        ("a\nb", "", {"pattern": "a.b"}, True),
        ("It is 42.", "", {"pattern": r"\d+", "whole": True}, False),
        ("42", "", {"pattern": r"\d+", "whole": True}, True),
        ("42\n", "", {"pattern": r"\d+", "whole": True}, False),
        ("Paris", "paris", {}, False),
        ("Paris", "(?i)paris|rome", {}, True),
        ("", "", {"pattern": ".+"}, False),
        ("", "", {"pattern": ".*"}, True),
        ("naïve", "", {"pattern": r"^\w+$"}, True),
    ],
)
def test_regex_finds_its_pattern_or_the_reference(
    response: str, reference: str, options: dict[str, Any], right: bool
) -> None:
    assert right_or_wrong(regex(sample(response, reference), **options)) is right


def test_a_pattern_that_never_ends_costs_its_sample_alone() -> None:
    functions = [
        {"name": "regex", "kwargs": {"pattern": "(a+)+$", "whole": True}},
        {"name": "exact_match", "kwargs": {"pattern": "((?:a+)+)$"}},
    ]
    for function in functions:
        config = RewardConfig.model_validate({"functions": [function], "timeout_seconds": 0.5, "max_failed": 1.0})
        given = [sample("aaa", "aaa"), sample("a" * 40 + "b", "aaa"), sample("aaa", "aaa")]
        scores = score(given, Reward(judges=make_judges(config.functions, []), settings=config))
        assert scores.values == [1.0, None, 1.0]
        assert scores.reasons[1] is not None and "took longer than reward.timeout_seconds=0.5" in scores.reasons[1]


# No reference


@pytest.mark.parametrize("reference", ["", " ", "\n\t"])
@pytest.mark.parametrize("response", ["", " ", "Paris"])
@pytest.mark.parametrize(
    ("name", "kwargs", "reason"),
    [
        ("exact_match", {}, "ValueError: the reference is empty"),
        ("exact_match", {"pattern": "(.*)", "case": True}, "ValueError: the reference is empty"),
        ("exact_match", {"pattern": "(Rome)"}, "ValueError: the reference is empty"),
        ("regex", {}, "ValueError: the reference is empty"),
        ("regex", {"whole": True}, "ValueError: the reference is empty"),
        ("countdown", {}, "ValueError: the reference is empty"),
        ("gsm8k", {}, "ValueError: the reference {!r} is no number"),
        ("math", {}, "ValueError: math-verify can't read the reference {!r}"),
        ("multiple_choice", {}, "ValueError: the reference {!r} is none of the letters ABCDE"),
    ],
)
def test_without_a_reference_nothing_is_right_or_wrong(
    name: str, kwargs: dict[str, Any], reason: str, response: str, reference: str
) -> None:
    (judge,) = make_judges([RewardFunctionConfig(name=name, kwargs=kwargs)], [])
    with pytest.raises(ValueError) as raised:
        judge.function(sample(response, reference))
    assert f"{type(raised.value).__name__}: {raised.value}" == reason.format(reference)


def test_what_needs_no_reference_judges_without_one() -> None:
    assert regex(sample("It is 42."), pattern="42").value == 1.0
    assert regex(sample("It is 41."), pattern="42").value == 0.0
    assert format_tags(sample("<a>b</a>"), tags=["a"]).value == 1.0
    assert length(sample("a", tokens=5), target=10) == 0.5
    assert overlong(sample("a", tokens=9), max_length=10, buffer=2) == -0.5


# One letter of several


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Answer: B", "B"),
        ("answer is (B)", "B"),
        ("The answer is **B**.", "B"),
        ("**Answer:** B", "B"),
        ("Answer: **(B)**", "B"),
        ("the answer is $B$", "B"),
        ("ANSWER = B", "B"),
        ("The answer is option B", "B"),
        (r"so $\boxed{B}$", "B"),
        (r"\boxed{\text{(B)}}", "B"),
        ("<answer>B</answer>", "B"),
        ("<answer> (B). </answer>", "B"),
        ("B", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("Because it is.\n\n  **B**  \n", "B"),
        ("I choose option B", "B"),
        ("Answer: A. No. Answer: B", "B"),
        ("Answer: A\n\\boxed{B}", "B"),
        ("The answer is B, because option A is wrong.", "B"),
        ("Option A is wrong, option B is right", "B"),
        ("Answer: B. The other choice is F.", "B"),
        ("", None),
        ("Banana", None),
        ("Answer: Banana", None),
        ("Answer: b", None),
        ("A or B", None),
        ("A banana is B", None),
        ("Answer: F", None),
        ("Answer: \u0412", None),  # a Cyrillic letter that looks like B
        ("Answer: I am not sure", None),
    ],
)
def test_the_last_letter_that_is_called_the_answer_counts(response: str, answer: str | None) -> None:
    result = multiple_choice(sample(response, "B"))
    assert result.answer == answer
    assert right_or_wrong(result) is (answer == "B")


def test_letters_and_references_may_be_others() -> None:
    assert right_or_wrong(multiple_choice(sample("Answer: H", "H"), choices="ABCDEFGH"))
    for reference in ("(b)", " B ", "b.", "(B)"):
        assert right_or_wrong(multiple_choice(sample("Answer: B", reference)))
    for reference in ("Paris", "AB", "", "F"):
        with pytest.raises(ValueError, match="is none of the letters ABCDE"):
            multiple_choice(sample("Answer: B", reference))


@pytest.mark.parametrize(
    "response",
    [
        "\n" * 100_000,
        "answer" + " " * 100_000,
        "answer is " * 10_000 + " " * 50_000,
        "\\boxed{" + " " * 100_000,
        "( " * 50_000,
    ],
)
def test_a_great_deal_of_white_space_takes_no_time(response: str) -> None:
    began = time.process_time()
    assert multiple_choice(sample(response, "B")).answer is None
    assert time.process_time() - began < 2.0


# Options


def refused(name: str, kwargs: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        make_judges([RewardFunctionConfig(name=name, kwargs=kwargs)], [])
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("gsm8", {}, "unknown reward function 'gsm8'; did you mean gsm8k?"),
        ("exactmatch", {}, "unknown reward function 'exactmatch'; did you mean exact_match"),
        ("gsm8k", {"extracton": "strict"}, "kwargs.extracton: reward function 'gsm8k' has no such option; did you"),
        ("gsm8k", {"extraction": "lenient"}, "kwargs.extraction='lenient': Input should be 'strict' or 'flexible'"),
        ("math", {"precision": 0}, "kwargs.precision=0: Input should be greater than or equal to 1"),
        ("math", {"precision": "many"}, "kwargs.precision='many': Input should be a valid integer"),
        ("countdown", {"operators": "+x"}, "kwargs.operators='+x': use some of + - * /, each at most once"),
        ("countdown", {"operators": ""}, "kwargs.operators='': use some of"),
        ("countdown", {"operators": "++"}, "kwargs.operators='++': use some of"),
        ("format", {"tags": []}, "kwargs.tags=[]: List should have at least 1 item"),
        ("format", {"tags": ["a", "a"]}, "kwargs.tags=['a', 'a']: use names, each once"),
        ("format", {"tags": ["a", ""]}, "kwargs.tags=['a', '']: use names, each once"),
        ("format", {"tags": "think"}, "kwargs.tags='think': Input should be a valid list"),
        ("length", {}, "kwargs.target: reward function 'length' needs it"),
        ("length", {"target": 0}, "kwargs.target=0: Input should be greater than or equal to 1"),
        ("length", {"target": -5}, "kwargs.target=-5: Input should be"),
        ("length", {"target": 5, "tolerance": -1}, "kwargs.tolerance=-1: Input should be greater than or equal to 0"),
        ("length", {"target": 2.5}, "kwargs.target=2.5: Input should be a valid integer"),
        ("overlong", {"max_length": 10}, "kwargs.buffer: reward function 'overlong' needs it"),
        ("overlong", {"max_length": 10, "buffer": 0}, "kwargs.buffer=0: Input should be"),
        ("exact_match", {"pattern": "("}, "kwargs.pattern='(': is no regular expression: missing ), "),
        ("exact_match", {"case": "sometimes"}, "kwargs.case='sometimes': Input should be a valid boolean"),
        ("regex", {"pattern": "[a"}, "kwargs.pattern='[a': is no regular expression: unterminated"),
        ("regex", {"patern": "a"}, "kwargs.patern: reward function 'regex' has no such option; did you mean pattern?"),
        ("multiple_choice", {"choices": "A"}, "kwargs.choices='A': String should have at least 2 characters"),
        ("multiple_choice", {"choices": "abcd"}, "kwargs.choices='abcd': use capital letters, as in ABCD"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_by_name_before_anything_runs(
    name: str, kwargs: dict[str, Any], message: str
) -> None:
    found = refused(name, kwargs)
    assert message in found
    if "unknown" not in message:
        assert found.startswith("reward.functions[0].kwargs.")


@pytest.mark.parametrize(
    ("name", "kwargs", "response", "reference", "value"),
    [
        ("gsm8k", {"extraction": "flexible"}, "It is 7.", "7", 1.0),
        ("math", {"precision": 2}, r"\boxed{0.33}", "1/3", 1.0),
        ("countdown", {"operators": "+"}, answered("30+12"), '{"numbers": [12, 30], "target": 42}', 1.0),
        ("countdown", {"operators": "-"}, answered("30+12"), '{"numbers": [12, 30], "target": 42}', 0.0),
        ("format", {"tags": ["a"]}, "<a>7</a>", "", 1.0),
        ("length", {"target": 4}, "7", "", 0.25),
        ("overlong", {"max_length": 2, "buffer": 2}, "7", "", -0.5),
        ("exact_match", {"pattern": r"\w", "case": True}, "it is A", "a", 0.0),
        ("regex", {"pattern": None, "whole": True}, "7", r"\d", 1.0),
        ("multiple_choice", {"choices": "XYZ"}, "Answer: Y", "Y", 1.0),
    ],
)
def test_options_reach_the_function_as_a_run_calls_it(
    name: str, kwargs: dict[str, Any], response: str, reference: str, value: float
) -> None:
    (judge,) = make_judges([RewardFunctionConfig(name=name, kwargs=kwargs)], [])
    function: Callable[[Sample], RewardResult | float] = judge.function
    result = function(sample(response, reference))
    assert (result.value if isinstance(result, RewardResult) else result) == value
