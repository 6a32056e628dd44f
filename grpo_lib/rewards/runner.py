"""Runs reward functions over samples and adds them up; what they can't score is a null with a reason, never a 0."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grpo_lib.errors import RewardError
from grpo_lib.rewards.judge_pool import JudgePool
from grpo_lib.rewards.judges import Judge, Reward
from grpo_lib.rewards.verdicts import Verdict, reason_of, verdict_of
from grpo_lib.types import CORRECT, RewardResult, Sample

SHOWN_CHARS = 160
NOT_JUDGED = "not judged: too many rewards had failed by then"

Known = Mapping[tuple[str, str], Verdict]
"""What was judged before, by the digests of function and sample."""


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
    verdicts: dict[str, list[Verdict | None]]
    """Of each function by name; None: it was not asked about the sample."""


def score(
    samples: Sequence[Sample],
    reward: Reward,
    on_progress: Callable[[int], None] | None = None,
    known: Known | None = None,
) -> Scores:
    """Scores every sample; ``on_progress`` is called with the number of samples done.

    A value is null where a function raises, takes too long, ends its process, or returns ``None``, NaN, an infinity or
    another type; so it is where one of the components is not a finite number. A sample whose rollout failed is null for
    that reason, one that no function judges for that.
    """
    asked = [place for place, sample in enumerate(samples) if sample.failure is None]
    verdicts: dict[str, list[Verdict | None]] = {}
    progress = _Progress(len(reward.judges), on_progress)
    allowed = reward.settings.max_failed * len(asked)
    for judge in reward.judges:
        mine = [place for place in asked if judge.judges(samples[place].data_source)]
        found = verdicts.setdefault(judge.name, [None] * len(samples))
        fresh = mine
        if known:
            before = [known.get((judge.digest, digest_of(samples[place]))) for place in mine]
            for place, verdict in zip(mine, before, strict=True):
                found[place] = verdict
            fresh = [place for place in mine if found[place] is None]
        progress.more(len(samples) - len(fresh))
        made = _judged([samples[place] for place in fresh], judge, reward, allowed, progress.one)
        for place, verdict in zip(fresh, made, strict=True):
            found[place] = verdict
    return _added_up(samples, reward.judges, verdicts)


def check_failures(scores: Scores, max_failed: float, samples: Sequence[Sample] = ()) -> None:
    """Stops the run when too many of the rewards that were to be computed are null.

    Raises:
        RewardError: the fraction of nulls is above ``max_failed``; the commonest reasons are named, each with its
            count and one sample.
    """
    reasons = [reason for reason, judged in zip(scores.reasons, scores.judged, strict=True) if judged and reason]
    total, failed = sum(scores.judged), len(reasons)
    if failed <= max_failed * total:
        return
    commonest = [
        f"{count} x {reason} ({_shown(scores.reasons.index(reason), samples)})"
        for reason, count in Counter(reasons).most_common(3)
    ]
    raise RewardError(
        f"{failed} of {total} rewards failed ({failed / total:.1%}), reward.max_failed={max_failed:g} allows "
        f"{max_failed:.1%}: {'; '.join(commonest)}. Fix the reward function, or raise reward.max_failed"
    )


def digest_of(sample: Sample) -> str:
    """Of all that a reward function sees of a sample, but for names that differ from run to run."""
    seen = {name: value for name, value in vars(sample).items() if name not in ("rollout_id", "response_ids")}
    text = json.dumps(seen | {"metadata": dict(sample.metadata)}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class _Progress:
    """Counts what all functions have done as samples."""

    def __init__(self, functions: int, told: Callable[[int], None] | None) -> None:
        self._functions, self._told, self._done = max(1, functions), told, 0

    def one(self) -> None:
        self.more(1)

    def more(self, count: int) -> None:
        self._done += count
        if self._told is not None and count:
            self._told(self._done // self._functions)


def _judged(
    samples: Sequence[Sample],
    judge: Judge,
    reward: Reward,
    allowed: float,
    done: Callable[[], None],
) -> list[Verdict]:
    if not samples:
        return []
    if judge.isolated or judge.kind.startswith("async"):
        settings = reward.settings
        pool = JudgePool(judge, settings.runner, settings.timeout_seconds, reward.plugins, stop_after=allowed)
        return [verdict or (None, NOT_JUDGED) for verdict in pool.judge(samples, done)]
    if judge.kind == "samples":
        return _all_at_once(samples, judge, done)
    verdicts = []
    for sample in samples:
        verdicts.append(_one(sample, judge))
        done()
    return verdicts


def _one(sample: Sample, judge: Judge) -> Verdict:
    try:
        return verdict_of(judge.function(sample), len(sample.response_ids), len(sample.response))
    except Exception as error:
        return None, reason_of(error)


def _all_at_once(samples: Sequence[Sample], judge: Judge, done: Callable[[], None]) -> list[Verdict]:
    try:
        results = list(judge.function(samples))
        if len(results) != len(samples):
            raise ValueError(f"gave {len(results)} rewards for {len(samples)} samples")
    except Exception as error:
        return [(None, reason_of(error))] * len(samples)
    verdicts: list[Verdict] = []
    for result, sample in zip(results, samples, strict=True):
        try:
            verdicts.append(verdict_of(result, len(sample.response_ids), len(sample.response)))
        except Exception as error:
            verdicts.append((None, reason_of(error)))
        done()
    return verdicts


def _added_up(samples: Sequence[Sample], judges: Sequence[Judge], verdicts: dict[str, list[Verdict | None]]) -> Scores:
    """The weighted sum over the functions; with several each one's value and parts are components by its name."""
    alone = len({judge.name for judge in judges}) == 1
    values: list[float | None] = []
    reasons: list[str | None] = []
    parts: list[dict[str, float]] = []
    answers: list[str | None] = []
    for place, sample in enumerate(samples):
        total, answer, reason, components = 0.0, None, sample.failure, dict[str, float]()
        theirs = [(judge, verdicts[judge.name][place]) for judge in judges if judge.judges(sample.data_source)]
        if reason is None and not theirs:
            reason = f"no reward function judges data_source {sample.data_source!r}"
        for judge, verdict in theirs if reason is None else ():
            assert verdict is not None
            result, why = verdict
            if result is None:
                reason = why if alone else f"{judge.name}: {why}"
                break
            total += judge.weight * result.value
            answer = answer if result.answer is None else result.answer
            components |= _parts(judge.name, result, alone, components)
        values.append(total if reason is None else None)
        reasons.append(reason)
        parts.append(components if reason is None else {})
        answers.append(answer if reason is None else None)
    names = dict.fromkeys(name for components in parts for name in components)
    return Scores(
        values=values,
        reasons=reasons,
        components={name: [components.get(name) for components in parts] for name in names},
        answers=answers,
        judged=[sample.failure is None for sample in samples],
        verdicts=verdicts,
    )


def _parts(name: str, result: RewardResult, alone: bool, before: Mapping[str, float]) -> dict[str, float]:
    if alone:
        return dict(result.components)
    named = {name: result.value} | {f"{name}/{part}": value for part, value in result.components.items()}
    if CORRECT in result.components and CORRECT not in before:
        named[CORRECT] = result.components[CORRECT]
    return named


def _shown(place: int, samples: Sequence[Sample]) -> str:
    if place >= len(samples):
        return f"first: sample {place}"
    sample = samples[place]
    return f"first: sample {place}, {sample.prompt_id}: {sample.response[:SHOWN_CHARS]!r}"
