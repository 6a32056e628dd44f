"""Rollouts ahead of training: iterations a second with one rollout worker and one train worker, each on a core.

    grpo up --detach
    python tests/benchmarks/overlap.py --address HOST:PORT [--iterations 12] [--rounds 2] [prompts, shards ... settings]

Runs of max_staleness 0 and 1 alternate; the first iterations, in which engines start, do not count. Both have the same
settings, stages of about equal length, and a warm start that is made once. Prints a Markdown table.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import psutil

from grpo_lib.config import RunConfig
from grpo_lib.config_files import load_config
from grpo_lib.placement.ray_connection import statuses
from grpo_lib.run import Run
from grpo_lib.storage.manifests import Manifest, latest
from grpo_lib.tracking.reports import seconds_between_stages

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "deployments" / "configs" / "demo.yaml"
SETTINGS = (
    "algorithm.rollout_correction.preset=decoupled_token_is", "algorithm.old_logprobs=decoupled",
    "placement.kind=ray", "warm_start.steps=200", "evaluation.every=1000", "evaluation.prompts=16",
    "checkpoint.every=1000", "evaluation.samples=0", "evaluation.pass_k=[1]",
    "trainer.optimizer.schedule=constant", "trainer.optimizer.warmup_steps=0",
)  # fmt: skip
SKIPPED = 3


def pin(address: str) -> None:
    """The rollout worker to the first core, the train worker to the second, with all their threads."""
    for each in statuses(address):
        core = {"rollout": 0, "train": 1}.get(each.role)
        if core is None or not each.pid:
            continue
        for thread in psutil.Process(each.pid).threads():
            os.sched_setaffinity(thread.id, {core})


def train(config: RunConfig) -> list[Manifest]:
    from flows.train import train as flow

    flow(config)
    return Run(config).stages.manifests()


def seconds_per_iteration(manifests: list[Manifest]) -> float:
    ends = [each.created_ms / 1000 for each in latest(manifests, "update")][SKIPPED:]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def stage_seconds(manifests: list[Manifest], *stages: str) -> float:
    """Of one iteration, median."""
    by_iteration: dict[int, float] = {}
    for each in manifests:
        if each.stage in stages and each.iteration is not None and each.iteration >= SKIPPED:
            by_iteration[each.iteration] = by_iteration.get(each.iteration, 0.0) + each.seconds
    return statistics.median(by_iteration.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("settings", nargs="*")
    asked = parser.parse_args()
    found: dict[int, list[float]] = {0: [], 1: []}
    rows = []
    with tempfile.TemporaryDirectory() as store:
        common = [*SETTINGS, f"placement.ray.address={asked.address}", f"store.uri={store}", *asked.settings]
        train(load_config(CONFIG, [*common, "name=warm", "iterations=1"]))  # workers start, the warm start is made
        pin(asked.address)
        for number in range(asked.rounds):
            for staleness in (0, 1):
                given = [*common, f"iterations={asked.iterations}", f"pipeline.max_staleness={staleness}"]
                # Another seed, so that no run adopts what another generated; the warm start is a reused artifact.
                manifests = train(load_config(CONFIG, [*given, f"name=s{staleness}-{number}", f"seed={number}"]))
                found[staleness].append(seconds_per_iteration(manifests))
                learn = stage_seconds(manifests, "old_logprobs", "update", "weights")
                between = seconds_between_stages(manifests) or 0.0
                rows.append(
                    f"| {staleness} | {number} | {found[staleness][-1]:.2f} | "
                    f"{stage_seconds(manifests, 'rollout'):.2f} | {learn:.2f} | {1000 * between:.0f} |"
                )
                print(rows[-1], flush=True)
    print("\n| max_staleness | round | s an iteration | rollouts (s) | training stages (s) | between (ms) |")
    print("|---|---|---|---|---|---|")
    print("\n".join(rows))
    ratios = [a / b for a, b in zip(found[0], found[1], strict=True)]
    print(f"\niterations a second, 1 over 0: {', '.join(f'{each:.2f}' for each in ratios)}")


if __name__ == "__main__":
    main()
