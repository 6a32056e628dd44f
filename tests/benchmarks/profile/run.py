"""Where an iteration's time goes, also between its stages:

    python tests/benchmarks/profile/run.py [S-128 S-1024 M-128] [--placements local ray] [--plot FILE]

Runs the cases of `tests/benchmarks/peers` with every call written down that belongs to a stage or comes between two
(`sitecustomize.py`). At each instant of an iteration the innermost call counts: that of a stage that works, wherever it
runs, else that of the flow, or of whom the flow waits for. Local runs are on one core; on workers (`grpo up`, one for
rollouts, one for training) flow, workers and services share all cores. Prints a Markdown table.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.benchmarks.peers.cases import CASES, SEED, Case
from tests.ray_set import RaySet

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
DEMO = ROOT / "deployments" / "configs" / "demo.yaml"
GRPO = [sys.executable, "-m", "flows.cli.main"]
WORK = ("rollout", "reward", "old_logprobs", "ref_logprobs", "update")
"""Stages that any program for this has."""
SHOWN = (
    *WORK, "other stages", "parity gate", "weights", "reading", "commits", "look-ups", "calls of workers", "Prefect",
    "flow",
)  # fmt: skip
WAITING = ("waiting", "calls of workers", "Prefect")
"""While the flow is in one of these, who works for it counts."""


@dataclass(frozen=True, kw_only=True)
class Span:
    label: str
    thread: tuple[int, int]
    """Process and thread."""
    begin: float
    end: float
    cpu: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Of a run: means over its iterations but the first ones."""

    case: str
    placement: str
    seconds: float
    parts: dict[str, float]
    """Seconds an iteration of `SHOWN`; their sum is that of the iteration."""
    publish: float
    """Processor seconds an iteration that metrics take beside it."""
    work: float
    """Processor seconds an iteration of the stages in `WORK`, in the threads that run them."""

    @property
    def outside(self) -> float:
        """Fraction of an iteration that is not in `WORK`."""
        return 1 - sum(self.parts[name] for name in WORK) / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="Default: all.")
    parser.add_argument("--placements", nargs="+", default=["local", "ray"], choices=["local", "ray"])
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--core", type=int, default=0, help="Of local runs.")
    parser.add_argument("--folder", type=Path, help="That of `peers/run.py`, whose models are then used.")
    asked = parser.parse_args()
    found: list[Profile] = []
    with tempfile.TemporaryDirectory() as made:
        folder = (asked.folder or Path(made)).absolute()
        for placement in asked.placements:
            for name in asked.cases or CASES:
                found.append(profiled(CASES[name], placement, folder, asked.set, asked.core))
                print(table(found[-1:]), flush=True)
                if asked.json:
                    asked.json.write_text(json.dumps([vars(each) for each in found], indent=1))
    print("\n" + table(found))
    if asked.plot:
        draw(found, asked.plot)


