"""What tests of several folders share."""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SHARED_FOLDER = "GRPO_TESTS_SHARED"
"""Names the folder that the processes of one test session (pytest-xdist's too) share."""
START_SECONDS = 120


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Models as small as those of tests only wait for each other's threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_configure() -> None:
    if SHARED_FOLDER not in os.environ:  # workers of pytest-xdist find it set
        os.environ[SHARED_FOLDER] = tempfile.mkdtemp(prefix="grpo-tests-")


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    shared = Path(os.environ.pop(SHARED_FOLDER))
    started = shared / "prefect.json"
    if started.exists():
        os.killpg(json.loads(started.read_text())["pid"], signal.SIGKILL)
    shutil.rmtree(shared, ignore_errors=True)


@pytest.fixture(scope="session")
def prefect_server() -> dict[str, str]:
    """Environment for processes that shall use the session's one Prefect server, started by whoever asks first."""
    shared = Path(os.environ[SHARED_FOLDER])
    with _locked(shared / "lock"):
        started = shared / "prefect.json"
        if not started.exists():
            started.write_text(json.dumps(_start_prefect(shared)))
        url = json.loads(started.read_text())["url"]
    return _prefect_settings(shared) | {"PREFECT_API_URL": url}


@pytest.fixture(scope="module")
def own_prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server for a module that deploys: a deployment has one pool, and another test may take it for its own."""
    folder = tmp_path_factory.mktemp("prefect")
    started = _start_prefect(folder)
    try:
        yield _prefect_settings(folder) | {"PREFECT_API_URL": str(started["url"])}
    finally:
        os.killpg(int(started["pid"]), signal.SIGKILL)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """URL of an S3 server; its credentials are in the environment."""
    from tests.s3_server import CREDENTIALS, s3_server

    with s3_server() as url, pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield url


def _prefect_settings(shared: Path) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(shared / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_ENABLED": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "DO_NOT_TRACK": "1",
    }


def _start_prefect(shared: Path) -> dict[str, str | int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (shared / "prefect").mkdir()
    log = shared / "prefect.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env=environment | _prefect_settings(shared),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}/api"
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return {"pid": server.pid, "url": url}
        except OSError:
            time.sleep(0.2)
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
    raise RuntimeError(f"the Prefect server did not start in {START_SECONDS} s:\n{log.read_text()[-2000:]}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
