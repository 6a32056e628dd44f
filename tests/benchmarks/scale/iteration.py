"""Seconds of an iteration of the workflow, stage by stage, for one way of placing it."""

from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from tests.benchmarks.scale.hardware import Efficiency, Gpu, Host, ObjectStore
from tests.benchmarks.scale.model import HALF, Model
from tests.benchmarks.scale.rollout import Engine, interrupted_seconds, rollout_seconds
from tests.benchmarks.scale.training import FLOAT, Trainer
from tests.benchmarks.scale.workload import Workload

ROLLOUT_BYTES, LOGPROB_BYTES, ADVANTAGE_BYTES = 13, 8, 13
"""Of a response token in the stages' columns: id, log-prob, mask and text; log-prob and entropy; advantage, return,
weight and mask."""
TASKS = 7
"""Of an iteration, beside shards: prompts, old and reference log-probs, advantage, update, weights, publish."""
SHARD_TASKS = 2
"""`rollout` and `reward`."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which GPUs do what. Colocated: all do both, in turn."""

    rollout_gpus: int
    train_gpus: int
    tensor_parallel: int
    colocated: bool = False
    max_staleness: float = 0
    interrupted: bool = False
    """A new policy interrupts rollouts and goes on with them, as in AReaL; this project waits."""

    @property
    def gpus(self) -> int:
        return self.rollout_gpus if self.colocated else self.rollout_gpus + self.train_gpus

    @property
    def engines(self) -> int:
        return self.rollout_gpus // self.tensor_parallel


@dataclass(frozen=True, kw_only=True)
class System:
    """What is the same for all placements that are compared."""

    model: Model
    gpu: Gpu
    workload: Workload
    efficiency: Efficiency = field(default_factory=Efficiency)
    host: Host = field(default_factory=Host)
    store: ObjectStore = field(default_factory=ObjectStore)
    handover: Literal["store", "broadcast"] = "store"
    """`store`: this project. `broadcast`: GPU to GPU, and neither datasets nor digests, as other systems do it."""
    max_train_gpus: int | None = None
    """None: as many as there are."""
    row_gpus: int = 1
    """See `Trainer`."""


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """Seconds a stage, reading its inputs and committing included."""

    stages: dict[str, float]
    seconds: float
    """Of the whole; less than the sum with overlap."""

    def share(self, stage: str) -> float:
        """Of the sum of all stages."""
        return self.stages[stage] / sum(self.stages.values())


def simulate(system: System, placement: Placement) -> Iteration:
    """One iteration in the steady state. Infinite seconds: it does not fit into the GPUs' memory."""
    work, host = system.workload, system.host
    train_gpus = placement.rollout_gpus if placement.colocated else placement.train_gpus
    trainer = Trainer(
        model=system.model, gpu=system.gpu, efficiency=system.efficiency, gpus=train_gpus, row_gpus=system.row_gpus
    )
    engine = Engine(
        model=system.model,
        gpu=system.gpu,
        efficiency=system.efficiency,
        tensor_parallel=placement.tensor_parallel,
        reserved=trainer.state_bytes if placement.colocated else 0.0,
    )
    shards = ceil(placement.rollout_gpus / system.gpu.per_machine)
    given, taken = handover_seconds(system, placement.colocated, train_gpus + placement.rollout_gpus)
    if placement.interrupted:
        generating = interrupted_seconds(engine, work, placement.engines, placement.max_staleness)
    else:
        generating = rollout_seconds(engine, work, placement.engines)
    stages = {
        "load weights": taken,
        "rollout": generating + commit_seconds(system, ROLLOUT_BYTES, shards),
        "reward": work.rows / shards * host.reward_seconds + commit_seconds(system, 0),
        "log-probs": 0.0,
        "advantage": work.tokens * host.advantage_seconds + commit_seconds(system, ADVANTAGE_BYTES),
        "update": trainer.update_seconds(work) + commit_seconds(system, 0),
        "hand over weights": given,
        "workflow": 0.0 if system.handover == "broadcast" else host.task_seconds * (TASKS + SHARD_TASKS * shards),
    }
    passes = work.old_logprobs + work.ref_logprobs
    if passes:
        stages["log-probs"] = passes * trainer.logprob_seconds(work) + commit_seconds(system, LOGPROB_BYTES)
    if not trainer.fits:
        return Iteration(stages=stages, seconds=float("inf"))
    if placement.colocated or placement.max_staleness == 0:
        return Iteration(stages=stages, seconds=sum(stages.values()))
    ahead = sum(stages[each] for each in ("load weights", "rollout", "reward"))
    learning = sum(stages[each] for each in ("log-probs", "advantage", "update", "hand over weights"))
    return Iteration(stages=stages, seconds=max(ahead, learning) + host.unhidden * stages["workflow"])


def commit_seconds(system: System, bytes_per_token: int, shards: int = 1) -> float:
    """Of reading a stage's inputs and committing its dataset, which is hashed on its way."""
    if system.handover == "broadcast":
        return 0.0
    size = bytes_per_token * system.workload.rows * system.workload.mean_tokens / shards
    store = system.store
    return store.commit_requests * store.latency + size * (1 / system.host.hash_rate + 1 / store.rate)


def handover_seconds(system: System, colocated: bool, gpus: int) -> tuple[float, float]:
    """Of a policy from trainer to engines: what the trainer spends on it, and what the engines do.

    `store`, as the code does it: `update` takes the digest of the float32 weights; `weights` gathers them on one rank,
    writes them in bfloat16, takes the digest of that, hashes the files and uploads; engines download, check and load,
    with a digest beside it.
    """
    parameters, host, store = system.model.parameters, system.host, system.store
    half, full = HALF * parameters, FLOAT * parameters
    if system.handover == "broadcast":
        at = system.gpu.collective_bandwidth(gpus) * system.efficiency.link
        return 0.0, half / at
    hashing, digesting, writing = (each * host.streams for each in (host.hash_rate, host.digest_rate, host.write_rate))
    given = full / host.pcie + (full + half) / digesting + half / writing
    if colocated:  # through a file in memory
        return given, half / host.pcie
    given += half / hashing + half / store.rate + store.commit_requests * store.latency
    return given, store.commit_requests * store.latency + half / store.rate + half / hashing + half / host.pcie
