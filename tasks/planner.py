"""Who is told of the stages that a flow calls, where they are not to run."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from grpo_lib.run import Run
from grpo_lib.storage.stages import ArtifactRef


class Planner(Protocol):
    """Stands in for running: is told of every stage that the flow calls, and says what it would come to."""

    def called(
        self,
        task: Any,
        run: Run,
        iteration: int | None,
        inputs: tuple[Any, ...],
        shard: int,
        external: dict[str, str],
    ) -> ArtifactRef:
        """``task`` is the `StageTask`, ``inputs`` are its arguments."""
        ...


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
