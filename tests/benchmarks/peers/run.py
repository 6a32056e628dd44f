"""Ours and TRL side by side: `make bench-peers`, or `python tests/benchmarks/peers/run.py [S-128 ...] [--seeds 0 1 2]`.

Both train the same warm-started model on the same puzzles with the same reward, batch and settings (`cases.py`), as
processes on one core, in turns. Ours is `grpo run` with everything that belongs to it (Prefect, Arrow, commits, MLflow,
checkpoints); TRL is its GRPOTrainer with the faster of its two attentions. Seconds are between the ends of iterations,
memory is that of all processes of a side, and what both have learned is measured by the same evaluation.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

import psutil

from grpo_lib.config_data import CountdownData
from grpo_lib.config_files import load_config
from grpo_lib.problems import get_problem
from grpo_lib.run import Run
from grpo_lib.storage.manifests import latest
from tests.benchmarks.peers.cases import CASES, SEED, Case

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
DEMO = ROOT / "deployments" / "configs" / "demo.yaml"
GRPO = [sys.executable, "-m", "flows.cli.main"]
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
ATTENTIONS = ("eager", "sdpa")
TRIED = 4
"""Iterations by which TRL's attention is chosen, beside those that don't count."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one training."""

    case: str
    side: str
    seed: int
    seconds: float
    """An iteration, mean over those that count."""
    tokens: float
    """An iteration, mean."""
    responses: int
    """An iteration."""
    memory: float
    """Peak of the proportional memory of all its processes, GiB."""
    greedy: float
    sampled: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="Default: all.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--trl", type=Path, required=True, help="Python of the environment with TRL.")
    parser.add_argument("--attention", choices=ATTENTIONS, help="TRL's; default: the faster in a trial of both.")
    parser.add_argument("--folder", type=Path, help="For models and runs; default: a temporary one.")
    parser.add_argument("--json", type=Path, help="Where to write every result.")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="Further settings of ours.")
    asked = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as made:
        bench = Bench((asked.folder or Path(made)).absolute(), asked.trl.absolute(), asked.core, asked.set)
        for name in asked.cases or CASES:
            results += compare(bench, CASES[name], asked.seeds, asked.attention)
            if asked.json:
                asked.json.write_text(json.dumps([asdict(each) for each in results], indent=1))


