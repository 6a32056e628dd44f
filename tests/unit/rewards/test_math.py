"""The built-in `math`: it judges as math-verify does, and no response can hold up or spoil the others."""

import time

import psutil
import pytest
from math_verify import parse, verify

from grpo_lib.config_reward import RewardConfig
from grpo_lib.rewards.builtin import math
from grpo_lib.rewards.judges import Reward, make_judges
from grpo_lib.rewards.runner import Scores, score
from grpo_lib.types import Sample

TIMEOUT = 1.0


def sample(response: str, reference: str) -> Sample:
    return Sample(
        prompt="p", response=response, reference=reference, data_source="d", response_tokens=1, finish_reason="stop"
    )


def judged(samples: list[Sample], timeout_seconds: float = TIMEOUT) -> Scores:
    """As a run judges them, in a process."""
    values = {"functions": [{"name": "math"}], "timeout_seconds": timeout_seconds, "max_failed": 1.0}
    config = RewardConfig.model_validate(values)
    return score(samples, Reward(judges=make_judges(config.functions, []), settings=config))


# What is right


@pytest.mark.parametrize(
    ("reference", "response", "right"),
    [
        # Fractions and roots
        ("$1/3$", r"It is $\frac{1}{3}$.", True),
        ("$1/3$", r"$\frac13$", True),
        ("$1/3$", r"$\dfrac{2}{6}$", True),
        ("$-10/9$", r"so $-\frac{10}{9}$", True),
        (r"$2\frac{1}{2}$", "$2.5$", True),
        (r"$\frac{1}{\sqrt2}$", r"$\frac{\sqrt2}{2}$", True),
        ("$1/3$", r"$\frac{1}{4}$", False),
        # Decimals: six digits after the point
        ("$1/3$", "0.333333", True),
        ("$1/3$", "0.3333", False),
        (r"$\frac{\pi}{4}$", "0.785398", True),
        ("$2.74$", "2,74", True),
        ("$0.4$", "The value is .4", True),
        # Large, small and negative numbers
        ("$1234$", "1,234", True),
        ("$1234$", "$1{,}234$", True),
        ("$1500$", r"$1.5 \times 10^3$", True),
        (r"$3\times 10^{8}$", r"$3\times 10^{7}$", False),
        ("$12$", "-12", False),
        # Percentages, units and degrees
        (r"$28\%$", "28 percent", True),
        (r"$28\%$", "28", True),
        ("$0.28$", r"$28\%$", True),
        ("$0.28$", "28", False),
        (r"$\frac{1}{3}$", r"$\frac{1}{3} \text{ meters}$", True),
        ("$1000.99$", "it costs 1,000.99€", True),
        ("$90$", r"$90^\circ$", True),
        # Sets, tuples and intervals
        (r"$\{1,3\} \cup \{2,4\}$", r"$\{1,2,3,4\}$", True),
        (r"$\{1,2\}$", "$2$ and $1$", True),
        (r"$\{1,2\}$", r"$\{1,2,3\}$", False),
        (r"$\pm 2$", r"$\{-2,2\}$", True),
        ("$(1,2)$", "$(2,1)$", False),
        ("$[0,1)$", "$[0,1)$", True),
        ("$[0,1)$", "$[0,1]$", False),
        (r"$(-\infty,2)\cup(3,\infty)$", r"$(3,\infty)\cup(-\infty,2)$", True),
        ("$1<x<2$", "$(1,2)$", True),
        # Matrices
        (
            r"$\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}$",
            r"$\begin{bmatrix} 1 & 0 \\ 0 & 1 \end{bmatrix}$",
            True,
        ),
        (
            r"$\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}$",
            r"$\begin{pmatrix} 0 & 1 \\ 1 & 0 \end{pmatrix}$",
            False,
        ),
        # Equations and inequalities
        ("$x=4$", "4", True),
        ("$4$", r"$k = 2 \cdot 2 = 4$", True),
        ("$2x+y=3$", "$y=3-2x$", True),
        ("$x=1$", "$y=1$", False),
        ("$x>2$", "$2<x$", True),
        ("$x>2$", r"$x \ge 2$", False),
        # Expressions
        ("$x^2-1$", "$(x-1)(x+1)$", True),
        ("$120$", "$5!$", True),
        (r"$\log_2 8$", "3", True),
        ("$1+2i$", "$2i+1$", True),
        # Text, and where the answer stands
        (r"$\text{Evelyn}$", r"Therefore $\boxed{\text{Evelyn}}$.", True),
        (r"$\text{Evelyn}$", r"$\boxed{\text{Briana}}$", False),
        ("$5$", r"First 3, so \boxed{\boxed{5}}. Then 7.", True),
        ("$5$", r"First $5$, then $7$.", False),
        ("$7$", "The final answer is $7$. I hope it is correct.", True),
        ("$7$", "$7$ or $8$", False),
        ("$7$", "seven", False),
        ("$7$", "", False),
    ],
)
def test_it_judges_as_math_verify_does(reference: str, response: str, right: bool) -> None:
    result = math(sample(response, reference))
    assert (result.value, result.components) == (float(right), {"correct": float(right)})
    assert verify(parse(reference), parse(response)) is right


