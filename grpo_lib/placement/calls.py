"""What a flow asks of a worker: one stage, by references only."""

import importlib
from typing import Any

from pydantic import JsonValue

from grpo_lib.config_placement import PlacementConfig
from grpo_lib.run import Run
from grpo_lib.storage.manifests import ArtifactRef, Record

ROLES = ("rollout", "train", "score")
"""Kinds of workers; each offers a resource of that name in capitals."""

Input = ArtifactRef | list[ArtifactRef] | None


def worker_role(placement: PlacementConfig, role: str | None) -> str | None:
    """Kind of worker that runs stages of ``role``; None: the flow's own process does."""
    if placement.kind == "local" or role is None:
        return None
    if role == "rollout" and placement.ray.rollout_workers == 0:
        return "train"
    return None if role == "score" and placement.ray.score_workers == 0 else role


class StageCall(Record):
    """A stage to be run once; what it commits is found by its key."""

    task: str
    """``module:name`` of the stage's task."""
    run: dict[str, JsonValue]
    """`Run.to_json`."""
    stage: str
    iteration: int | None
    inputs: list[Input]
    shard: int
    key: str
    external: dict[str, str]
    folder: str
    """Working folder of the flow, which relative paths of the configuration refer to."""
    plugins: dict[str, str]
    """Digests of the user's own modules: a worker that imported others starts anew."""
    epoch: int | None = None
    """Of the training flow that asks: a later one of the same run has a larger number. None: it is another flow."""

    @property
    def name(self) -> str:
        """For people: stage, iteration and shard."""
        place = "" if self.iteration is None else f" {self.iteration}"
        return f"{self.stage}{place}" + (f".{self.shard}" if self.shard else "")

    def execute(self) -> ArtifactRef:
        """Runs the stage here, or finds it done."""
        module, _, name = self.task.partition(":")
        task: Any = getattr(importlib.import_module(module), name)
        return task.compute(
            Run.from_json(self.run), self.iteration, tuple(self.inputs), self.shard, self.key, self.external
        )
