"""On the PYTHONPATH of a flow and of its workers: writes down when what ran, for `run.py` beside it.

Python imports a module of this name at its start. What is watched is wrapped when it is imported; each call that ends
is a line of ``$GRPO_SPANS/PID.jsonl``: label, thread, begin and end (seconds since the epoch), seconds of the thread's
processor time. Calls nest: what counts is the innermost.
"""

import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.import_watch import watch_imports

FOLDER = os.environ.get("GRPO_SPANS", "")
_files: dict[int, Any] = {}


@contextmanager
def span(label: str) -> Iterator[None]:
    begun, cpu = time.time(), time.thread_time()
    try:
        yield
    finally:
        line = json.dumps([label, threading.get_native_id(), begun, time.time(), time.thread_time() - cpu])
        pid = os.getpid()  # a fork has a file of its own
        if pid not in _files:
            _files[pid] = (Path(FOLDER) / f"{pid}.jsonl").open("a", buffering=1)
        _files[pid].write(line + "\n")


def timed(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **settings: Any) -> Any:
        with span(label):
            return function(*args, **settings)

    return call


def watch_tasks(module: Any) -> None:
    stage, task = module.Stage, module.StageTask
    begin = task.__init__

    def beginning(self: Any, spec: Any, body: Any, role: str | None) -> None:
        begin(self, spec, timed(f"stage {spec.name}", body), role)

    task.__init__ = beginning
    for name, label in (("__call__", "Prefect"), ("submit", "Prefect"), ("_prepare", "look-ups"), ("known", "look-ups"),
                        ("compute", "look-ups")):  # fmt: skip
        setattr(task, name, timed(label, getattr(task, name)))
    for name, label in (("commit", "commits"), ("write_file", "commits"), ("table", "reading"), ("summary", "reading")):
        setattr(stage, name, timed(label, getattr(stage, name)))
    module.run_on_worker = timed("calls of workers", module.run_on_worker)


def watch_futures(module: Any) -> None:
    for name in ("wait", "result"):
        setattr(module.StageFuture, name, timed("waiting", getattr(module.StageFuture, name)))


def watch_weights(module: Any) -> None:
    module.weights_digest = timed("weights", module.weights_digest)


def watch_engine(module: Any) -> None:
    watch_weights(module)
    module.LocalEngine.load = timed("weights", module.LocalEngine.load)


def watch_engine_process(module: Any) -> None:
    module.EngineProcess.load = timed("weights", module.EngineProcess.load)


def watch_workers(module: Any) -> None:
    module.Workers._weights = contextmanager_timed("weights", module.Workers._weights)


def contextmanager_timed(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Of a context manager what comes before its block."""

    @contextmanager
    def manage(*args: Any, **settings: Any) -> Iterator[Any]:
        manager = function(*args, **settings)
        with span(label):
            given = manager.__enter__()
        try:
            yield given
        except BaseException as error:
            if not manager.__exit__(type(error), error, error.__traceback__):
                raise
        else:
            manager.__exit__(None, None, None)

    return manage


def watch_rollouts(module: Any) -> None:
    module.check_parity = timed("parity gate", module.check_parity)


WATCHED: dict[str, Callable[[Any], None]] = {
    "tasks.base": watch_tasks,
    "tasks.futures": watch_futures,
    "tasks.rollout": watch_rollouts,
    "grpo_lib.placement.local": watch_workers,
    "grpo_lib.placement.engine_process": watch_engine_process,
    "grpo_lib.generation.local": watch_engine,
    "grpo_lib.training.trainer": watch_weights,
}


if FOLDER:
    watch_imports(WATCHED)
