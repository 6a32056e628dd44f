"""What a reward function says, checked: a result, or the reason why there is none."""

import inspect
import math
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from operator import attrgetter
from typing import Any

from grpo_lib.types import NoRewardError, RewardResult, Sample

MAX_REASON_CHARS = 200
MAX_TEXT_CHARS = 4000


@dataclass(frozen=True)
class NoReward:
    """There is no result."""

    reason: str
    spent: Mapping[str, float] = field(default_factory=dict)
    """What judging took all the same."""


Verdict = RewardResult | NoReward
"""What came of one sample."""
_FIELDS = attrgetter(*(each.name for each in fields(RewardResult)))


def verdict_of(result: object, tokens: int, chars: int) -> RewardResult:
    """The result of a function with every number as a float.

    Args:
        tokens: of the response.
        chars: of the response's text.

    Raises:
        TypeError, ValueError: for what is no finite number, scores that do not fit to the response, or two numbers of
            one name.
    """
    if type(result) is RewardResult and _is_plain(result):
        _check_spent(result.spent, result.components)
        return result
    if isinstance(result, Exception):  # of one sample, from a function of many
        raise result
    if not isinstance(result, RewardResult):
        return RewardResult(value=_finite(result, "reward"))
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
    components, spent = _parts(result.components), _parts(result.spent)
    _check_spent(spent, components)
    return RewardResult(
        value=_finite(result.value, "value"),
        components=components,
        answer=None if result.answer is None else _text(result.answer),
        token_scores=scores,
        step_scores=steps,
        text=None if result.text is None else _text(result.text)[:MAX_TEXT_CHARS],
        spent=spent,
    )


def each_verdict(results: Any, samples: Sequence[Sample]) -> list[Verdict]:
    """Of what a function of many samples gives.

    Raises:
        TypeError, ValueError: it is no list with an entry for each sample.
    """
    if inspect.isawaitable(results) or not hasattr(results, "__len__") or isinstance(results, str | bytes | dict):
        raise TypeError(f"must give a list with an entry for each sample, found {type(results).__name__}")
    if len(results) != len(samples):
        raise ValueError(f"gave {len(results)} rewards for {len(samples)} samples")
    verdicts: list[Verdict] = []
    for result, sample in zip(results, samples, strict=True):
        try:
            verdicts.append(verdict_of(result, len(sample.response_ids), len(sample.response)))
        except Exception as error:
            verdicts.append(failed(error))
    return verdicts


def failed(error: BaseException) -> NoReward:
    """No reward, because of an exception."""
    if not isinstance(error, NoRewardError):
        return NoReward(reason_of(error))
    try:
        return NoReward(cut(error), _parts(error.spent))
    except Exception as wrong:
        return NoReward(reason_of(wrong))


def reason_of(error: BaseException) -> str:
    """Type and message in one line; safe where the error's own text can't be made or stored."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    text = re.sub(r"^grpo_lib\.[a-z_.]*", "", text)  # of our own errors nobody needs the module
    return cut(text)


def cut(reason: object) -> str:
    """As long as a reason may be, and of what can be stored."""
    return _text(reason)[:MAX_REASON_CHARS]


def as_values(verdict: Verdict) -> list[Any]:
    """For JSON, briefly."""
    if isinstance(verdict, NoReward):
        return [verdict.reason, verdict.spent]
    return list(_FIELDS(verdict))


def from_values(values: Sequence[Any], tokens: int, chars: int) -> Verdict:
    """What `as_values` gave, checked: it comes from a process in which a user's function runs.

    Raises:
        Exception: it is something else.
    """
    if len(values) == 2:
        reason, spent = values
        return NoReward(cut(reason), _parts(spent))
    value, components, answer, token_scores, step_scores, text, spent = values
    result = RewardResult(
        value=value, components=components, answer=answer, token_scores=token_scores, step_scores=step_scores,
        text=text, spent=spent,
    )  # fmt: skip
    return verdict_of(result, tokens, chars)


def _is_plain(result: RewardResult) -> bool:
    """There is nothing to check or to change: the usual case, in which a new object would be a third of the work."""
    for part in (result.components, result.spent):
        if type(part) is not dict:
            return False
        for name, value in part.items():
            if type(name) is not str or type(value) is not float or not math.isfinite(value):
                return False
    answer, text = result.answer, result.text
    return (
        type(result.value) is float
        and math.isfinite(result.value)
        and result.token_scores is None
        and result.step_scores is None
        and (answer is None or (type(answer) is str and answer.isascii()))
        and (text is None or (type(text) is str and text.isascii() and len(text) <= MAX_TEXT_CHARS))
    )


def _check_spent(spent: Mapping[str, float], components: Mapping[str, float]) -> None:
    for name in spent:
        if name in components:
            raise ValueError(f"{name!r} is a component and in spent; give one of them another name")


def _parts(parts: Mapping[str, float]) -> dict[str, float]:
    return {str(name): _finite(part, f"component {name!r}") for name, part in parts.items()}


def _text(value: object) -> str:
    """What Arrow can store."""
    return str(value).encode("utf-8", "replace").decode("utf-8")


def _finite(value: object, what: str) -> float:
    if type(value) is not float and not isinstance(value, Real):
        raise TypeError(f"{what} must be a number, found {value if value is None else type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}")
    return number
