"""MLflow's server fails, loses answers or is gone: what the run logs there is there once, and nothing is missing."""

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_lib.config_files import make_config
from grpo_lib.errors import TrackingDownError, TrackingError
from grpo_lib.patience import impatient
from grpo_lib.run import Run
from grpo_lib.tracking.mlflow import Tracker
from grpo_lib.tracking.registry import CHAMPION, Registered, Registry
from tests.faulty_proxy import FaultyProxy

pytestmark = pytest.mark.slow


class Server:
    """`mlflow server` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/server.db", "--workers", "1"]
        command += ["--artifacts-destination", str(self.folder / "artifacts"), "--allowed-hosts", "*"]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError((self.folder / "server.log").read_text()[-3000:])

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def count(self, query: str) -> int:
        with sqlite3.connect(self.folder / "server.db") as database:
            return int(database.execute(query).fetchone()[0])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("mlflow"))
    yield server
    server.kill()


@pytest.fixture
def proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    proxy = FaultyProxy(server.url, stall_seconds=3)
    yield proxy
    proxy.close()


@pytest.fixture
def tracker(proxy: FaultyProxy, tmp_path: Path) -> Callable[..., Tracker]:
    def make(name: str, patience_seconds: float = 240) -> Tracker:
        values = {"name": name, "data": {"problem": "countdown"}, "warm_start": {}, "store": {"uri": str(tmp_path)}}
        tracking = {"uri": proxy.url, "experiment": name, "patience_seconds": patience_seconds}
        return Tracker(Run(make_config(values | {"tracking": tracking})))

    return make


POINTS = [
    {"name": f"metric/{number}", "value": float(number), "timestamp_ms": 1_700_000_000_000 + number, "iteration": step}
    for step in range(3)
    for number in range(40)
]


def checkpoint_of(tracker: Tracker) -> Registered:
    model_id = tracker.log_model(version=4, digest="e" * 64, uri="/checkpoint")
    run_id = tracker.run_id
    return Registered(
        place="/checkpoint", run="run", policy_version=4, policy_digest="e" * 64, run_id=run_id, model_id=model_id
    )


def register(tracker: Tracker) -> None:
    """A server takes no folder as the source of a version: its tag says where the weights are."""
    registry, checkpoint = Registry(tracker._config), checkpoint_of(tracker)
    name = tracker._config.tracking.experiment
    assert registry.register(name, checkpoint) == "1"
    registry.set_alias(name, CHAMPION, "1")
    assert registry.at(name, CHAMPION) == checkpoint


CALLS: dict[str, Callable[[Tracker, Path], Any]] = {
    "points": lambda tracker, _: tracker.log_points(POINTS),
    "dataset": lambda tracker, _: tracker.log_dataset(
        name="data", digest="d" * 64, uri="/d", context="training", rows=1
    ),
    "model": lambda tracker, _: tracker.log_model(version=4, digest="e" * 64, uri="/checkpoint"),
    "version": lambda tracker, _: register(tracker),
    "of the model": lambda tracker, _: tracker.log_points(
        POINTS[:3], checkpoint_of(tracker).model_id, ("data", "d" * 64)
    ),
    "table": lambda tracker, _: tracker.log_table({"a": [1, 2]}, "table.json"),
    "file": lambda tracker, folder: tracker.log_file(folder / "picture.png", "curves"),
    "finish": lambda tracker, _: tracker.finish("FINISHED"),
}


def log_everything(tracker: Tracker, folder: Path, proxy: FaultyProxy, script: Callable[[], list[str | None]]) -> None:
    (folder / "picture.png").write_bytes(b"png")
    for call in CALLS.values():
        proxy.script = script()
        call(tracker, folder)


def contents(server: Server, name: str) -> dict[str, int]:
    """How much of everything the server has of the experiment."""
    runs = f"select run_uuid from runs join experiments using (experiment_id) where experiments.name = '{name}'"
    models = (
        f"select model_id from logged_models join experiments using (experiment_id) where experiments.name = '{name}'"
    )
    return {
        "experiments": server.count(f"select count(*) from experiments where name = '{name}'"),
        "runs": server.count(f"select count(*) from ({runs})"),
        "params": server.count(f"select count(*) > 50 from params where run_uuid in ({runs})"),
        "points": server.count(f"select count(*) from metrics where run_uuid in ({runs})"),
        "datasets": server.count(f"select count(*) from inputs where destination_id in ({runs})"),
        "outputs": server.count(f"select count(*) from inputs where source_id in ({runs})"),
        "models": server.count(f"select count(*) from ({models})"),
        "ready": server.count(f"select count(*) from logged_models where status = 2 and model_id in ({models})"),
        "of_models": server.count(f"select count(*) from logged_model_metrics where run_id in ({runs})"),
        "versions": server.count(f"select count(*) from model_versions where name = '{name}'"),
        "finished": server.count(f"select count(*) from runs where status = 'FINISHED' and run_uuid in ({runs})"),
    }


ONCE = dict.fromkeys(
    ("experiments", "runs", "params", "datasets", "outputs", "models", "ready", "finished", "versions"), 1
)
ONCE |= {"points": len(POINTS), "of_models": 3}


def test_without_faults_everything_is_there_once(
    server: Server, proxy: FaultyProxy, tracker: Callable[..., Tracker], tmp_path: Path
) -> None:
    log_everything(tracker("plain"), tmp_path, proxy, list)
    assert contents(server, "plain") == ONCE


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("fault", ["lost", "error after"])
def test_a_lost_answer_doubles_nothing(
    server: Server, proxy: FaultyProxy, tracker: Callable[..., Tracker], tmp_path: Path, fault: str, position: int
) -> None:
    """The answer to the request in that place of each call is lost, after the server did what it was asked for."""
    name = f"{fault}-{position}".replace(" ", "-")
    log_everything(tracker(name), tmp_path, proxy, lambda: [None] * position + [fault])
    assert contents(server, name) == ONCE


def test_a_bad_network_doubles_nothing_and_loses_nothing(
    server: Server, proxy: FaultyProxy, tracker: Callable[..., Tracker], tmp_path: Path
) -> None:
    proxy.rate, proxy.seed = 0.3, 5
    for attempt in range(5):
        log_everything(tracker("bad-network"), tmp_path, proxy, list)
        assert contents(server, "bad-network") == ONCE, attempt
    assert len(proxy.happened) >= 6, proxy.happened


def test_a_server_that_is_killed_and_started_again_is_waited_for(
    server: Server, proxy: FaultyProxy, tracker: Callable[..., Tracker]
) -> None:
    one = tracker("killed")
    one.log_points(POINTS[:10])
    server.kill()
    starting = threading.Thread(target=server.start)
    starting.start()
    one.log_points(POINTS)
    starting.join()
    assert contents(server, "killed")["points"] == len(POINTS)
    assert contents(server, "killed")["runs"] == 1


def test_patience_ends_and_a_check_has_none(proxy: FaultyProxy, tracker: Callable[..., Tracker]) -> None:
    one = tracker("patience", patience_seconds=5)
    proxy.away()
    began = time.monotonic()
    with pytest.raises(TrackingDownError, match=r"does not answer.*Training data is safe"):
        one.log_points(POINTS)
    assert 5 <= time.monotonic() - began < 20
    began = time.monotonic()
    with pytest.raises(TrackingDownError), impatient():
        one.finish("FAILED")
    assert time.monotonic() - began < 5
    proxy.back()


def test_a_refusal_fails_at_once(proxy: FaultyProxy, tracker: Callable[..., Tracker]) -> None:
    one = tracker("refused")
    began = time.monotonic()
    with pytest.raises(TrackingError, match="refused") as caught:
        one.log_points([POINTS[0] | {"name": "not a name: \x00?"}])
    assert not isinstance(caught.value, TrackingDownError)
    assert time.monotonic() - began < 10
