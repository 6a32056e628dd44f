"""What happens in a chaos run: drawn from its seed alone."""

import random
from dataclasses import dataclass

KINDS = (
    "generation", "flow", "store gone", "train worker", "flow", "ray head", "rollout worker", "prefect", "flow",
    "store failing", "train worker", "quota", "flow", "generation", "mlflow", "store gone", "rank", "flow",
    "ray node", "generation",
)  # fmt: skip
"""The first thing that happens goes round these, so that twenty seeds in a row meet with everything."""
FURTHER = ("flow", "flow", "flow", "flow", "generation", "rollout worker", "train worker")
"""What may happen besides, in the same run. ``generation``: the rollout worker, as it has begun a shard."""
AHEAD = 0.25
"""Of the runs on a folder, the part whose rollouts run ahead of training."""
LAST_GENERATION, GENERATION_SECONDS = 0.6, 0.05
"""When the last shards are begun, at the earliest, and how long one takes, about."""
PASSING = ("store gone", "store failing", "quota", "ray head", "ray node", "prefect", "mlflow")
"""What is over after ``Fault.seconds``, but for the time that a service takes to start."""
MINUTE = 0.1
"""Of what passes, the part that takes a minute; not in the first twenty seeds, which have to be quick."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something is killed or fails."""

    kind: str
    after: float
    """Of the stages that the run commits, the part that is there by then."""
    delay: float
    """Seconds after that."""
    seconds: float
    """How long it lasts, if it passes by itself."""

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.kind in PASSING else ""
        return f"{self.kind}{lasting} at {self.after:.0%} + {self.delay:.2f} s"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    seed: int
    store: str
    """folder or s3."""
    tracking: str
    """file or server."""
    variant: str
    """Of the case; see `case.VARIANTS`."""
    faults: tuple[Fault, ...]


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    dice = random.Random(seed)
    kinds = [KINDS[seed % len(KINDS)]]
    kinds += [dice.choice(FURTHER) for _ in range(dice.choice((0, 0, 0, 1, 1, 2)))]
    faults = [
        Fault(
            kind=kind,
            after=dice.uniform(0.05, LAST_GENERATION if kind == "generation" else 0.9),
            delay=dice.uniform(0, GENERATION_SECONDS if kind == "generation" else 0.3),
            seconds=60.0 if dice.random() < MINUTE and seed >= len(KINDS) else dice.uniform(0.5, 6),
        )
        for kind in kinds
    ]
    on_s3 = any(kind.startswith("store") for kind in kinds)
    return Scenario(
        seed=seed,
        store="s3" if on_s3 else "folder",
        tracking="server" if "mlflow" in kinds else "file",
        variant="ranks" if "rank" in kinds else "ahead" if not on_s3 and dice.random() < AHEAD else "plain",
        faults=tuple(sorted(faults, key=lambda each: each.after)),
    )
