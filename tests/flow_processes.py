"""Flows in processes of their own that start within a second: each is forked from one that has imported everything."""

import importlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from grpo_lib.parent import end_with_parent

PRELOADED = [
    "flows.train",
    "flows.warm_start",
    "grpo_lib.placement.ray_cluster",
    "grpo_lib.storage.s3",
    "matplotlib.pyplot",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.tracking.rest_store",
    "tests.flows.tiny",
]
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(PRELOADED)


class FlowProcess:
    """A flow that runs.

    The first one starts the server from which all are forked, with the environment of then; see `flow_server`.

    Args:
        flow: ``train``, ``warm_start`` or ``retrain``.
        values: its configuration.
        log: file to which everything is appended that it prints.
        dies: ``before RECORD`` or ``after RECORD`` of a retraining: kills itself there.
    """

    def __init__(self, flow: str, values: dict[str, Any], log: Path, dies: str | None = None) -> None:
        self._process = _processes.Process(target=_run, args=(flow, values, str(log), dies), name=flow)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, minus the signal that killed it; None: it runs."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None: it still runs."""
        self._process.join(seconds)
        return self.code

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def flow_server() -> Iterator[None]:
    """Within the block flows are forked from a server of its own: it has the environment of now."""
    _stop_server()  # an earlier test's has that of then: its token, its Prefect
    forkserver.ensure_running()  # begins to import, so that the first flow starts quickly
    try:
        yield
    finally:
        _stop_server()


def _stop_server() -> None:
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _die(point: str) -> None:
    from grpo_lib.retraining.ledger import Ledger

    when, record = point.split()
    create = Ledger.create

    def creating(ledger: Ledger, number: int, name: str, content: Any) -> Any:
        if name == record and when == "after":
            create(ledger, number, name, content)
        if name == record:
            os.kill(os.getpid(), signal.SIGKILL)
        return create(ledger, number, name, content)

    Ledger.create = creating  # type: ignore[method-assign]


def _run(flow: str, values: dict[str, Any], log: str, dies: str | None) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    end_with_parent(signal.SIGKILL)
    import tasks.reward
    from grpo_lib.config_files import make_config
    from grpo_lib.config_retrain import RetrainConfig
    from grpo_lib.progress import Notes, show_progress_on
    from tests.flows.tiny import use_easy_reward

    show_progress_on(Notes())
    if dies is not None:
        _die(dies)
    try:
        if flow == "retrain":
            config: Any = RetrainConfig.model_validate(values)
        else:
            config, tasks.reward.get_problem = make_config(values), use_easy_reward  # type: ignore[assignment]
        getattr(importlib.import_module(f"flows.{flow}"), flow)(config)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
