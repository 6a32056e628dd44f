"""Benchmarks: ratios measured side by side in one run, one core. `make bench` or `python tests/benchmarks/run.py`.

The algorithms alone, with fewer rows: `python tests/benchmarks/algorithms.py --rows 50000 gae "loss ppo_clip"`.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import torch
from algorithms import algorithms
from generation import generation
from head import head
from rewards import rewards
from sandbox import sandbox
from trainer import trainer

from grpo_lib.config import StoreConfig
from grpo_lib.config_files import make_config
from grpo_lib.storage.objects import open_store
from grpo_lib.storage.stages import StageSpec, StageStore, stage_key

ROUNDS = 3


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def interleaved(first: Callable[[], object], second: Callable[[], object], rounds: int = ROUNDS) -> tuple[float, float]:
    """Medians of A B A B ..., after one round that does not count."""
    first(), second()
    pairs = [(seconds(first), seconds(second)) for _ in range(rounds)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def commits() -> None:
    """A stage commit of a small table (128 rows of 50 tokens) against writing the same file and nothing else."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        config = make_config({"data": {"problem": "countdown"}, "warm_start": {}, "store": {"uri": folder}})
        stages = StageStore(open_store(StoreConfig(uri=folder)), "bench")
        spec = StageSpec(name="rollout", version=1, reads=("rollout",))
        table = pa.table({"ids": pa.array([list(range(50))] * 128, type=pa.list_(pa.int32()))})
        counter = iter(range(10**6))

        def commit() -> None:
            iteration = next(counter)
            key = stage_key(spec, config, [], iteration)
            with stages.attempt(spec, config, key, [], iteration) as attempt:
                attempt.write_table(table)
                attempt.commit()

        def bare() -> None:
            with pa.ipc.new_file(str(Path(folder) / f"{next(counter)}.arrow"), table.schema) as writer:
                writer.write_table(table)

        a, b = interleaved(commit, bare, rounds=50)
        print(f"commit of a small stage: {1000 * a:.1f} ms (write, sha256, fsync, manifest, index); "
              f"the bare file {1000 * b:.1f} ms")  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    generation()
    commits()
    trainer()
    head()
    algorithms()
    rewards()
    sandbox()
    print("seconds an iteration outside stage bodies: `make demo`, then `grpo show RUN`")


if __name__ == "__main__":
    main()
