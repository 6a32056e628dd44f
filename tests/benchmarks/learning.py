"""Whether a variant learns: the demo's problem, several seeds, each a run of the real command.

    python tests/benchmarks/learning.py [--iterations 40] [--seeds 0 1 2] [--only ppo lora]

Prints a Markdown table. Runs of one seed share their warm start; what is in the store already is not computed again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "deployments" / "configs" / "demo.yaml"
KL = ["algorithm.old_logprobs=decoupled", "algorithm.kl.estimator=k3"]
VARIANTS = {
    "ppo": [
        "algorithm.advantage=gae",
        "critic.lr=1e-3",
        "critic.warmup_iterations=3",
        "trainer.mini_batch_prompts=8",
    ],
    "lora": ["trainer.lora.rank=16", "trainer.lora.alpha=32", "trainer.optimizer.lr=3e-3"],
    "kl free": [*KL, "algorithm.kl.coef=1e-9"],
    "kl 1": [*KL, "algorithm.kl.coef=1"],
}
"""Changes to the demo. A coefficient of 1e-9 measures the KL and does nothing about it."""


def grpo(*arguments: str) -> str:
    command = [sys.executable, "-m", "flows.cli.main", *arguments]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def measure(variant: str, seed: int, iterations: int) -> str:
    """A row of the table."""
    changes = [f"seed={seed}", f"iterations={iterations}", f"evaluation.every={iterations}", *VARIANTS[variant]]
    result = json.loads(grpo("run", str(CONFIG), *changes, "--json").splitlines()[-1])
    from grpo_lib.config import StoreConfig
    from grpo_lib.run import load_run
    from grpo_lib.tracking.reports import curve

    manifests = load_run(StoreConfig(uri=str(ROOT / "grpo-store")), result["run"]).manifests()
    _, kl = curve(manifests, "update", "kl")
    cells = [variant, str(seed)]
    for mode in ("sampled", "greedy"):
        (found,) = (each for each in result["accuracy"] if each["mode"] == mode)
        cells.append(f"{found['before']:.3f} -> {found['after']:.3f}")
    cells.append(f"{max(kl):.4f}, {sum(kl[-5:]) / 5:.4f}" if kl else "")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    chosen = parser.parse_args()
    print("| variant | seed | sampled | greedy | KL to the reference: largest, mean of the last five |")
    print("|---|---|---|---|---|")
    for seed in chosen.seeds:
        for variant in chosen.only:
            print(measure(variant, seed, chosen.iterations), flush=True)


if __name__ == "__main__":
    main()