def profiled(case: Case, placement: str, folder: Path, settings: Sequence[str], core: int) -> Profile:
    """Runs a case and reads what was written down."""
    spans = Path(tempfile.mkdtemp(prefix=f"spans-{case.name}-{placement}-", dir=folder))
    watched = {
        "PYTHONPATH": f"{HERE}:{ROOT}", "GRPO_SPANS": str(spans), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    common = [*settings, f"seed={SEED}"]
    model, start, log = folder / f"model-{case.model}", f"start-{case.model}", folder / "log"
    if not model.exists():
        store = folder / "store"
        begun = [*case.settings(None), *common, f"store.uri={store}", f"name={start}"]
        grpo(["warm-start", str(DEMO), *begun], dict(os.environ), log)
        grpo(["export", start, str(model), "--store", str(store)], dict(os.environ), log)
    # A store of its own: in one with a run of the same settings it would adopt what that has computed.
    run = [*case.settings(model), *common, f"store.uri={spans / 'store'}", f"name={case.name}"]
    if placement == "local":
        grpo(["run", str(DEMO), *run], os.environ | watched, log, {core})
        return profile(case, placement, read(spans))
    services = RaySet({"rollout": 1, "train": 1})
    services.environment |= watched
    try:
        services.start()
        run += ["placement.kind=ray", f"placement.ray.address={services.state.ray_address}"]
        grpo(["run", str(DEMO), *run, f"tracking.uri={services.mlflow_url}"], services.environment, log)
    finally:
        services.stop()
    return profile(case, placement, read(spans))


def grpo(words: list[str], environment: dict[str, str], log: Path, cores: set[int] | None = None) -> None:
    with log.open("wb") as output:
        done = subprocess.run(
            [*GRPO, *words], env=environment, stdout=output, stderr=output,
            preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"grpo {words[0]} failed:\n{log.read_text()[-3000:]}")


def read(folder: Path) -> list[Span]:
    found = []
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            label, thread, begin, end, cpu = json.loads(line)
            found.append(Span(label=label, thread=(int(file.stem), thread), begin=begin, end=end, cpu=cpu))
    return found


def profile(case: Case, placement: str, spans: Sequence[Span]) -> Profile:
    """Instant by instant, over the iterations that count."""
    ends = sorted(each.end for each in spans if each.label == "stage update")[case.skipped - 1 :]
    first, last, iterations = ends[0], ends[-1], len(ends) - 1
    counted = [each for each in spans if each.end > first and each.begin < last]
    flow = statistics.mode(each.thread for each in counted if each.label == "Prefect")
    threads: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for each in counted:
        threads[each.thread].append(each)
    pieces = {thread: innermost(without_publish(mine)) for thread, mine in threads.items()}
    cuts = sorted(
        {first, last, *(t for mine in pieces.values() for a, b, _ in mine for t in (a, b) if first < t < last)}
    )
    places = dict.fromkeys(pieces, 0)
    parts = dict.fromkeys(SHOWN, 0.0)
    for begin, end in pairwise(cuts):
        middle, now = (begin + end) / 2, {}
        for thread, mine in pieces.items():
            while places[thread] < len(mine) and mine[places[thread]][1] <= middle:
                places[thread] += 1
            if places[thread] < len(mine) and mine[places[thread]][0] <= middle:
                now[thread] = mine[places[thread]][2]
        parts[shown(now.pop(flow, "flow"), list(now.values()))] += (end - begin) / iterations

    def cpu(*labels: str) -> float:
        return sum(each.cpu for each in counted if each.label in labels) / iterations

    return Profile(
        case=case.name, placement=placement, seconds=(last - first) / iterations, parts=parts,
        publish=cpu("stage publish"), work=cpu(*(f"stage {name}" for name in WORK)),
    )  # fmt: skip


def shown(flow: str, others: list[str]) -> str:
    """What an instant counts as: the flow's innermost call, and those of other threads and workers."""
    for stage in WORK:
        if f"stage {stage}" in (flow, *others):
            return stage
    if flow in WAITING:
        helping = [each for each in others if each not in WAITING]
        flow = helping[0] if helping else "Prefect" if flow == "waiting" else flow
    return "other stages" if flow.startswith("stage ") else flow


def without_publish(spans: Sequence[Span]) -> list[Span]:
    """Of one thread: metrics go to MLflow beside the next iteration, on threads that may run other stages too."""
    calls: list[list[Span]] = []  # each an outermost one and what it calls
    for each in sorted(spans, key=lambda each: (each.begin, -each.end)):
        if not calls or each.begin >= calls[-1][0].end:
            calls.append([])
        calls[-1].append(each)
    return [each for call in calls if all(inner.label != "stage publish" for inner in call) for each in call]


def innermost(spans: Sequence[Span]) -> list[tuple[float, float, str]]:
    """Of one thread, whose calls nest: consecutive pieces of time with the innermost call's label."""
    pieces: list[tuple[float, float, str]] = []
    open_calls: list[Span] = []
    at = 0.0

    def until(instant: float) -> None:
        nonlocal at
        if open_calls and instant > at:
            pieces.append((at, instant, open_calls[-1].label))
        at = max(at, instant)

    for each in sorted(spans, key=lambda each: (each.begin, -each.end)):
        while open_calls and open_calls[-1].end <= each.begin:
            until(open_calls[-1].end)
            open_calls.pop()
        until(each.begin)
        at = each.begin
        open_calls.append(each)
    while open_calls:
        until(open_calls[-1].end)
        open_calls.pop()
    return pieces


def table(found: Sequence[Profile]) -> str:
    """Milliseconds an iteration, a column a run."""
    lines = [
        "| ms an iteration | " + " | ".join(f"{each.case} {each.placement}" for each in found) + " |",
        "|---|" + "---|" * len(found),
    ]
    for name in SHOWN:
        lines.append(f"| {name} | " + " | ".join(f"{1000 * each.parts[name]:.1f}" for each in found) + " |")
    lines.append("| an iteration | " + " | ".join(f"{1000 * each.seconds:.0f}" for each in found) + " |")
    lines.append(f"| not {', '.join(WORK)} | " + " | ".join(f"{each.outside:.1%}" for each in found) + " |")
    lines.append(
        "| processor time of metrics, beside it | " + " | ".join(f"{1000 * each.publish:.1f}" for each in found) + " |"
    )
    lines.append(
        "| seconds that are not the stages' processor time | "
        + " | ".join(f"{1 - each.work / each.seconds:.1%}" for each in found)
        + " |"
    )
    return "\n".join(lines)


def draw(found: Sequence[Profile], path: Path) -> None:
    """A bar a run: above fractions of an iteration, below what is between the stages, in milliseconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [f"{each.case}\n{each.placement}" for each in found]
    colors = {name: plt.get_cmap("tab20")(number) for number, name in enumerate(SHOWN)}
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for axis, parts, title, factor in (
        (axes[0], SHOWN, "an iteration", None),
        (axes[1], [name for name in SHOWN if name not in WORK], "of it between the stages and in the small ones", 1000),
    ):
        bottoms = [0.0] * len(found)
        for name in parts:
            heights = [each.parts[name] * (factor or 100 / each.seconds) for each in found]
            axis.bar(names, heights, bottom=bottoms, label=name, color=colors[name])
            bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
        axis.set(title=title, ylabel="ms" if factor else "% of its time")
        axis.grid(axis="y", alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside right center", reverse=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