@pytest.mark.parametrize(
    ("reference", "response", "value"),
    [
        (r"\frac{1}{2}", r"\boxed{\frac12}", 1.0),
        (r"\frac{1}{2}", r"\boxed{\frac13}", 0.0),
        (r"\text{blue}", r"\boxed{\text{Blue}}", 1.0),
        ("[0,1)", "$[0,1)$", 1.0),
        (r"x^2+2x+1", "$(x+1)^2$", 1.0),
        (r"\$5", "5", 1.0),  # a dollar of money, not of TeX
        (r"\$1{,}250", r"\boxed{\$1250}", 1.0),
        ("$5", r"\boxed{5}", 1.0),
        (r"So \boxed{5}.", "5", 1.0),
        ("8", r"\boxed{9}", 0.0),
    ],
)
def test_a_reference_needs_no_dollars_around_it(reference: str, response: str, value: float) -> None:
    assert math(sample(response, reference)).value == value


def test_a_box_comes_before_formulas_and_the_last_formula_before_others() -> None:
    assert math(sample(r"\boxed{5}, for $5 + 2 = 7$ and $9$", "5")).answer == "5"
    assert math(sample("$4$ then $5$", "5")).answer == "5"
    assert math(sample("4 then 5", "5")).answer == "5"


def test_precision_is_the_number_of_digits_that_count() -> None:
    assert [math(sample("0.33", "1/3"), precision=digits).value for digits in (1, 2, 3)] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("responses", "answer"),
    [
        ((r"\boxed{\frac12}", r"\boxed{\frac{2}{4}}", "1/2", "0.5", "$0.50$"), "1/2"),
        ((r"$\{3, 1\}$", "$1$ and $3$", r"\boxed{1, 3}"), "{1, 3}"),
        (("1,000", "$1000$", r"\boxed{1{,}000}", "1000.0"), "1000"),
        ((r"\boxed{\text{Blue}}", r"$\text{blue}$"), "blue"),
    ],
)
def test_the_same_answer_has_one_spelling_and_votes_together(responses: tuple[str, ...], answer: str) -> None:
    assert {math(sample(each, "7")).answer for each in responses} == {answer}


def test_a_reference_that_cant_be_read_is_an_error_and_not_a_wrong_answer() -> None:
    with pytest.raises(ValueError, match="math-verify can't read the reference ''"):
        math(sample("5", ""))


# What is meant to hurt

ENDLESS = {
    "a tower": r"\boxed{9^{9^{9^9}}}",
    "a tower as plain text": "The answer is 9**9**9**9",
    "a tower that is reduced": r"$7^{7^{7^7}} \mod 10$",
}
LONG = {
    "a factorial": "$(10^7)!$",
    "a sum": "$" + "1+" * 50_000 + "1$",
    "parentheses": "$" + "(" * 5000 + "4" + ")" * 5000 + "$",
    "fractions": "$" + r"\frac{1}{" * 3000 + "1" + "}" * 3000 + "$",
    "boxes": r"\boxed{" * 1000 + "4" + "}" * 1000,
}
UNREADABLE = {
    "fractions that do not end": "$" + r"\frac{1}{" * 100,
    "boxes that do not end": r"\boxed{" * 3000,
    "dollars": "$" * 20_001,
    "backslashes": "\\" * 20_001,
    "a number of 100,000 digits": "1" * 100_000,
    "words": "answer " * 2000,
    "control characters": "\x00\x01\x7f" + r"$\frac$",
    "other alphabets": r"\boxed{٥五🍎}",
}


def test_no_response_takes_longer_than_its_time_or_hurts_its_neighbours() -> None:
    hostile = [*ENDLESS.values(), *LONG.values(), *UNREADABLE.values()]
    given = [sample(r"\boxed{5}", "5")]
    for each in hostile:
        given += [sample(each, "5"), sample(r"\boxed{\frac{10}{2}}", "5"), sample("$6$", "5")]
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    began = time.monotonic()
    scores = judged(given)
    seconds = time.monotonic() - began
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= before

    assert scores.values[0] == 1.0
    assert scores.values[2::3] == [1.0] * len(hostile)
    assert scores.values[3::3] == [0.0] * len(hostile)
    values, reasons = scores.values[1::3], scores.reasons[1::3]
    assert values[: len(ENDLESS)] == [None] * len(ENDLESS)
    assert set(values[len(ENDLESS) : -len(UNREADABLE)]) <= {None, 0.0}, "as fast as the machine is"
    assert values[-len(UNREADABLE) :] == [0.0] * len(UNREADABLE)
    for value, reason in zip(values, reasons, strict=True):
        assert (value is None) == (reason is not None)
        assert reason is None or f"took longer than reward.timeout_seconds={TIMEOUT:g}" in reason
    # One that does not let itself be interrupted has two seconds more, and its process starts again.
    slow = len(ENDLESS) + len(LONG)
    assert seconds < 10 + slow * (TIMEOUT + 5)


def test_packages_are_imported_before_the_first_sample_and_not_in_its_time() -> None:
    """They take seconds; cut short half-way they would stay broken for all samples after it."""
    scores = judged([sample(r"\boxed{5}", "5")] * 3, timeout_seconds=0.5)
    assert scores.values == [1.0] * 3
