"""What a reward function says, checked: a result, or the reason why there is none."""

import math
import traceback
from numbers import Real
from typing import Any

from grpo_lib.types import RewardResult

MAX_REASON_CHARS = 200
MAX_TEXT_CHARS = 4000

Verdict = tuple[RewardResult | None, str | None]
"""Result, or None and the reason."""


def verdict_of(result: object, tokens: int, chars: int) -> Verdict:
    """The result of a function with every number as a float.

    Args:
        tokens: of the response.
        chars: of the response's text.

    Raises:
        TypeError, ValueError: for what is no finite number, or scores that do not fit to the response.
    """
    if isinstance(result, Exception):  # of one sample, from a function of many
        raise result
    if not isinstance(result, RewardResult):
        return RewardResult(value=_finite(result, "reward")), None
    steps = result.step_scores
    if result.token_scores is not None and steps is not None:
        raise ValueError("gives token_scores and step_scores; give one of them")
    scores = None
    if result.token_scores is not None:
        scores = [_finite(each, "a token's score") for each in result.token_scores]
        if len(scores) != tokens:
            raise ValueError(f"gives {len(scores)} token_scores for {tokens} tokens")
    if steps is not None:
        steps = [(int(end), _finite(score, "a step's score")) for end, score in steps]
        wrong = [end for end, _ in steps if not 0 < end <= chars]
        if wrong:
            raise ValueError(f"a step ends at {wrong[0]}, the response has {chars} characters")
    return (
        RewardResult(
            value=_finite(result.value, "value"),
            components={str(name): _finite(part, f"component {name!r}") for name, part in result.components.items()},
            answer=None if result.answer is None else _text(result.answer),
            token_scores=scores,
            step_scores=steps,
            text=None if result.text is None else _text(result.text)[:MAX_TEXT_CHARS],
        ),
        None,
    )


def reason_of(error: BaseException) -> str:
    """Type and message in one line; safe where the error's own text can't be made or stored."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return text.encode("utf-8", "replace").decode("utf-8")[:MAX_REASON_CHARS]


def as_values(verdict: Verdict) -> list[Any]:
    """For JSON."""
    result, reason = verdict
    return [None if result is None else vars(result) | {"components": dict(result.components)}, reason]


def from_values(values: list[Any]) -> Verdict:
    result, reason = values
    return (None if result is None else RewardResult(**result)), reason


def _text(value: object) -> str:
    """What Arrow can store."""
    return str(value).encode("utf-8", "replace").decode("utf-8")


def _finite(value: object, what: str) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"{what} must be a number, found {value if value is None else type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}")
    return number
