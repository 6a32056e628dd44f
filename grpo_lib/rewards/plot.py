"""Two rewards of the same rollouts as a picture."""

from collections.abc import Sequence
from pathlib import Path

from grpo_lib.rewards.change import Change, Histogram

COLORS = {"old": "tab:blue", "new": "tab:orange"}


def plot_change(bins: Histogram, by_iteration: Sequence[tuple[int, Change]], title: str, path: Path) -> None:
    """Both distributions, and both means over iterations."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, counts in (("old", bins.old), ("new", bins.new)):
        left.bar(range(len(counts)), counts, alpha=0.5, color=COLORS[name], label=name)
    left.set_xticks(range(len(bins.labels)), bins.labels, rotation=60, fontsize=7)
    left.set(title="Rollouts by reward")
    left.legend()
    for name in COLORS:
        points = [(k, getattr(each, name).mean) for k, each in by_iteration if getattr(each, name).mean is not None]
        right.plot(*zip(*points, strict=True) if points else ([], []), marker=".", color=COLORS[name], label=name)
    right.set(title="Mean reward", xlabel="iteration")
    right.legend()
    right.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)
