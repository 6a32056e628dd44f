"""A thousand iterations of stages that do next to nothing: memory and seconds an iteration stay flat.

    python tests/benchmarks/endurance.py [--iterations 1000] [--address HOST:PORT]

With an address the stages run on workers of that cluster. Prints a row for each tenth of the run, and the change of
memory and seconds from the second tenth to the last. Beside each iteration stands a fixed piece of work, so that a
machine that gets slower is not taken for a run that does.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from grpo_lib.config_files import make_config  # noqa: E402
from grpo_lib.progress import Silent, show_progress_on  # noqa: E402
from tests.flows.tiny import TINY  # noqa: E402

PARTS = 10


def fixed_work() -> float:
    """Seconds that it takes; some milliseconds."""
    began = time.perf_counter()
    sum(range(200_000))
    return time.perf_counter() - began


class Watch(Silent):
    """Notes the time and the memory of flow and workers whenever an update ends."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._processes = {"flow": psutil.Process()}
        self.begins: list[float] = []
        self.ends: list[float] = []
        self.fixed: list[float] = []
        self.memory: list[dict[str, int]] = []

    def stage_ended(
        self, stage: str, iteration: int | None, *, rows: int, tokens: int, seconds: float, reused: bool
    ) -> None:
        if stage != "update":
            return
        if self._address is not None and len(self._processes) == 1:
            threading.Thread(target=self._find).start()
        self.ends.append(time.perf_counter())
        self.memory.append({name: each.memory_full_info().uss for name, each in list(self._processes.items())})
        self.fixed.append(fixed_work())
        self.begins.append(time.perf_counter())

    def _find(self) -> None:
        from grpo_lib.placement.ray_connection import statuses

        assert self._address is not None
        for each in statuses(self._address):
            if each.pid:
                self._processes[each.name] = psutil.Process(each.pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--address")
    asked = parser.parse_args()
    from flows.train import train

    watch = Watch(asked.address)
    show_progress_on(watch)
    with tempfile.TemporaryDirectory() as store:
        settings = [f"iterations={asked.iterations}", "evaluation.every=999999", "checkpoint.every=999999"]
        if asked.address:
            settings += ["placement.kind=ray", f"placement.ray.address={asked.address}"]
        train(make_config(TINY | {"store": {"uri": store}, "algorithm": {}}, settings))
    size = asked.iterations // PARTS
    names = sorted(watch.memory[-1])
    rows = []
    columns = ["iterations", "ms an iteration (median)", "fixed work (ms)", "ratio"]
    columns += [f"{each} (MiB)" for each in names]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for part in range(PARTS):
        chosen = range(part * size + (part == 0), (part + 1) * size)
        seconds = statistics.median(watch.ends[i] - watch.begins[i - 1] for i in chosen)
        fixed = statistics.median(watch.fixed[i] for i in chosen)
        memory = [statistics.median(watch.memory[i].get(name, 0) for i in chosen) / 2**20 for name in names]
        rows.append((seconds, fixed, seconds / fixed, *memory))
        cells = [f"{1000 * seconds:.0f}", f"{1000 * fixed:.2f}", f"{seconds / fixed:.1f}"]
        print(f"| {(part + 1) * size} | {' | '.join([*cells, *(f'{each:.0f}' for each in memory)])} |")
    changes = [f"{100 * (last / first - 1):+.1f} %" for first, last in zip(rows[1], rows[-1], strict=True)]
    print(f"| last tenth over the second | {' | '.join(changes)} |")


if __name__ == "__main__":
    main()
