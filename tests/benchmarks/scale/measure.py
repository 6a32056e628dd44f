"""Small runs for `run.py --check`, on a machine that does nothing else: `python .../scale/measure.py STORE`."""

import sys
from pathlib import Path

from grpo_lib.config_files import load_config

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "deployments" / "configs" / "demo.yaml"
SETTINGS = (
    "iterations=12", "warm_start.steps=60", "algorithm.old_logprobs=decoupled",
    "algorithm.rollout_correction.preset=decoupled_token_is", "evaluation.every=1000", "evaluation.prompts=16",
    "evaluation.samples=0", "evaluation.pass_k=[1]", "checkpoint.every=1000", "trainer.optimizer.schedule=constant",
    "trainer.optimizer.warmup_steps=0",
)  # fmt: skip
RUNS = {
    "base": (),
    "short": ("rollout.max_new_tokens=48", "rollout.prompts=48"),
    "wide": ("model.small.hidden_size=192", "model.small.mlp_size=512", "rollout.prompts=32"),
    "prompts-64": ("rollout.prompts=64",),
    "deep": ("model.small.layers=6", "model.small.hidden_size=128", "model.small.mlp_size=384"),
    "large": ("model.small.layers=5", "model.small.hidden_size=256", "model.small.mlp_size=768", "rollout.prompts=24"),
}
"""Other numbers of prompts and of tokens, other models."""


def main() -> None:
    from flows.train import train

    (store,) = sys.argv[1:]
    for name, own in RUNS.items():
        train(load_config(CONFIG, [*SETTINGS, *own, f"name={name}", f"store.uri={store}"]))
    print(f"python tests/benchmarks/scale/run.py --check {store} {' '.join(RUNS)}")


if __name__ == "__main__":
    main()
