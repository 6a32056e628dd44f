"""The simulation of set-ups that others measured, beside what they published; `published.json` cites each figure.

Nothing is set a figure: the same constants for all. Two inputs that sources leave out are derived, by one rule each: a
mean length from the published seconds of the log-prob pass, or from the fraction of truncated rows.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, log
from pathlib import Path
from typing import Any

from tests.benchmarks.scale.hardware import GPUS, Efficiency
from tests.benchmarks.scale.iteration import Placement, System, simulate
from tests.benchmarks.scale.model import MODELS
from tests.benchmarks.scale.split import best_split
from tests.benchmarks.scale.training import Trainer
from tests.benchmarks.scale.workload import Workload, truncated_workload_mean

FILE = Path(__file__).with_name("published.json")
WORK = (
    "prompts",
    "samples",
    "prompt_tokens",
    "mean_tokens",
    "max_tokens",
    "optimizer_steps",
    "old_logprobs",
    "ref_logprobs",
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One published figure and its simulation."""

    system: str
    url: str
    date: str
    name: str
    gpus: str
    what: str
    """`step`, or the part of one."""
    mean_tokens: float
    published: float
    simulated: float
    assumed: tuple[str, ...]
    interrupted: bool
    """The source does not wait for the longest row."""
    upper_end: bool
    """An input is known as an upper bound only, so that the simulated time is one."""

    @property
    def ratio(self) -> float:
        """Above 1: the simulation is too slow."""
        return self.simulated / self.published


@lru_cache
def read() -> dict[str, Any]:
    return dict(json.loads(FILE.read_text()))


def compare(efficiency: Efficiency) -> list[Comparison]:
    data = read()
    return [each for figure in data["figures"] for each in _compare(figure, data, efficiency)]


def _compare(figure: dict[str, Any], data: dict[str, Any], efficiency: Efficiency) -> list[Comparison]:
    like, source = data["defaults"][figure["like"]], data["sources"][figure["source"]]
    system = make_system({**like, **figure}, efficiency)
    iteration = simulate(system, make_placement(figure, system))
    stages = {"step": iteration.seconds, "rollout": iteration.stages["rollout"], "update": iteration.stages["update"]}
    return [
        Comparison(
            system=source["system"],
            url=source["url"],
            date=source["date"],
            name=figure["name"],
            gpus=f"{figure['gpus']} {figure['gpu']}",
            what=what,
            mean_tokens=system.workload.mean_tokens,
            published=seconds,
            simulated=stages[what],
            assumed=(*like["assumed"], *figure.get("assumed", ())),
            interrupted=figure.get("interrupted", False),
            upper_end="truncated" in like,
        )
        for what, seconds in figure["seconds"].items()
    ]


def make_system(figure: dict[str, Any], efficiency: Efficiency) -> System:
    known = {"mean_tokens": 1.0} | {name: figure[name] for name in WORK if name in figure}
    system = System(
        model=MODELS[figure["model"]],
        gpu=GPUS[figure["gpu"]],
        workload=Workload(**known),
        efficiency=efficiency,
        handover="broadcast",
        row_gpus=figure["row_gpus"],
    )
    if "truncated" in figure:
        mean = truncated_workload_mean(figure["max_tokens"], figure["truncated"], system.workload.spread)
        return replace(system, workload=replace(system.workload, mean_tokens=mean))
    if "mean_from_logprobs" in figure:
        gpus = figure.get("logprob_gpus", figure["gpus"] - figure.get("rollout_gpus", 0))
        return replace(system, workload=_mean_of(system, gpus, figure["mean_from_logprobs"]))
    return system


def make_placement(figure: dict[str, Any], system: System) -> Placement:
    """As published, or the simulation's best where the source does not say."""
    if "tensor_parallel" not in figure:
        best = best_split(
            system, figure["gpus"], figure.get("max_staleness", 0), interrupted=figure.get("interrupted", False)
        )
        assert best is not None
        return best.placement
    apart = "rollout_gpus" in figure
    rollout = figure.get("rollout_gpus", figure["gpus"])
    return Placement(
        rollout_gpus=rollout,
        train_gpus=figure["gpus"] - rollout if apart else rollout,
        tensor_parallel=figure["tensor_parallel"],
        colocated=not apart,
        max_staleness=figure.get("max_staleness", int(apart)),
        interrupted=figure.get("interrupted", False),
    )


def _mean_of(system: System, gpus: int, seconds: float) -> Workload:
    """The workload whose log-prob pass takes so long."""
    trainer = Trainer(
        model=system.model, gpu=system.gpu, efficiency=system.efficiency, gpus=gpus, row_gpus=system.row_gpus
    )
    low, high = 1.0, 0.95 * system.workload.max_tokens
    for _ in range(40):
        middle = replace(system.workload, mean_tokens=(low + high) / 2)
        if trainer.logprob_seconds(middle) < seconds:
            low = middle.mean_tokens
        else:
            high = middle.mean_tokens
    return replace(system.workload, mean_tokens=low)


def steps(found: Sequence[Comparison]) -> list[Comparison]:
    """Whole steps whose inputs are known or inferred, not bounded."""
    return [each for each in found if each.what == "step" and not each.upper_end]


def typical_ratio(found: Sequence[Comparison]) -> tuple[float, float]:
    """Geometric mean of simulated over published, and the factor of one standard deviation."""
    logs = [log(each.ratio) for each in found]
    mean = sum(logs) / len(logs)
    return exp(mean), exp((sum((each - mean) ** 2 for each in logs) / max(1, len(logs) - 1)) ** 0.5)
