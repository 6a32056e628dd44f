"""Who is told of the stages that a flow calls, where they are not to run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from grpo_lib.run import Run
from grpo_lib.storage.stages import ArtifactRef

Planner = Callable[[Any, Run, int | None, tuple[Any, ...], int, dict[str, str]], ArtifactRef]
"""Stands in for running: is told of every stage that the flow calls (its `StageTask`, run, iteration, inputs, shard and
external), and says what it would come to."""

_planner: ContextVar[Planner | None] = ContextVar("planner", default=None)


def current_planner() -> Planner | None:
    """None: stages run."""
    return _planner.get()


@contextmanager
def planned_by(planner: Planner) -> Iterator[None]:
    """While it is open no stage runs: ``planner`` gets the calls. The flow's own code decides which those are."""
    token = _planner.set(planner)
    try:
        yield
    finally:
        _planner.reset(token)
