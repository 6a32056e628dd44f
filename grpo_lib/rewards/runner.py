"""Runs reward functions over samples and adds them up; what they can't score is a null with a reason, never a 0."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grpo_lib.errors import RewardError
from grpo_lib.rewards.judge_pool import JudgePool
from grpo_lib.rewards.judges import Judge, Reward
from grpo_lib.rewards.verdicts import NoReward, Verdict, each_verdict, failed, verdict_of
from grpo_lib.types import CORRECT, Sample

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
    """Named parts of the reward; null where a sample has none. What was spent is there without a reward, too."""
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
    digests: Sequence[str] = (),
) -> Scores:
    """Scores every sample; ``on_progress`` is called with the number of samples done.

    ``digests`` (`digest_of` each sample) say what of ``known`` is theirs.

    A value is null where a function raises, takes too long, ends its process, or returns ``None``, NaN, an infinity or
    another type; so it is where one of the components is not a finite number. A sample whose rollout failed is null for
    that reason, one that no function judges for that.
    """
    asked = [place for place, sample in enumerate(samples) if sample.failure is None]
    verdicts: dict[str, list[Verdict | None]] = {}
    progress = _Progress(len(reward.judges), on_progress)
    allowed = reward.settings.max_failed * len(asked)
    lost = set[int]()
    for judge in reward.judges:
        fresh = [place for place in asked if judge.judges(samples[place].data_source)]
        found = verdicts.setdefault(judge.name, [None] * len(samples))
        if known:
            for place in fresh:
                found[place] = known.get((judge.digest, digests[place]))
            fresh = [place for place in fresh if found[place] is None]
        progress.more(len(samples) - len(fresh))
        made: list[Verdict] = [NoReward(NOT_JUDGED) for _ in fresh]
        if len(lost) <= allowed:
            made = _judged([samples[place] for place in fresh], judge, reward, allowed, progress.one)
        for place, verdict in zip(fresh, made, strict=True):
            found[place] = verdict
            if isinstance(verdict, NoReward):
                lost.add(place)
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
    counts = Counter(reasons)
    waiting = counts.pop(NOT_JUDGED, 0)
    commonest = [
        f"{count} x {reason} ({_shown(scores.reasons.index(reason), samples)})"
        for reason, count in counts.most_common(3)
    ]
    after = f" and {waiting} were not judged any more" if waiting else ""
    fraction = (failed - waiting) / total
    raise RewardError(
        f"{failed - waiting} of {total} rewards failed ({fraction:.1%}){after}, "
        f"reward.max_failed={max_failed:g} allows {max_failed:.1%}: {'; '.join(commonest)}. "
        "Fix the reward function, or raise reward.max_failed"
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
        self.one = (lambda: self.more(1)) if told is not None else (lambda: None)

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
        return [verdict or NoReward(NOT_JUDGED) for verdict in pool.judge(samples, done)]
    if judge.kind == "samples":
        return _all_at_once(samples, judge, done)
    verdicts: list[Verdict] = []
    function = judge.function
    for sample in samples:
        try:
            verdicts.append(verdict_of(function(sample), len(sample.response_ids), len(sample.response)))
        except Exception as error:
            verdicts.append(failed(error))
        done()
    return verdicts


def _all_at_once(samples: Sequence[Sample], judge: Judge, done: Callable[[], None]) -> list[Verdict]:
    try:
        verdicts = each_verdict(judge.function(samples), samples)
    except Exception as error:
        verdicts = [failed(error) for _ in samples]
    for _ in samples:
        done()
    return verdicts


def _added_up(samples: Sequence[Sample], judges: Sequence[Judge], verdicts: dict[str, list[Verdict | None]]) -> Scores:
    """The weighted sum over the functions; with several each one's value and parts are components by its name."""
    alone = len({judge.name for judge in judges}) == 1
    count = len(samples)
    totals, asked = [0.0] * count, [False] * count
    reasons = [sample.failure for sample in samples]
    answers: list[str | None] = [None] * count
    parts, spent = _Columns(count), _Columns(count)
    for judge in judges:
        prefix = "" if alone else f"{judge.name}/"
        for place, verdict in enumerate(verdicts[judge.name]):
            if verdict is None or not judge.judges(samples[place].data_source):
                continue
            asked[place] = True
            if verdict.spent:
                spent.put(place, verdict.spent, prefix)
            if isinstance(verdict, NoReward):
                named = verdict.reason if alone or verdict.reason == NOT_JUDGED else f"{judge.name}: {verdict.reason}"
                reasons[place] = reasons[place] or named
                continue
            totals[place] += judge.weight * verdict.value
            if answers[place] is None:
                answers[place] = verdict.answer
            if not alone:
                first = CORRECT in verdict.components and not parts.has(place, CORRECT)
                own = {CORRECT: verdict.components[CORRECT]} if first else {}
                parts.put(place, {judge.name: verdict.value} | own)
            parts.put(place, verdict.components, prefix)
    for place, sample in enumerate(samples):
        if not asked[place] and reasons[place] is None:
            reasons[place] = f"no reward function judges data_source {sample.data_source!r}"
    lost = [place for place, reason in enumerate(reasons) if reason is not None]
    for place in lost:
        answers[place] = None
    return Scores(
        values=[value if reason is None else None for value, reason in zip(totals, reasons, strict=True)],
        reasons=reasons,
        components=parts.without(lost) | spent.lists,
        answers=answers,
        judged=[sample.failure is None for sample in samples],
        verdicts=verdicts,
    )


class _Columns:
    """Numbers by name, a list with an entry for each sample."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.lists: dict[str, list[float | None]] = {}

    def put(self, place: int, numbers: Mapping[str, float], prefix: str = "") -> None:
        for name, number in numbers.items():
            name = prefix + name
            if name not in self.lists:
                self.lists[name] = [None] * self._count
            self.lists[name][place] = number

    def has(self, place: int, name: str) -> bool:
        return name in self.lists and self.lists[name][place] is not None

    def without(self, places: Sequence[int]) -> dict[str, list[float | None]]:
        """Nothing at these places, and no list that has nothing else."""
        for column in self.lists.values():
            for place in places:
                column[place] = None
        return {name: column for name, column in self.lists.items() if any(each is not None for each in column)}


def _shown(place: int, samples: Sequence[Sample]) -> str:
    if place >= len(samples):
        return f"first: sample {place}"
    sample = samples[place]
    return f"first: sample {place}, {sample.prompt_id}: {sample.response[:SHOWN_CHARS]!r}"