def compare(bench: "Bench", case: Case, seeds: list[int], attention: str | None = None) -> list[Result]:
    """Trains all, and prints a table."""
    model = bench.model(case)
    before = accuracy(model, case)
    print(f"\n{case.name}: before {before[0]:.3f} greedy, {before[1]:.3f} sampled", flush=True)
    if attention is None:
        tries = {each: bench.trl(case, model, 0, each, iterations=case.skipped + TRIED).seconds for each in ATTENTIONS}
        attention = min(tries, key=lambda each: tries[each])
        print("TRL: " + ", ".join(f"{each} {seconds:.3f} s" for each, seconds in tries.items()), flush=True)
    results = []
    for seed in seeds:
        for each in (bench.ours(case, model, seed), bench.trl(case, model, seed, attention)):
            print(each, flush=True)
            results.append(each)
    print(
        "\n| case | side | s an iteration | samples/s | tokens/s | tokens a response | peak GiB | greedy | sampled |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    sides = {side: [each for each in results if each.side == side] for side in ("ours", "trl")}
    for side, found in sides.items():
        seconds, tokens = mean(found, "seconds"), mean(found, "tokens")
        print(
            f"| {case.name} | {side} | {seconds:.3f} | {case.responses / seconds:.1f} | {tokens / seconds:,.0f} "
            f"| {tokens / case.responses:.1f} | {max(each.memory for each in found):.2f} "
            f"| {spread(found, 'greedy')} | {spread(found, 'sampled')} |"
        )
    ratios = [theirs.seconds / ours.seconds for ours, theirs in zip(sides["ours"], sides["trl"], strict=True)]
    print(f"\n{case.name}: {statistics.median(ratios):.2f} times as many samples a second (by seed: "
          + ", ".join(f"{each:.2f}" for each in ratios) + ")", flush=True)  # fmt: skip
    return results


def mean(results: list[Result], field: str) -> float:
    return statistics.mean(getattr(each, field) for each in results)


def spread(results: list[Result], field: str) -> str:
    values = [getattr(each, field) for each in results]
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


class Bench:
    """Trainings on one core, each in processes of its own."""

    def __init__(self, folder: Path, trl_python: Path, core: int, settings: list[str]) -> None:
        self.folder, self._trl, self._core = folder, trl_python, core
        self._ours = [f"store.uri={folder / 'store'}", *settings]
        self._numbers = count()
        folder.mkdir(parents=True, exist_ok=True)

    def model(self, case: Case) -> Path:
        """The warm-started model that both sides begin with."""
        exported = self.folder / f"model-{case.model}"
        if not exported.exists():
            name = f"start-{case.model}"
            settings = [*case.settings(None), *self._ours, f"seed={SEED}", f"name={name}"]
            self._run([*GRPO, "warm-start", str(DEMO), *settings, "--json"], self.folder / f"{name}.log")
            self._export(name, exported)
        return exported

    def ours(self, case: Case, model: Path, seed: int) -> Result:
        name = f"{case.name}-{seed}-{next(self._numbers)}"
        settings = [*case.settings(model), *self._ours, f"seed={seed}", f"name={name}"]
        memory = self._run([*GRPO, "run", str(DEMO), *settings, "--json"], self.folder / f"{name}.log")
        run = Run(load_config(DEMO, settings))
        manifests = run.stages.manifests()
        ends = [each.created_ms / 1000 for each in latest(manifests, "update")]
        tokens = [each.tokens or 0 for each in latest(manifests, "rollout")]
        self._export(name, self.folder / name)
        return result(case, "ours", seed, ends, tokens, memory, self.folder / name)

    def trl(self, case: Case, model: Path, seed: int, attention: str, iterations: int | None = None) -> Result:
        asked = case if iterations is None else replace(case, iterations=iterations)
        folder = self.folder / f"trl-{case.name}-{seed}-{next(self._numbers)}"
        folder.mkdir()
        puzzles = get_problem("countdown").load(CountdownData(), "train", seed).select(["prompt", "reference"])
        (folder / "prompts.json").write_text(json.dumps(puzzles.to_pylist()))
        wanted = {
            "model": str(model), "prompts": str(folder / "prompts.json"), "folder": str(folder / "model"),
            "attention": attention, "seed": seed, "settings": asked.trl(),
        }  # fmt: skip
        (folder / "asked.json").write_text(json.dumps(wanted))
        command = [str(self._trl), str(HERE / "trl_side.py"), str(folder / "asked.json")]
        memory = self._run(command, folder / "log")
        found = json.loads((folder / "asked.result.json").read_text())
        ends = found["ends"][case.updates - 1 :: case.updates]
        return result(asked, "trl", seed, ends, found["tokens"], memory, folder / "model")

    def _export(self, run: str, folder: Path) -> None:
        self._run(
            [*GRPO, "export", run, str(folder), "--store", str(self.folder / "store")], self.folder / "export.log"
        )

    def _run(self, command: list[str], log: Path) -> float:
        """On the core; returns the peak of memory in GiB."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, env=os.environ | ENVIRONMENT, stdout=output, stderr=output,
                preexec_fn=lambda: os.sched_setaffinity(0, {self._core}),
            )  # fmt: skip
            with watched(process.pid) as peak:
                process.wait()
        if process.returncode:
            raise SystemExit(f"{' '.join(command[:4])} failed:\n{log.read_text()[-2000:]}")
        return peak[0]


def result(
    case: Case, side: str, seed: int, ends: list[float], tokens: list[int], memory: float, model: Path
) -> Result:
    assert len(ends) == len(tokens) == case.iterations, f"{side}: {len(ends)} ends, {len(tokens)} rollouts"
    greedy, sampled = accuracy(model, case)
    counted = case.iterations - case.skipped
    return Result(
        case=case.name, side=side, seed=seed, responses=case.responses, memory=memory, greedy=greedy, sampled=sampled,
        seconds=(ends[-1] - ends[case.skipped - 1]) / counted, tokens=statistics.mean(tokens[case.skipped :]),
    )  # fmt: skip


@contextmanager
def watched(pid: int) -> Iterator[list[float]]:
    """Peak of the proportional memory of a process and of all that it started, in GiB, looked at twice a second."""
    peak, ended = [0.0], threading.Event()

    def look() -> None:
        while not ended.wait(0.5):
            total = 0
            with suppress(psutil.Error):
                for each in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                    with suppress(psutil.Error):
                        total += each.memory_full_info().pss
            peak[0] = max(peak[0], total / 2**30)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def accuracy(model: Path, case: Case) -> tuple[float, float]:
    """Of held-out puzzles: greedy, and sampled at temperature 1. In a process of its own, so that this one shares no
    memory with those that are watched."""
    command = [sys.executable, str(HERE / "accuracy.py"), str(model), str(case.new_tokens)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, check=True)
    greedy, sampled = json.loads(done.stdout)
    return greedy, sampled


if __name__ == "__main__":
    main()
