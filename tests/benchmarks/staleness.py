"""The demo with rollouts of the newest policy, and of older ones: learning curves, several seeds.

    python tests/benchmarks/staleness.py [--seeds 0 1 2] [--staleness 0 1 2] [--iterations 100] [--plot FILE]

Each run is one of the real command; what is in the store already is not computed again. Prints held-out accuracy over
iterations as a Markdown table, and draws it.
"""

import argparse
import json
from pathlib import Path

from learning import CONFIG, ROOT, grpo

from grpo_lib.config import StoreConfig
from grpo_lib.run import load_run
from grpo_lib.tracking.reports import curve

EVERY = 20
SETTINGS = (
    "algorithm.old_logprobs=decoupled", "algorithm.rollout_correction.preset=decoupled_token_is",
    f"evaluation.every={EVERY}",
)  # fmt: skip
Curve = tuple[list[int], list[float]]


def measure(seed: int, staleness: int, iterations: int) -> tuple[Curve, Curve]:
    """Held-out accuracy of sampled responses, and the mean reward of the rollouts, both by iteration."""
    changes = [f"seed={seed}", f"iterations={iterations}", f"pipeline.max_staleness={staleness}", *SETTINGS]
    result = json.loads(grpo("run", str(CONFIG), *changes, "--json").splitlines()[-1])
    manifests = load_run(StoreConfig(uri=str(ROOT / "grpo-store")), result["run"]).manifests()
    return curve(manifests, "evaluate", "sampled_accuracy"), curve(manifests, "reward", "mean")


def draw(found: dict[tuple[int, int], tuple[Curve, Curve]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (seed, staleness), curves in found.items():
        for axis, (x, y) in zip(axes, curves, strict=True):
            smooth = [sum(y[max(0, i - 4) : i + 1]) / len(y[max(0, i - 4) : i + 1]) for i in range(len(y))]
            label = f"max_staleness {staleness}" if seed == min(each for each, _ in found) else None
            axis.plot(x, y if axis is axes[0] else smooth, color=f"C{staleness}", alpha=0.7, label=label)
    axes[0].set(title="Held-out accuracy, sampled", xlabel="updates")
    axes[1].set(title="Reward of the rollouts, mean of five iterations", xlabel="iteration")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    found = {}
    points = [*range(0, asked.iterations, EVERY), asked.iterations]
    print(f"| seed | max_staleness | {' | '.join(map(str, points))} |\n|---|---|{'---|' * len(points)}")
    for seed in asked.seeds:
        for staleness in asked.staleness:
            found[seed, staleness] = measure(seed, staleness, asked.iterations)
            accuracy = dict(zip(*found[seed, staleness][0], strict=True))
            print(f"| {seed} | {staleness} | {' | '.join(f'{accuracy[each]:.3f}' for each in points)} |", flush=True)
    if asked.plot is not None:
        draw(found, asked.plot)


if __name__ == "__main__":
    main()
