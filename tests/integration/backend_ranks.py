"""What the ranks of these tests run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_lib.training.world import World
from tests.integration.cases import Case, score, train


class Bench:
    """Commands that make a trainer of any backend, use it, and leave their results in a folder."""

    def __init__(self, setup: Mapping[str, Any], world: World) -> None:
        self._world = world

    def train(
        self,
        case: dict[str, Any],
        backend: dict[str, Any],
        folder: str,
        first: str | None = None,
        start: int = 0,
        save_at: int | None = None,
    ) -> list[dict[str, float]]:
        before = None if first is None else Path(first)
        return train(made(case), backend, self._world, Path(folder), first=before, start=start, save_at=save_at)

    def score(self, case: dict[str, Any], backend: dict[str, Any], folder: str) -> None:
        score(made(case), backend, self._world, Path(folder))


def made(case: dict[str, Any]) -> Case:
    return Case(**case | {"options": tuple((name, value) for name, value in case["options"])})
