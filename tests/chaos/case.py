"""The small Countdown case on two workers, and where one run of it lies."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_lib.config_files import make_config
from grpo_lib.run import Run
from grpo_lib.storage.paths import is_manifest, run_folder
from tests.flows.tiny import TINY

CASE: dict[str, Any] = TINY | {
    "name": "chaos",
    "iterations": 4,
    "algorithm": {"kl": {"coef": 0.01}, "entropy_coef": 0.01},
    "rollout": {"prompts": 4, "samples": 8, "shards": 2, "max_prompt_tokens": 24, "max_new_tokens": 24},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ranks": {"trainer": {"optimizer": {"lr": 1e-3}, "backend": "fsdp2"}},
    "ahead": {
        "pipeline": {"max_staleness": 1},
        "algorithm": CASE["algorithm"] | {"rollout_correction": {"preset": "decoupled_token_is"}},
    },
}
"""The trainer as two processes; and rollouts that run ahead of training."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A run of the case."""

    folder: Path
    """For its log, MLflow's file, and the store if that is a folder."""
    store: dict[str, Any]
    """As the run sees it."""
    direct: dict[str, Any]
    """As the tests do."""
    tracking: dict[str, Any]
    placement: dict[str, Any] = field(default_factory=dict)
    variant: str = "plain"

    @property
    def values(self) -> dict[str, Any]:
        """The configuration."""
        ranks = 2 if self.variant == "ranks" else 1
        placement = {"kind": "ray", "threads": 1, "device": "cpu", "ranks": ranks} | self.placement
        own = {"store": self.store, "tracking": self.tracking, "placement": placement}
        return CASE | VARIANTS[self.variant] | own

    @property
    def log(self) -> Path:
        return self.folder / "flow.log"

    def run(self) -> Run:
        """For a look at what it has committed."""
        return Run(make_config(self.values | {"store": self.direct}))

    def committed(self) -> set[str]:
        """Paths of its manifests."""
        return {info.path for info in self.run().objects.list(run_folder("chaos")) if is_manifest(info.path)}


def copy(source: Run, target: Run) -> None:
    """What a run has committed before its first iteration, into another store."""
    for prefix in (f"{run_folder('chaos')}/setup", "index"):
        for info in source.objects.list(prefix):
            target.objects.put_bytes(info.path, source.objects.get(info.path))
