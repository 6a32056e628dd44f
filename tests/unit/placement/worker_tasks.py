"""Stages for a `StageWorker` that does what a test says, step by step."""

import logging
import threading
from collections.abc import Callable
from typing import Any

from grpo_lib.progress import progress
from grpo_lib.run import Run
from grpo_lib.storage.manifests import ArtifactRef

SECONDS = 30.0


class Script:
    """What the stage of one key does: ``begun`` and ``ended`` tell the test, ``go`` lets it go on."""

    def __init__(self, body: Callable[["Script"], None]) -> None:
        self.body = body
        self.begun, self.go, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.runs = 0

    def until_told(self) -> None:
        """Shows signs of life until it may go on."""
        for step in range(10**6):
            if self.go.wait(0.01):
                return
            self.advance(step)

    def advance(self, done: int, total: int = 10**6) -> None:
        progress().stage_advanced("rollout", 3, done, total, 2 * done)


scripts: dict[str, Script] = {}
"""By key."""
order: list[str] = []
"""Keys in the order in which their stages ran."""


class Task:
    """Stands for a `StageTask`."""

    def compute(
        self, run: Run, iteration: int | None, inputs: tuple[Any, ...], shard: int, key: str, external: dict[str, str]
    ) -> ArtifactRef:
        script = scripts[key]
        order.append(key)
        script.runs += 1
        script.begun.set()
        try:
            script.body(script)
        finally:
            script.ended.set()
        return ArtifactRef(
            stage="rollout",
            run=run.name,
            iteration=iteration,
            shard=shard,
            key=key,
            manifest="runs/tiny/manifest.json",
            digest="d" * 64,
            rows=8,
            tokens=80,
            seconds=0.5,
        )


task = Task()
logger = logging.getLogger("grpo_lib.tests")
foreign = logging.getLogger("elsewhere")
