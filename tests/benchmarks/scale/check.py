"""Measured runs of this project against the same formulas: machine constants fitted on some runs, others predicted.

A stage's seconds are a sum of few terms, each a quantity of `model.py` times a constant of the machine; constants are
not negative, and fitted by least squares of relative errors. A run that is predicted takes no part in the fit.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np
from scipy.optimize import nnls

from tests.benchmarks.scale.model import Model

FLOAT = 4
SKIPPED = 2
"""First iterations, in which engines and kernels start."""
TERMS = {
    "prompts": ("stage",),
    "rollout": ("stage", "step", "flop", "byte"),
    "reward": ("stage", "row"),
    "old_logprobs": ("stage", "row", "flop"),
    "ref_logprobs": ("stage", "row", "flop"),
    "advantage": ("stage", "row"),
    "update": ("stage", "row", "flop"),
    "weights": ("stage", "byte"),
}
"""What a stage costs: itself, its rows, decoding steps, operations, bytes read or written."""
BETWEEN = "between stages"


class Committed(Protocol):
    """What is used of a `grpo_lib.storage.manifests.Manifest`."""

    @property
    def stage(self) -> str: ...
    @property
    def iteration(self) -> int | None: ...
    @property
    def rows(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def created_ms(self) -> int: ...
    @property
    def summary(self) -> Mapping[str, object]: ...


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A stage of an iteration: its terms' quantities, and the seconds that it took."""

    run: str
    stage: str
    iteration: int
    amounts: dict[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A finished run, as far as the formulas need it."""

    name: str
    model: Model
    prompt_tokens: float
    group: int
    """Rows of a prompt, which engine and trainer compute once for all of them."""
    batch_rows: int
    """Rows the engine decodes at a time."""
    manifests: Sequence[Committed]

    def samples(self) -> list[Sample]:
        """Stages after the first iterations, shards added up; and what lies between them."""
        found: dict[tuple[str, int], list[Committed]] = defaultdict(list)
        for each in self.manifests:
            if each.stage in TERMS and each.iteration is not None and each.iteration >= SKIPPED:
                found[each.stage, each.iteration].append(each)
        samples = [
            Sample(
                run=self.name,
                stage=stage,
                iteration=k,
                amounts=_sum(self.amounts(stage, each) for each in shards),
                seconds=sum(each.seconds for each in shards),
            )
            for (stage, k), shards in found.items()
        ]
        return samples + self._between(samples)

    def amounts(self, stage: str, done: Committed) -> dict[str, float]:
        """Quantities of the terms of a stage, from what its manifest says."""
        model, rows = self.model, max(1, done.rows)
        amounts = {"stage": 1.0, "row": float(rows)}
        if stage == "weights":
            return amounts | {"byte": float(FLOAT * model.parameters)}
        if stage not in ("rollout", "update", "old_logprobs", "ref_logprobs"):
            return amounts
        prompt = round(self.prompt_tokens)
        shared = prompt * (1 - 1 / self.group)  # tokens of a row that another row of its group has computed
        if stage == "update":  # its own rows are optimizer steps; rows without signal are left out
            rows = round(done.rows * float(str(done.summary.get("trained_rows", 0.0))))
            length = float(str(done.summary.get("model_tokens", 0.0))) / max(1, rows) - (prompt - shared)
        else:
            length = done.tokens / rows
        responses = np.full(rows, max(1, round(length)), dtype=np.int64)
        once = 2 * model.body * shared * rows
        if stage == "update":
            flop = model.update_flops(prompt, responses, recompute=False) - 3 * once
            return amounts | {"row": float(rows), "flop": flop}
        flops = model.forward_flops(prompt, responses) - once
        if stage != "rollout":
            return amounts | {"flop": flops}
        batches = -(-rows // self.batch_rows)
        steps = batches * float(str(done.summary.get("length_max", responses[0])))
        cache = FLOAT / 2 * model.kv_bytes() * done.tokens * (prompt + responses[0] / 2)
        read = FLOAT * (model.body + model.head) * steps + cache
        return amounts | {"step": steps, "flop": flops, "byte": read}

    def _between(self, samples: Sequence[Sample]) -> list[Sample]:
        """From the end of an update to that of the next, less the stages of this model: without overlap only."""
        ends = {each.iteration: each.created_ms / 1000 for each in self.manifests if each.stage == "update"}
        bodies: dict[int, float] = defaultdict(float)
        for each in samples:
            bodies[each.iteration] += each.seconds
        found = []
        for k, busy in bodies.items():
            if k in ends and k - 1 in ends and ends[k] - ends[k - 1] > busy:
                seconds = ends[k] - ends[k - 1] - busy
                found.append(Sample(run=self.name, stage=BETWEEN, iteration=k, amounts={"stage": 1.0}, seconds=seconds))
        return found


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Seconds of one unit of each term, by stage."""

    costs: dict[str, dict[str, float]]

    def predict(self, sample: Sample) -> float:
        costs = self.costs[sample.stage]
        return sum(costs[term] * amount for term, amount in sample.amounts.items() if term in costs)


def fit(samples: Sequence[Sample]) -> Machine:
    """The constants with the least squares of relative errors, none negative.

    The iteration of median seconds stands for its run, so that what disturbed some of them does not count.
    """
    costs = {}
    by_stage: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for each in samples:
        if each.seconds > 0:
            by_stage[each.stage][each.run].append(each)
    for stage, runs in sorted(by_stage.items()):
        mine = [sorted(run, key=lambda each: each.seconds)[len(run) // 2] for run in runs.values()]
        terms = TERMS.get(stage, ("stage",))
        rows = np.array([[each.amounts[term] / each.seconds for term in terms] for each in mine])
        scale = np.where(rows.max(axis=0) > 0, rows.max(axis=0), 1.0)  # units differ by fifteen orders of magnitude
        found, _ = nnls(rows / scale, np.ones(len(mine)))
        costs[stage] = dict(zip(terms, (found / scale).tolist(), strict=True))
    return Machine(costs=costs)


@dataclass(frozen=True, kw_only=True)
class Error:
    """A run that took no part in the fit: medians of its iterations."""

    run: str
    stage: str
    """`iteration`: all stages and what lies between."""
    measured: float
    predicted: float

    @property
    def relative(self) -> float:
        return self.predicted / self.measured - 1


def errors(machine: Machine, samples: Iterable[Sample]) -> list[Error]:
    """By run and stage."""
    stages: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    whole: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for each in samples:
        if each.stage in machine.costs:
            pair = (each.seconds, machine.predict(each))
            stages[each.run, each.stage].append(pair)
            whole[each.run, each.iteration].append(pair)
    for (run, _), pairs in whole.items():
        stages[run, "iteration"].append((sum(a for a, _ in pairs), sum(b for _, b in pairs)))
    return [
        Error(run=run, stage=stage, measured=median(a for a, _ in pairs), predicted=median(b for _, b in pairs))
        for (run, stage), pairs in stages.items()
    ]


def leave_one_out(runs: Sequence[MeasuredRun]) -> list[Error]:
    """Each run is predicted from all others."""
    samples = {run.name: run.samples() for run in runs}
    found = []
    for name, mine in samples.items():
        others = [each for other, theirs in samples.items() if other != name for each in theirs]
        found += errors(fit(others), mine)
    return found


def _sum(amounts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for each in amounts:
        for name, value in each.items():
            total[name] += value
    return dict(total)
