"""The reward functions that are built in: importing this registers them.

Each takes one response and gives a value, mostly 0 or 1, with the component ``correct`` where that is what it says.
"""

import re
from typing import Annotated

from grpo_lib.algorithms.registry import Option
from grpo_lib.config_data import CountdownData
from grpo_lib.config_reward import RewardConfig
from grpo_lib.problems import countdown as countdown_problem
from grpo_lib.problems.gsm8k import flexible_number, strict_number
from grpo_lib.rewards.registry import REWARDS
from grpo_lib.types import RewardResult, Sample

Case = Annotated[bool, Option(description="Capital letters count.")]
_ONLY_RIGHT = RewardConfig(correct=1.0, format_only=0.0)


def judged(right: bool, answer: str | None = None) -> RewardResult:
    """1 for a right answer, 0 for a wrong one."""
    return RewardResult(value=float(right), components={"correct": float(right)}, answer=answer)


@REWARDS.register("gsm8k", use="the number after ####, or the last one")
def gsm8k(
    sample: Sample,
    *,
    extraction: Annotated[str, Option(description="strict: after ####; flexible: else the last number.")] = "strict",
) -> RewardResult:
    """Compares the response's number with the reference, exactly: 18.00 is 18."""
    if extraction not in ("strict", "flexible"):
        raise ValueError(f"extraction={extraction!r}: use strict or flexible")
    expected = strict_number(f"#### {sample.reference}")
    if expected is None:
        raise ValueError(f"the reference {sample.reference[:80]!r} is no number")
    number = (strict_number if extraction == "strict" else flexible_number)(sample.response)
    return judged(number == expected, None if number is None else str(number))


@REWARDS.register("math", use="mathematical answers in LaTeX or plain text", isolated=True)
def math(
    sample: Sample,
    *,
    precision: Annotated[int, Option(ge=1, description="Digits after the point that count.")] = 6,
) -> RewardResult:
    """Compares the last formula, or what stands in ``\\boxed{}``, with the reference by math-verify."""
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.parser import ExprExtractionConfig

    # Its own time limits are signals; this process has one already.
    gold = parse(
        sample.reference if "$" in sample.reference or "\\boxed" in sample.reference else f"${sample.reference}$",
        parsing_timeout=None,
    )
    if not gold:
        raise ValueError(f"math-verify can't read the reference {sample.reference[:80]!r}")
    found = parse(
        sample.response,
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
        parsing_timeout=None,
    )
    right = bool(found) and verify(gold, found, float_rounding=precision, timeout_seconds=None)
    return judged(right, str(found[-1]) if found else None)


@REWARDS.register("countdown", use="an equation in <answer> that uses every number once")
def countdown(
    sample: Sample, *, operators: Annotated[str, Option(description="Those allowed, of + - * /.")] = "+-*/"
) -> RewardResult:
    """The reference is JSON with ``numbers`` and ``target``."""
    made = countdown_problem.make_reward(CountdownData(operators=operators), _ONLY_RIGHT)(sample)
    assert isinstance(made, RewardResult)
    return made


@REWARDS.register("format", use="tags in the order asked for, each once")
def format_tags(
    sample: Sample,
    *,
    tags: Annotated[list[str], Option(min_length=1, description="Names, in order.")] = ["think", "answer"],  # noqa: B006
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
    over = (sample.response_tokens - (max_length - buffer)) / buffer
    return -min(1.0, max(0.0, over))


@REWARDS.register("exact_match", use="answers with one spelling")
def exact_match(
    sample: Sample,
    *,
    pattern: Annotated[
        str | None,
        Option(description="Its first group, at its last match, is the answer; null: the whole text."),
    ] = None,
    case: Case = False,
) -> RewardResult:
    """Whether the answer is the reference; white space around and between words is one space."""
    answer = sample.response
    if pattern is not None:
        found = list(re.finditer(pattern, answer, re.DOTALL))
        if not found:
            return judged(False)
        answer = found[-1][1] if found[-1].re.groups else found[-1][0]
    answer, expected = (" ".join(text.split()) for text in (answer, sample.reference))
    same = answer == expected if case else answer.casefold() == expected.casefold()
    return judged(same, answer)


@REWARDS.register("regex", use="responses that hold a pattern")
def regex(
    sample: Sample,
    *,
    pattern: Annotated[str | None, Option(description="null: the reference is the pattern.")] = None,
    whole: Annotated[bool, Option(description="The whole response has to match.")] = False,
) -> RewardResult:
    """1 if the pattern is found in the response."""
    wanted = sample.reference if pattern is None else pattern
    found = (re.fullmatch if whole else re.search)(wanted, sample.response, re.DOTALL)
    return judged(found is not None)


_CHOICE = (
    r"(?i:answer|choice|option)(?:\s+is)?\s*[:=]?\s*\(?\**([A-Z])\b",
    r"\\boxed\{\s*(?:\\text\{)?\(?([A-Z])\)?\}?\s*\}",
    r"<answer>\s*\(?([A-Z])\)?[.):]?\s*</answer>",
    r"^\s*\(?([A-Z])\)?[.):]?\s*$",
)


@REWARDS.register("multiple_choice", use="one letter of several")
def multiple_choice(
    sample: Sample, *, choices: Annotated[str, Option(min_length=2, description="The letters.")] = "ABCDE"
) -> RewardResult:
    """The last letter that is called the answer: ``Answer: B``, ``\\boxed{B}``, ``<answer>B</answer>``, or B alone."""
    found = [
        (match.start(), match[1].upper())
        for pattern in _CHOICE
        for match in re.finditer(pattern, sample.response, re.MULTILINE)
    ]
    letters = [letter for _, letter in sorted(found) if letter in choices]
    answer = letters[-1] if letters else None
    return judged(answer == sample.reference.strip().strip("().").upper(), answer)
