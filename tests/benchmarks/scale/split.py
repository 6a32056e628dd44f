"""The best placement of an iteration on a number of GPUs: every split that fits is simulated."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.benchmarks.scale.iteration import Iteration, Placement, System, simulate

TENSOR_PARALLEL = (1, 2, 4, 8)
SPLITS = 32
"""Steps in which the trainer's part is tried."""


@dataclass(frozen=True, kw_only=True)
class Split:
    placement: Placement
    iteration: Iteration


def placements(system: System, gpus: int, max_staleness: float, interrupted: bool = False) -> Iterator[Placement]:
    """Each uses all GPUs. Overlap needs the halves apart."""
    limit = gpus if system.max_train_gpus is None else min(gpus, system.max_train_gpus)
    for tensor_parallel in TENSOR_PARALLEL:
        if max_staleness == 0 and gpus <= limit and gpus % tensor_parallel == 0:
            yield Placement(rollout_gpus=gpus, train_gpus=gpus, tensor_parallel=tensor_parallel, colocated=True)
        most = min(limit, gpus - 1)
        step = max(1, (most + 1) // SPLITS)
        for train in range(step, most + 1, step):
            if (gpus - train) % tensor_parallel == 0:
                yield Placement(
                    rollout_gpus=gpus - train,
                    train_gpus=train,
                    tensor_parallel=tensor_parallel,
                    max_staleness=max_staleness,
                    interrupted=interrupted,
                )


def best_split(system: System, gpus: int, max_staleness: float, interrupted: bool = False) -> Split | None:
    """The fastest; None: nothing fits."""
    found = [
        Split(placement=each, iteration=simulate(system, each))
        for each in placements(system, gpus, max_staleness, interrupted)
    ]
    fastest = min(found, key=lambda each: each.iteration.seconds, default=None)
    return None if fastest is None or fastest.iteration.seconds == float("inf") else fastest
