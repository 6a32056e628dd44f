"""Results as pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tests.benchmarks.scale.published import Comparison
from tests.benchmarks.scale.scenarios import PREDICTED, SCENARIOS, Prediction, Sensitivity
from tests.benchmarks.scale.tables import placement_text

STYLES = {"today": "--", "parallel": "-", "interrupted": "-."}


def draw_times(found: Sequence[Prediction], spread: float, path: Path) -> None:
    """Seconds of an iteration over the number of GPUs; ``spread``: the factor by which figures of others differ."""
    figure, axes = plt.subplots(1, len(PREDICTED), figsize=(11, 4.2), layout="constrained")
    for axis, model in zip(axes, PREDICTED, strict=True):
        for scenario in SCENARIOS:
            for staleness in (0, 1):
                points = [
                    (each.gpus, each.best.iteration.seconds)
                    for each in found
                    if (each.model, each.scenario, each.max_staleness) == (model, scenario, staleness) and each.best
                ]
                if not points:
                    continue
                x, y = zip(*points, strict=True)
                label = f"{scenario}, max_staleness {staleness}"
                axis.plot(x, y, STYLES[scenario], color=f"C{staleness}", marker="o", markersize=4, label=label)
                if scenario == "parallel" and staleness == 1:
                    low, high = ([each * factor for each in y] for factor in (1 / spread, spread))
                    axis.fill_between(x, low, high, color="C1", alpha=0.15)
                    axis.plot(x, [y[0] * x[0] / each for each in x], ":", color="gray", label="in proportion")
        axis.set(title=f"{model}, H100", xlabel="GPUs", ylabel="seconds an iteration", xscale="log", yscale="log")
        sizes = sorted({each.gpus for each in found})
        axis.set_xticks(sizes, [str(each) for each in sizes])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    _save(figure, path)


def draw_stages(found: Sequence[Prediction], path: Path) -> None:
    """Where the time goes at the best split of scenario `parallel`, with overlap: each half of the GPUs by itself."""
    figure, axes = plt.subplots(1, len(PREDICTED), figsize=(11, 4.4), layout="constrained")
    for axis, model in zip(axes, PREDICTED, strict=True):
        mine = [
            each for each in found
            if (each.model, each.scenario, each.max_staleness) == (model, "parallel", 1) and each.best
        ]  # fmt: skip
        for place, each in enumerate(mine):
            assert each.best is not None
            bottoms = {-0.2: 0.0, 0.2: 0.0}
            for number, (stage, seconds) in enumerate(each.best.iteration.stages.items()):
                if stage == "workflow":
                    continue
                side = -0.2 if stage in ("load weights", "rollout", "reward") else 0.2
                label = stage if place == 0 else None
                axis.bar(place + side, seconds, 0.36, bottom=bottoms[side], color=f"C{number}", label=label)
                bottoms[side] += seconds
        labels = [f"{each.gpus}\n{placement_text(each).replace(', ', chr(10))}" for each in mine]
        axis.set_xticks(range(len(mine)), labels, fontsize=8)
        axis.set(title=f"{model}: rollout workers (left) and trainer (right)", ylabel="seconds", yscale="linear")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3, axis="y")
    _save(figure, path)


def draw_sensitivity(found: Sequence[Sensitivity], path: Path) -> None:
    """How much an iteration's seconds change at either end of each assumption's range."""
    cases = sorted({(each.model, each.gpus) for each in found}, key=lambda each: each[1])
    figure, axes = plt.subplots(1, len(cases), figsize=(11, 4), layout="constrained", sharey=True)
    for axis, case in zip(axes, cases, strict=True):
        mine = [each for each in found if (each.model, each.gpus) == case]
        for place, each in enumerate(reversed(mine)):
            for value, color in ((each.low, "C2"), (each.high, "C3")):
                axis.barh(place, value / each.base - 1, color=color)
        axis.set_yticks(range(len(mine)), [each.what for each in reversed(mine)])
        axis.set(title=f"{case[0]} on {case[1]} GPUs", xlabel="change of seconds an iteration")
        axis.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
        axis.grid(alpha=0.3, axis="x")
    _save(figure, path)


def draw_published(found: Sequence[Comparison], path: Path) -> None:
    """Seconds of a step, simulated over published; hollow: with rollouts that a new policy interrupts."""
    figure, axis = plt.subplots(figsize=(6.4, 5), layout="constrained")
    whole = [each for each in found if each.what == "step"]
    for number, system in enumerate(dict.fromkeys(each.system for each in whole)):
        mine = [each for each in whole if each.system == system]
        for interrupted in (False, True):
            points = [(each.published, each.simulated) for each in mine if each.interrupted == interrupted]
            if points:
                face = "none" if interrupted else f"C{number}"
                label = f"{system}, rollouts interrupted" if interrupted else system
                axis.scatter(*zip(*points, strict=True), edgecolors=f"C{number}", facecolors=face, label=label)
    ends = [0.9 * min(each.published for each in whole), 1.1 * max(each.published for each in whole)]
    axis.plot(ends, ends, color="gray")
    for factor in (0.75, 1 / 0.75):
        axis.plot(ends, [each * factor for each in ends], ":", color="gray")
    axis.set(xlabel="published seconds of a step", ylabel="simulated", xscale="log", yscale="log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)
