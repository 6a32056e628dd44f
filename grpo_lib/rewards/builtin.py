"""The reward functions that are built in: importing this registers them.

Each takes one response and gives a value, mostly 0 or 1, with the component ``correct`` where that is what it says.
"""

import logging
import re
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AfterValidator

from grpo_lib.algorithms.registry import Option
from grpo_lib.config_base import Pattern
from grpo_lib.config_data import CountdownData
from grpo_lib.config_reward import RewardConfig
from grpo_lib.problems import countdown as countdown_problem
from grpo_lib.problems.gsm8k import MAX_NUMBER_CHARS, flexible_number, strict_number
from grpo_lib.rewards.registry import REWARDS
from grpo_lib.types import RewardResult, Sample

_ONLY_RIGHT = RewardConfig(correct=1.0, format_only=0.0)


def _operators(text: str) -> str:
    if not text or set(text) - set("+-*/") or len(set(text)) < len(text):
        raise ValueError("use some of + - * /, each at most once")
    return text


def _tags(names: list[str]) -> list[str]:
    if not all(names) or len(set(names)) < len(names):
        raise ValueError("use names, each once")
    return names


def _letters(text: str) -> str:
    if not re.fullmatch("[A-Z]+", text):
        raise ValueError("use capital letters, as in ABCD")
    return text


Case = Annotated[bool, Option(description="Capital letters count.")]


def judged(right: bool, answer: str | None = None) -> RewardResult:
    """1 for a right answer, 0 for a wrong one."""
    return RewardResult(value=float(right), components={"correct": float(right)}, answer=answer)


def _given(sample: Sample) -> str:
    """The reference, where it decides: with an empty one a response could be neither right nor wrong."""
    if not sample.reference.strip():
        raise ValueError("the reference is empty")
    return sample.reference


@REWARDS.register("gsm8k", use="the number after ####, or the last one", modules=("grpo_lib.problems.gsm8k",))
def gsm8k(
    sample: Sample,
    *,
    extraction: Annotated[
        Literal["strict", "flexible"], Option(description="strict: after ####; flexible: else the last number.")
    ] = "strict",
) -> RewardResult:
    """Compares the response's number with the reference, exactly: 18.00 is 18."""
    expected = strict_number(f"#### {sample.reference}")
    if expected is None:
        raise ValueError(f"the reference {sample.reference[:80]!r} is no number")
    number = (strict_number if extraction == "strict" else flexible_number)(sample.response)
    return judged(number == expected, None if number is None else str(number))


@REWARDS.register(
    "math",
    use="mathematical answers in LaTeX or plain text",
    isolated=True,
    imports=("math_verify",),
    packages=("math_verify",),
)
def math(
    sample: Sample,
    *,
    precision: Annotated[int, Option(ge=1, description="Digits after the point that count.")] = 6,
) -> RewardResult:
    """Compares the last formula, or what stands in ``\\boxed{}``, with the reference by math-verify."""
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.parser import ExprExtractionConfig

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its time limits are off
    is_latex = _MATH_MODE.search(sample.reference) is not None
    # Its own time limits are signals, as the runner's is, so they are off.
    gold = parse(sample.reference if is_latex else f"${sample.reference}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify can't read the reference {sample.reference[:80]!r}")
    found = parse(
        sample.response,
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
        parsing_timeout=None,
    )
    right = bool(found) and verify(gold, found, float_rounding=precision, timeout_seconds=None)
    return judged(right, _spelling(found[0]) if found else None)


def _spelling(answer: object) -> str:
    """``1/2`` for ``\\frac12``, ``1/2`` and ``0.50``: answers that are the same vote together."""
    text = str(answer)
    is_decimal = getattr(answer, "is_Float", False) and len(text) <= MAX_NUMBER_CHARS
    return str(Fraction(text)) if is_decimal else text


_MATH_MODE = re.compile(r"(?<!\\)\$|\\boxed")


@REWARDS.register(
    "countdown",
    use="an equation in <answer> that uses every number once",
    modules=("grpo_lib.problems.countdown", "grpo_lib.problems.arithmetic", "grpo_lib.problems.common"),
)
def countdown(
    sample: Sample,
    *,
    operators: Annotated[str, Option(description="Those allowed, of + - * /."), AfterValidator(_operators)] = "+-*/",
) -> RewardResult:
    """The reference is JSON with ``numbers`` and ``target``."""
    _given(sample)
    made = countdown_problem.make_reward(CountdownData(operators=operators), _ONLY_RIGHT)(sample)
    assert isinstance(made, RewardResult)
    return made


