"""What is predicted: models, numbers of GPUs, a workload, and the project as it is and as it could be."""

from dataclasses import dataclass, replace

from tests.benchmarks.scale.hardware import GPUS, Efficiency, Host
from tests.benchmarks.scale.iteration import System
from tests.benchmarks.scale.model import MODELS
from tests.benchmarks.scale.split import Split, best_split
from tests.benchmarks.scale.workload import Workload

SIZES = (8, 16, 32, 64, 128, 256, 512)
PREDICTED = ("llama-8b", "llama-70b")
WORK = Workload(prompts=256, samples=16, prompt_tokens=256, mean_tokens=2048, max_tokens=8192, optimizer_steps=4)
"""4,096 responses, 8.4 million tokens: reasoning of medium length."""
STREAMS = 16
SCENARIOS = ("today", "parallel", "interrupted")
"""`today`: the trainer's ranks on one machine, one stream of hashes and writes. `parallel`: ranks on any number of
machines, and each policy hashed and written in 16 streams. `interrupted`: that, and with overlap a new policy goes on
with rollouts instead of waiting for the longest."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    model: str
    scenario: str
    gpus: int
    max_staleness: int
    best: Split | None
    """None: it does not fit."""


def make_system(model: str, scenario: str, gpu: str = "H100") -> System:
    assert scenario in SCENARIOS
    if scenario == "today":
        return System(model=MODELS[model], gpu=GPUS[gpu], workload=WORK, max_train_gpus=GPUS[gpu].per_machine)
    return System(model=MODELS[model], gpu=GPUS[gpu], workload=WORK, host=Host(streams=STREAMS))


def predict(gpu: str = "H100") -> list[Prediction]:
    return [
        Prediction(
            model=model,
            scenario=scenario,
            gpus=gpus,
            max_staleness=staleness,
            best=best_split(make_system(model, scenario, gpu), gpus, staleness, interrupted=scenario == "interrupted"),
        )
        for model in PREDICTED
        for scenario in SCENARIOS
        for gpus in SIZES
        for staleness in (0, 1)
        if staleness or scenario != "interrupted"
    ]


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The best split's seconds where one assumption is another."""

    model: str
    gpus: int
    what: str
    low: float
    high: float
    """Seconds at either end of the range."""
    base: float


def sensitivities(model: str, gpus: int) -> list[Sensitivity]:
    """Of scenario `parallel` with overlap; each range is what could be, not a standard deviation."""
    system = make_system(model, "parallel")
    reached, work, host, store = Efficiency(), WORK, system.host, system.store

    def seconds(changed: System) -> float:
        best = best_split(changed, gpus, 1)
        return float("inf") if best is None else best.iteration.seconds

    def efficiency(name: str, value: float) -> System:
        return replace(system, efficiency=replace(reached, **{name: value}))

    def lengths(mean: float = work.mean_tokens, spread: float = work.spread) -> System:
        return replace(system, workload=replace(work, mean_tokens=mean, spread=spread))

    ranges = {
        "matmul 0.5 to 0.3 of peak": (efficiency("matmul", 0.5), efficiency("matmul", 0.3)),
        "memory bandwidth 0.85 to 0.5": (efficiency("bandwidth", 0.85), efficiency("bandwidth", 0.5)),
        "links 0.9 to 0.4": (efficiency("link", 0.9), efficiency("link", 0.4)),
        "decoding step +1 to +6 ms": (efficiency("step_seconds", 1e-3), efficiency("step_seconds", 6e-3)),
        "all-reduce 10 to 50 µs": (efficiency("all_reduce_seconds", 10e-6), efficiency("all_reduce_seconds", 50e-6)),
        "spread of lengths 0.4 to 1.2": (lengths(spread=0.4), lengths(spread=1.2)),
        "mean length 1,024 to 4,096": (lengths(mean=1024), lengths(mean=4096)),
        "sha256 2.0 to 0.5 GB/s": tuple(replace(system, host=replace(host, hash_rate=each)) for each in (2e9, 0.5e9)),
        "store 12.5 to 1 GB/s": (system, replace(system, store=replace(store, rate=1e9))),
        "store's latency 50 to 500 ms": tuple(
            replace(system, store=replace(store, latency=each)) for each in (0.05, 0.5)
        ),
    }
    base = seconds(system)
    return [
        Sensitivity(model=model, gpus=gpus, what=what, low=seconds(low), high=seconds(high), base=base)
        for what, (low, high) in ranges.items()
    ]
