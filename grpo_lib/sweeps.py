"""Sweeps: which runs a grid or random settings ask for, and which of them are hopeless."""

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from grpo_lib.config import RunConfig
from grpo_lib.config_base import RunName, Section
from grpo_lib.config_files import make_config
from grpo_lib.errors import ConfigError

NOT_SWEPT = ("name", "store", "tracking", "branch")
"""Settings that are no part of what a sweep compares."""
MOST = 1000
"""Runs of a sweep."""
Metric = Literal["sampled_accuracy", "greedy_accuracy", "reward"]


class Range(Section):
    """Numbers that random settings are drawn from."""

    low: float = Field(description="Smallest.")
    high: float = Field(description="Largest.")
    log: bool = Field(False, description="Even over the logarithms: for rates and coefficients.")
    integer: bool = Field(False, description="Whole numbers, both ends included.")

    @model_validator(mode="after")
    def _is_a_range(self) -> "Range":
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} must be below high={self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"low={self.low:g}: the logarithm needs a number above 0")
        return self

    def draw(self, source: random.Random) -> float | int:
        """One number."""
        low, high = self.low - 0.5 * self.integer, self.high + 0.5 * self.integer
        if self.log:
            value = math.exp(source.uniform(math.log(max(low, 1e-300)), math.log(high)))
        else:
            value = source.uniform(low, high)
        return int(min(max(round(value), self.low), self.high)) if self.integer else value


class SweepConfig(Section):
    """What is compared, and how."""

    name: RunName = Field(description="Name of the sweep; its runs are NAME-00, NAME-01 and so on.")
    grid: dict[str, list[JsonValue]] = Field(
        {}, description="Values by setting, e.g. {rollout.samples: [4, 8]}: every combination is a run."
    )
    random: dict[str, Range | list[JsonValue]] = Field(
        {},
        description="By setting a range or a list that each run draws from: {trainer.optimizer.lr: {low, high, log}}.",
    )
    draws: int = Field(8, ge=1, le=MOST, description="Of random settings, for each combination of the grid.")
    seed: int = Field(0, ge=0, description="Of the draws; the runs themselves have their own.")
    metric: Metric = Field(
        "sampled_accuracy", description="What the best run has most of: held-out accuracy, or mean reward in training."
    )
    parallel: int = Field(1, ge=1, le=64, description="Runs at a time.")
    hopeless_after: int | None = Field(
        None,
        ge=1,
        description="From this iteration on a run is stopped when the best it ever had is below what half of at least "
        "three others had on average by then; null: never.",
    )

    @field_validator("grid", "random")
    @classmethod
    def _has_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        for key, each in values.items():
            if each == []:
                raise ValueError(f"{key}: no values; name some, or leave it out")
            if key.partition(".")[0] in NOT_SWEPT:
                raise ValueError(f"{key} can't be swept: it changes nothing in what a run does")
        return values

    @model_validator(mode="after")
    def _asks_for_something(self) -> "SweepConfig":
        if not self.grid and not self.random:
            raise ValueError("grid and random are empty: name a setting and its values")
        both = self.grid.keys() & self.random.keys()
        if both:
            raise ValueError(f"{', '.join(sorted(both))} stands in grid and in random; choose one")
        if self.metric == "reward" and any(key.startswith("reward.") for key in (*self.grid, *self.random)):
            raise ValueError("metric=reward can't compare runs with other rewards; use an accuracy")
        count = math.prod(len(each) for each in self.grid.values()) * (self.draws if self.random else 1)
        if count > MOST:
            raise ValueError(f"these are {count} runs, at most {MOST} can be; leave some values out")
        return self


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a sweep."""

    name: str
    settings: dict[str, Any]
    """Those that the sweep varies, by dotted name."""
    config: RunConfig


def trials(base: RunConfig, sweep: SweepConfig) -> list[Trial]:
    """All runs of a sweep, with settings checked; the same ones for the same arguments.

    Raises:
        ConfigError: a setting that can't be, or a metric that is not measured.
    """
    source = random.Random(sweep.seed)
    asked: list[dict[str, Any]] = []
    for values in itertools.product(*sweep.grid.values()):
        fixed = dict(zip(sweep.grid, values, strict=True))
        for _ in range(sweep.draws if sweep.random else 1):
            settings = fixed | {key: _drawn(each, source) for key, each in sweep.random.items()}
            if settings not in asked:
                asked.append(settings)
    width = max(2, len(str(len(asked) - 1)))
    return [_trial(base, sweep, f"{sweep.name}-{place:0{width}d}", settings) for place, settings in enumerate(asked)]


def _drawn(source_of: Range | list[Any], source: random.Random) -> Any:
    return source_of.draw(source) if isinstance(source_of, Range) else source.choice(source_of)


def _trial(base: RunConfig, sweep: SweepConfig, name: str, settings: dict[str, Any]) -> Trial:
    values = base.model_dump(mode="json", exclude_unset=True)
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    overrides += [f"name={json.dumps(name)}", f"tracking.sweep={json.dumps(sweep.name)}"]
    config = make_config(values, overrides, origin=f"run {name} ({shown(settings)})")
    _check_metric(config, sweep.metric)
    return Trial(name=name, settings=settings, config=config)


def _check_metric(config: RunConfig, metric: Metric) -> None:
    judged = config.evaluation
    if metric == "sampled_accuracy" and not judged.samples:
        raise ConfigError(f"run {config.name}: metric={metric}, but evaluation.samples=0: set that, or another metric")
    if metric == "greedy_accuracy" and not judged.greedy:
        raise ConfigError(
            f"run {config.name}: metric={metric}, but evaluation.greedy=false: set that, or another metric"
        )


def preflight_of(asked: Sequence[Trial]) -> list[RunConfig]:
    """One configuration of each kind that what is around a run (models, files, rewards, services) depends on."""
    kinds: dict[str, RunConfig] = {}
    for each in asked:
        values = each.config.model_dump(mode="json", exclude={"name", "seed", "iterations"})
        kinds.setdefault(json.dumps(values, sort_keys=True), each.config)
    return list(kinds.values())


def shown(settings: Mapping[str, Any]) -> str:
    """For people.

    >>> shown({"trainer.optimizer.lr": 0.000123456, "rollout.samples": 8})
    'trainer.optimizer.lr=0.000123456, rollout.samples=8'
    """
    return ", ".join(
        f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}" for key, value in settings.items()
    )


Curve = Sequence[tuple[int, float]]
"""Iterations done and the metric then."""
ENOUGH = 3
"""Others that must have come as far."""


def is_hopeless(own: Curve, others: Sequence[Curve], after: int) -> bool:
    """The median stopping rule: whether the best of ``own`` so far is below the median of the others' means up to there
    (Golovin et al. 2017, Google Vizier, section 3.2.2).

    >>> steady = [(10, 0.4), (20, 0.6)]
    >>> is_hopeless([(10, 0.1), (20, 0.2)], [steady] * 3, after=20), is_hopeless([(10, 0.5)], [steady] * 3, after=10)
    (True, False)
    """
    if not own or own[-1][0] < after:
        return False
    reached = own[-1][0]
    there = [curve for curve in others if curve and curve[-1][0] >= reached]
    if len(there) < ENOUGH:
        return False
    means = [fmean(value for iteration, value in curve if iteration <= reached) for curve in there]
    return max(value for _, value in own) < median(means)
