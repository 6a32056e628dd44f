"""Runs side by side, from their manifests alone: what differs in their settings, and in what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import fmean, median, stdev
from typing import Any

from grpo_lib.run import Run, flat_settings
from grpo_lib.storage.manifests import Manifest, latest
from grpo_lib.tracking.reports import curve, stage_totals

WINDOW = 10
"""Last iterations that the reward and the length of a run are the mean of."""
LEFT_OUT = ("name", "store.", "tracking.")
"""Settings that change nothing in what a run does."""
MODES = ("sampled", "greedy")
CURVES = {
    "Held-out accuracy, sampled": ("evaluate", "sampled_accuracy"),
    "Held-out accuracy, greedy": ("evaluate", "greedy_accuracy"),
    "Mean reward of the rollouts": ("reward", "mean"),
    "Mean response length (tokens)": ("rollout", "length_mean"),
    "Mean -log p of sampled tokens (nats)": ("rollout", "surprise"),
    "Mean of old - new log-probs": ("update", "approx_kl"),
}
"""By title: stage and name in its summaries."""
ERRORS = "_se"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A number with its standard error."""

    value: float
    error: float
    """0: unknown."""
    iteration: int
    """After so many updates; of a mean the last that is in it."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve of a run."""

    iterations: list[int]
    values: list[float]
    errors: list[float]
    """Standard errors; empty: unknown."""


@dataclass(frozen=True, kw_only=True)
class RunResults:
    """What came of one run."""

    run: str
    place: str
    iterations: int
    """Done."""
    asked: int
    """Iterations that it was to do."""
    final: dict[str, Measured]
    """Held-out accuracy of the last evaluation, by mode; without evaluations empty."""
    best: dict[str, Measured]
    reward: Measured | None
    """Mean over the last ``WINDOW`` iterations."""
    length: Measured | None
    """Of a response, in tokens, likewise."""
    tokens: int
    """Of all rollouts."""
    tokens_per_second: float | None
    """While rollouts were generated."""
    seconds_per_iteration: float | None
    """Median from the end of an update to the end of the next, of what the run computed itself."""
    seconds: dict[str, float]
    """By stage, what was adopted included."""
    curves: dict[str, Line]
    """By title, see ``CURVES``."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several runs."""

    settings: dict[str, list[Any]]
    """Those that differ, by dotted name: one value a run, in order; None where a run has no such setting."""
    runs: list[RunResults]


def compare(runs: Sequence[Run]) -> Comparison:
    """In the order given."""
    return Comparison(settings=different_settings(runs), runs=[results_of(run) for run in runs])


def different_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Settings in which not all runs are equal."""
    settings = [flat_settings(run.config) for run in runs]
    names = sorted({name for each in settings for name in each if not name.startswith(LEFT_OUT)})
    values = {name: [each.get(name) for each in settings] for name in names}
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def results_of(run: Run) -> RunResults:
    """Of one run."""
    manifests = run.manifests()
    rollouts = [each for each in manifests if each.stage == "rollout"]
    tokens, seconds = sum(each.tokens for each in rollouts), sum(each.seconds for each in rollouts)
    lines = {title: _line(manifests, *where) for title, where in CURVES.items()}
    judged = {mode: _line(manifests, "evaluate", f"{mode}_accuracy") for mode in MODES}
    judged = {mode: line for mode, line in judged.items() if line.values}
    return RunResults(
        run=run.name,
        place=run.place,
        iterations=len(latest(manifests, "update")),
        asked=run.config.iterations,
        final={mode: _at(line, len(line.values) - 1) for mode, line in judged.items()},
        best={mode: _at(line, line.values.index(max(line.values))) for mode, line in judged.items()},
        reward=_mean_of_last(_line(manifests, "reward", "mean")),
        length=_mean_of_last(_line(manifests, "rollout", "length_mean")),
        tokens=tokens,
        tokens_per_second=tokens / seconds if seconds > 0 else None,
        seconds_per_iteration=_seconds_per_iteration(manifests),
        seconds={each.stage: each.seconds for each in stage_totals(manifests)},
        curves={title: line for title, line in lines.items() if line.values},
    )


def _line(manifests: Sequence[Manifest], stage: str, name: str) -> Line:
    iterations, values = curve(manifests, stage, name)
    _, errors = curve(manifests, stage, f"{name}{ERRORS}")
    return Line(iterations=iterations, values=values, errors=errors if len(errors) == len(values) else [])


def _at(line: Line, place: int) -> Measured:
    error = line.errors[place] if line.errors else 0.0
    return Measured(value=line.values[place], error=error, iteration=line.iterations[place])


def _mean_of_last(line: Line) -> Measured | None:
    """The standard error is that of a mean of independent iterations."""
    if not line.values:
        return None
    last = line.values[-WINDOW:]
    error = stdev(last) / sqrt(len(last)) if len(last) > 1 else 0.0
    return Measured(value=fmean(last), error=error, iteration=line.iterations[-1])


def _seconds_per_iteration(manifests: Sequence[Manifest]) -> float | None:
    own = [each.created_ms / 1000 for each in latest(manifests, "update") if each.adopted_from is None]
    return median(after - before for before, after in pairwise(own)) if len(own) > 1 else None
