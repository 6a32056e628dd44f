"""What `grpo up` gives a person, but for Ray: Prefect and MLflow with their pages, and a worker that serves forms."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib.services.checks import free_port

START_SECONDS = 240
BUSY = 503
"""With SQLite, Prefect's answer to one of two that write at the same time. Its clients ask again; its pages don't."""
TRIES = 8
ENDS = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@dataclass(frozen=True)
class Services:
    """Running servers, and the folder in which runs start."""

    folder: Path
    log: Path
    """Of what carries runs out."""
    prefect: str
    mlflow: str

    def ask(self, path: str, **body: Any) -> Any:
        """Of Prefect's API."""
        request = urllib.request.Request(
            f"{self.prefect}/api{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        for _ in range(TRIES):
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError as error:
                if error.code != BUSY:
                    raise
                time.sleep(1)
        raise AssertionError(f"Prefect is busy: {path}")

    def deployment(self, name: str) -> str:
        """Address of the page of a deployment."""
        found = self.ask("/deployments/filter", deployments={"name": {"any_": [name]}})
        return f"{self.prefect}/deployments/deployment/{found[0]['id']}"

    def until_ended(self, flow_run: str, seconds: float = START_SECONDS) -> None:
        """Waits until the process of a flow run that failed is gone: Prefect takes a retry before that for a crash."""
        deadline = time.monotonic() + seconds
        while f"Process for flow run '{flow_run}' exited" not in self.log.read_text():
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.3)

    def until_state(self, flow_run: str, state: str, seconds: float = START_SECONDS) -> None:
        """Waits until the flow run with that id is in that state."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            now = self.ask("/flow_runs/filter", flow_runs={"id": {"any_": [flow_run]}})[0]["state"]
            if now["type"] == state:
                return
            assert now["type"] not in ENDS, (now, self.log.read_text()[-3000:])
            time.sleep(0.5)
        raise AssertionError(f"{flow_run} is not {state} after {seconds:g} s: {now}")


@contextmanager
def services(folder: Path, *settings: str) -> Iterator[Services]:
    """Starts all, with ``settings`` in the forms."""
    ports = {"prefect": free_port(), "mlflow": free_port()}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    env = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")} | {
        "PREFECT_HOME": str(folder / "prefect"), "PREFECT_API_URL": f"{urls['prefect']}/api",
        "PREFECT_SERVER_UI_API_URL": f"{urls['prefect']}/api", "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1",
    }  # fmt: skip
    work = folder / "work"
    work.mkdir()
    mlflow = ["mlflow", "server", "--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    mlflow += ["--artifacts-destination", str(folder / "artifacts"), "--port", str(ports["mlflow"])]
    commands = {
        "prefect": ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(ports["prefect"])],
        "mlflow": mlflow,
        "runs": ["flows.cli.main", "serve", *settings, f"tracking.uri={urls['mlflow']}"],
    }
    with ExitStack() as stack:

        def start(name: str, ready: Callable[[str], bool]) -> Callable[[], None]:
            log = folder / f"{name}.log"
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", *commands[name]], env=env, cwd=work, stdout=output, stderr=output,
                    start_new_session=True,
                )  # fmt: skip
            stack.callback(_end, process)

            def wait() -> None:
                deadline = time.monotonic() + START_SECONDS
                while not ready(log.read_text()):
                    assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
                    time.sleep(0.3)

            return wait

        servers = [
            start("prefect", lambda _: _answers(f"{urls['prefect']}/api/health")),
            start("mlflow", lambda _: _answers(f"{urls['mlflow']}/health")),
        ]
        for wait in servers:
            wait()
        start("runs", lambda said: "started!" in said)()
        yield Services(work, folder / "runs.log", urls["prefect"], urls["mlflow"])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