@REWARDS.register("format", use="tags in the order asked for, each once")
def format_tags(
    sample: Sample,
    *,
    tags: Annotated[list[str], Option(min_length=1, description="Names, in order."), AfterValidator(_tags)] = [  # noqa: B006
        "think",
        "answer",
    ],
) -> RewardResult:
    """1 if the response is ``<think>...</think> <answer>...</answer>`` and nothing else, as the tags say."""
    blocks = r"\s*".join(f"<{re.escape(tag)}>.*?</{re.escape(tag)}>" for tag in tags)
    once = all(sample.response.count(f"<{tag}>") == sample.response.count(f"</{tag}>") == 1 for tag in tags)
    right = once and re.fullmatch(rf"\s*{blocks}\s*", sample.response, re.DOTALL) is not None
    return RewardResult(value=float(right), components={"format": float(right)})


@REWARDS.register("length", use="responses of about a length, as an addition to another reward")
def length(
    sample: Sample,
    *,
    target: Annotated[int, Option(ge=1, description="Tokens.")],
    tolerance: Annotated[int, Option(ge=0, description="So far from the target the value is still 1.")] = 0,
) -> float:
    """1 at the target, falling linearly to 0 at twice the target or at nothing."""
    off = max(0, abs(sample.response_tokens - target) - tolerance)
    return max(0.0, 1.0 - off / target)


@REWARDS.register("overlong", paper="Yu et al. 2025, DAPO, eq. 13", use="a soft end to the length of responses")
def overlong(
    sample: Sample,
    *,
    max_length: Annotated[int, Option(ge=1, description="Tokens; from there on the value is -1.")],
    buffer: Annotated[int, Option(ge=1, description="In the last so many the value falls from 0 to -1.")],
) -> float:
    """0 to ``max_length - buffer`` tokens, then linear to -1 at ``max_length``."""
    if buffer > max_length:
        raise ValueError(f"buffer={buffer} must be at most max_length={max_length}")
    under = (max_length - buffer - sample.response_tokens) / buffer
    return min(0.0, max(-1.0, under))


@REWARDS.register("exact_match", use="answers with one spelling", isolated=True)
def exact_match(
    sample: Sample,
    *,
    pattern: Annotated[
        Pattern | None,
        Option(description="Its first group, at its last match, is the answer; null: the whole text."),
    ] = None,
    case: Case = False,
) -> RewardResult:
    """Whether the answer is the reference; white space around and between words is one space."""
    answer, expected = sample.response, _given(sample)
    if pattern is not None:
        found = list(re.finditer(pattern, answer, re.DOTALL))
        if not found:
            return judged(False)
        answer = found[-1][1 if found[-1].re.groups else 0]
        if answer is None:  # the group is in a part of the pattern that did not match
            return judged(False)
    answer, expected = (" ".join(text.split()) for text in (answer, expected))
    same = answer == expected if case else answer.casefold() == expected.casefold()
    return judged(same, answer)


@REWARDS.register("regex", use="responses that hold a pattern", isolated=True)
def regex(
    sample: Sample,
    *,
    pattern: Annotated[Pattern | None, Option(description="null: the reference is the pattern.")] = None,
    whole: Annotated[bool, Option(description="The whole response has to match.")] = False,
) -> RewardResult:
    """1 if the pattern is found in the response."""
    wanted = _given(sample) if pattern is None else pattern
    found = (re.fullmatch if whole else re.search)(wanted, sample.response, re.DOTALL)
    return judged(found is not None)


# What is only called an option may be one that is ruled out. No two neighbours here match the same character over and
# over: of a response with very many spaces every way to share them out would be tried.
_CALLED = (
    r"(?i:answer)(?:\s+is)?[\s:=*($]*(?:(?i:option|choice)[\s*($]*)?([A-Z])\b",
    r"\\boxed\{\s*(?:\\text\{)?\(?([A-Z])\)?\}?\s*\}",
    r"<answer>\s*\(?([A-Z])\)?[.):]?\s*</answer>",
    r"^[^\S\n]*[(*]*([A-Z])[)*.:]*[^\S\n]*$",
)
_MENTIONED = (r"(?i:choice|option)(?:\s+is)?[\s:=*($]*([A-Z])\b",)


@REWARDS.register("multiple_choice", use="one letter of several")
def multiple_choice(
    sample: Sample,
    *,
    choices: Annotated[
        str, Option(min_length=2, description="The letters, capitals."), AfterValidator(_letters)
    ] = "ABCDE",
) -> RewardResult:
    """The last letter that is called the answer: ``Answer: B``, ``\\boxed{B}``, ``<answer>B</answer>``, or B alone.

    Where there is none it is the last that is called a choice or an option.
    """
    expected = sample.reference.strip().strip("().").upper()
    if len(expected) != 1 or expected not in choices:
        raise ValueError(f"the reference {sample.reference[:80]!r} is none of the letters {choices}")
    answer = _last_letter(_CALLED, sample.response, choices) or _last_letter(_MENTIONED, sample.response, choices)
    return judged(answer == expected, answer)


def _last_letter(patterns: tuple[str, ...], text: str, choices: str) -> str | None:
    found = [(match.start(1), match[1]) for each in patterns for match in re.finditer(each, text, re.MULTILINE)]
    return max((each for each in found if each[1] in choices), default=(0, None))[1]
