"""Runs a reward function over samples; what it can't score becomes a null with a reason, never a 0."""

import math
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

from grpo_lib.errors import RewardError
from grpo_lib.types import RewardFunction, RewardResult, Sample

MAX_REASON_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Rewards of some samples, in their order. All lists have one entry a sample."""

    values: list[float | None]
    """The reward; null where it could not be computed."""
    reasons: list[str | None]
    """Why a value is null (at most 200 characters); null where there is a value."""
    components: dict[str, list[float | None]]
    """Named parts of the reward; null where a sample has no such part."""
    answers: list[str | None]
    """What the sample answers; null where the reward function does not say."""
    judged: list[bool]
    """Not those whose rollout failed: the reward function never saw them."""


def score(
    samples: Sequence[Sample], function: RewardFunction, on_progress: Callable[[int], None] | None = None
) -> Scores:
    """Scores every sample; ``on_progress`` is called with the number of samples done.

    A value is null where the function raises, or returns ``None``, NaN, an infinity or another type; so it is where
    one of the components is not a finite number. Only `Exception` is caught: an interrupt still ends the run. A sample
    whose rollout failed is null for that reason.
    """
    values: list[float | None] = []
    reasons: list[str | None] = []
    parts: list[dict[str, float]] = []
    answers: list[str | None] = []
    for done, sample in enumerate(samples, start=1):
        value, components, answer, reason = _score_one(sample, function)
        values.append(value)
        reasons.append(reason)
        parts.append(components)
        answers.append(answer)
        if on_progress is not None:
            on_progress(done)
    names = dict.fromkeys(name for components in parts for name in components)
    return Scores(
        values=values,
        reasons=reasons,
        components={name: [components.get(name) for components in parts] for name in names},
        answers=answers,
        judged=[sample.failure is None for sample in samples],
    )


def check_failures(scores: Scores, max_failed: float) -> None:
    """Stops the run when too many of the rewards that were to be computed are null.

    Raises:
        RewardError: the fraction of nulls is above ``max_failed``; the commonest reasons are named, each with its
            count and the index of one sample.
    """
    reasons = [reason for reason, judged in zip(scores.reasons, scores.judged, strict=True) if judged and reason]
    total, failed = sum(scores.judged), len(reasons)
    if failed <= max_failed * total:
        return
    commonest = [
        f"{count} x {reason} (first: sample {scores.reasons.index(reason)})"
        for reason, count in Counter(reasons).most_common(3)
    ]
    raise RewardError(
        f"{failed} of {total} rewards failed ({failed / total:.1%}), reward.max_failed={max_failed:g} allows "
        f"{max_failed:.1%}: {'; '.join(commonest)}. Fix the reward function, or raise reward.max_failed"
    )


def _score_one(
    sample: Sample, function: RewardFunction
) -> tuple[float | None, dict[str, float], str | None, str | None]:
    """Value, components, answer, and the reason where the value is null."""
    if sample.failure is not None:
        return None, {}, None, sample.failure
    try:
        result: object = function(sample)
        if isinstance(result, RewardResult):
            components = {str(name): _finite(part, f"component {name!r}") for name, part in result.components.items()}
            answer = None if result.answer is None else str(result.answer)
            return _finite(result.value, "value"), components, answer, None
        return _finite(result, "reward"), {}, None, None
    except Exception as error:
        return None, {}, None, _reason(error)


def _finite(value: object, what: str) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"{what} must be a number, found {value if value is None else type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}")
    return number


def _reason(error: Exception) -> str:
    """Type and message in one line; safe where the error's own text can't be made or stored."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return text.encode("utf-8", "replace").decode("utf-8")[:MAX_REASON_CHARS]
