"""What a run did, from its manifests alone: curves, stages, seconds, and the cost of everything between stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from grpo_lib.config_branch import ORDER
from grpo_lib.run import Run
from grpo_lib.storage.manifests import latest
from grpo_lib.storage.stages import ArtifactRef, Manifest, StageStore


@dataclass(frozen=True, kw_only=True)
class StageTotals:
    """All artifacts of one stage of a run."""

    stage: str
    artifacts: int
    adopted: int
    """Taken over from another run with the same key."""
    rows: int
    tokens: int
    seconds: float


def stage_totals(manifests: Sequence[Manifest]) -> list[StageTotals]:
    """Per stage, in the order in which stages run."""
    totals = []
    for stage in ORDER:
        mine = [manifest for manifest in manifests if manifest.stage == stage]
        if mine:
            totals.append(
                StageTotals(
                    stage=stage,
                    artifacts=len(mine),
                    adopted=sum(manifest.adopted_from is not None for manifest in mine),
                    rows=sum(manifest.rows for manifest in mine),
                    tokens=sum(manifest.tokens for manifest in mine),
                    seconds=sum(manifest.seconds for manifest in mine),
                )
            )
    return totals


def curve(manifests: Sequence[Manifest], stage: str, name: str) -> tuple[list[int], list[float]]:
    """Iterations and values of one number in a stage's summaries; shards are averaged."""
    points: dict[int, list[float]] = {}
    for manifest in latest(manifests, stage):
        value = manifest.summary.get(name)
        if isinstance(value, int | float):
            points.setdefault(manifest.iteration or 0, []).append(float(value))
    return list(points), [sum(values) / len(values) for values in points.values()]


def seconds_between_stages(manifests: Sequence[Manifest]) -> float | None:
    """Median seconds of an iteration in which no stage's body ran: Prefect, commits, MLflow; None below 3 iterations.

    From the end of one update to the end of the next, less the union of the intervals in which bodies ran. `publish`
    is no body here: it is part of what is measured.
    """
    bodies = sorted(
        (manifest.created_ms / 1000 - manifest.seconds, manifest.created_ms / 1000)
        for manifest in manifests
        if manifest.stage != "publish" and manifest.adopted_from is None
    )
    ends = [manifest.created_ms / 1000 for manifest in latest(manifests, "update") if manifest.adopted_from is None]
    idle = []
    for begin, end in pairwise(ends):
        covered, reached = 0.0, begin
        for start, stop in bodies:
            if stop > begin and start < end:
                covered += max(0.0, min(stop, end) - max(start, reached))
                reached = max(reached, min(stop, end))
        idle.append(end - begin - covered)
    return median(idle) if len(idle) >= 2 else None


def telling_responses(run: Run) -> list[tuple[str, dict[str, Any]]]:
    """A held-out prompt before and after training, and one that is answered wrongly after it."""
    evaluations = latest(run.manifests(), "evaluate")
    if len(evaluations) < 2:
        return []
    first, last = (_responses(run.stages, each.to_ref(reused=True)) for each in (evaluations[0], evaluations[-1]))
    learned = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=True)) if b["correct"] and not a["correct"]), 0
    )
    wrong = next((row for row in last if not row["correct"]), None)
    found = [("before", first[learned]), ("after, same prompt", last[learned])]
    return found if wrong is None else [*found, ("after, a wrong one", wrong)]


def _responses(stages: StageStore, evaluation: ArtifactRef) -> list[dict[str, Any]]:
    columns = ["prompt", "text", "reference", "correct", "mode"]
    rows = stages.table(evaluation, columns).to_pylist()
    mode = max(row["mode"] for row in rows)  # "sampled" sorts after "greedy"
    return [row for row in rows if row["mode"] == mode]


def plot_curves(manifests: Sequence[Manifest], title: str, path: Path) -> None:
    """Held-out accuracy, reward, length and surprise over iterations, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ((accuracy, reward), (length, surprise)) = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for mode, color in (("sampled", "tab:blue"), ("greedy", "tab:orange")):
        steps, values = curve(manifests, "evaluate", f"{mode}_accuracy")
        _, errors = curve(manifests, "evaluate", f"{mode}_accuracy_se")
        if steps:
            accuracy.errorbar(steps, values, yerr=errors, marker="o", capsize=3, color=color, label=mode)
    accuracy.set(title="Held-out accuracy", ylim=(0, 1), xlabel="iteration")
    accuracy.legend(loc="lower right")
    panels = (
        (reward, "reward", "mean", "Mean reward of the rollouts"),
        (length, "rollout", "length_mean", "Mean response length (tokens)"),
        (surprise, "rollout", "surprise", "Mean -log p of sampled tokens (nats)"),
    )
    for axis, stage, name, label in panels:
        axis.plot(*curve(manifests, stage, name), color="tab:blue", linewidth=1)
        axis.set(title=label, xlabel="iteration")
    for axis in (accuracy, reward, length, surprise):
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)
