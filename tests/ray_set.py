"""What `grpo up` starts, for tests that kill parts of it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from grpo_lib.services.checks import free_port
from grpo_lib.services.processes import launch, session_of
from grpo_lib.services.state import SetState, read_state

ROOT = Path(__file__).parents[1]
SPY = ROOT / "tests" / "chaos" / "spy"
MARK = "GRPO_TESTS_OF"
"""Of the environment: whose test a process belongs to."""
START_SECONDS = 240
STARTS = 3
KILLED = {"ray head": "gcs_server", "ray node": "raylet"}
"""Of these services one process is killed, of others all."""


class RaySet:
    """`grpo up` in a process of its own, with a folder of its own.

    ``environment`` is for those who use it, and is that of all its processes.
    """

    def __init__(self, workers: Mapping[str, int]) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="grpo-", dir="/tmp"))  # short: paths of sockets are limited
        self.spy, temporary = self.home / "spy", self.home / "tmp"
        self.spy.mkdir()
        temporary.mkdir()
        self._folder = self.home / "set"
        self._workers = workers
        self._ports = {name: free_port() for name in ("prefect", "mlflow", "ray")}
        self._sessions: set[int] = set()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "RAY_"))}
        self.environment = inherited | {
            MARK: str(self.home),
            "PYTHONPATH": f"{SPY}:{ROOT}",
            "GRPO_TEST_SPY": str(self.spy),
            "RAY_TMPDIR": str(self.home),
            "TMPDIR": str(temporary),  # what killed processes leave goes with it
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.home / "token"),
            "PREFECT_HOME": str(self.home / "prefect"),
            "PREFECT_API_URL": f"http://127.0.0.1:{self._ports['prefect']}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }
        self._up: subprocess.Popen[bytes] | None = None

    @property
    def prefect_url(self) -> str:
        return self.environment["PREFECT_API_URL"]

    @property
    def mlflow_url(self) -> str:
        return f"http://127.0.0.1:{self._ports['mlflow']}"

    @property
    def mlflow_database(self) -> Path:
        return self._folder / "mlflow.db"

    @property
    def state(self) -> SetState:
        state = read_state(self._folder)
        assert state is not None, "`grpo up` has ended"
        return state

    def start(self) -> None:
        """Returns when all is up."""
        options = ["--folder", str(self._folder)]
        for name, port in self._ports.items():
            options += [f"--{name}-port", str(port)]
        for role, count in self._workers.items():
            options += [f"--{role}-workers", str(count)]
        command = [sys.executable, "-m", "flows.cli.main", "up", "--runs", "0", *options]
        for attempt in range(STARTS):  # Ray gives a node 30 s, which may be too few on a machine with other work
            self._up = launch(command, self.environment, self.home / "up.log")
            if self._came_up() or attempt + 1 == STARTS:
                break
        self.wait()

    def _came_up(self) -> bool:
        assert self._up is not None
        while self._up.poll() is None:
            state = read_state(self._folder)
            if state is not None and state.ready:
                return True
            time.sleep(0.1)
        return False

    def wait(self) -> None:
        """Until all is up again."""
        assert self._up is not None
        until = time.monotonic() + START_SECONDS
        while True:
            state = read_state(self._folder)
            if state is not None and state.ready and all(each.phase == "up" for each in state.services):
                break
            assert self._up.poll() is None and time.monotonic() < until, (self.home / "up.log").read_text()[-3000:]
            time.sleep(0.1)
        self._remember()

    def stop(self) -> list[psutil.Process]:
        """Ends all; returns what is left all the same."""
        if self._up is not None and self._up.poll() is None:
            self._remember()
            self._up.terminate()
            try:
                self._up.wait(60)
            except subprocess.TimeoutExpired:
                self._up.kill()
        left = gone_within(10, self.strays)
        for each in left:
            each.kill()
        shutil.rmtree(self.home, ignore_errors=True)
        return left

    def restarts(self, service: str) -> int:
        return next(each.restarts for each in self.state.services if each.name == service)

    def pid(self, service: str) -> int:
        """Of the process that is the service."""
        leader = next(each.process for each in self.state.services if each.name == service)
        assert leader is not None, f"{service} does not run"
        if service not in KILLED:
            return leader.pid
        return next(each.pid for each in session_of(leader.pid) if each.name() == KILLED[service])

    def kill(self, service: str) -> None:
        """With SIGKILL; `grpo up` starts it again."""
        self._remember()
        pid = self.pid(service)
        for each in [psutil.Process(pid)] if service in KILLED else session_of(pid):
            each.kill()

    def pause(self) -> None:
        """What is killed from now on is not started again."""
        assert self._up is not None
        self._up.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """It is."""
        assert self._up is not None
        self._up.send_signal(signal.SIGCONT)

    def worker(self, role: str, seconds: float = 60) -> psutil.Process:
        """The process of the first worker of a role, as soon as it is there."""
        until = time.monotonic() + seconds
        while True:
            try:
                process = psutil.Process(int((self.spy / f"grpo-{role}-0.pid").read_text()))
                if process.status() != psutil.STATUS_ZOMBIE:
                    return process
            except (FileNotFoundError, psutil.NoSuchProcess):
                pass
            assert time.monotonic() < until, f"no {role} worker within {seconds:g} s"
            time.sleep(0.02)

    def ours(self) -> list[psutil.Process]:
        """All processes of this set and of what used it, but for this process."""
        return [each for each in psutil.process_iter() if each.pid != os.getpid() and self._is_ours(each)]

    def strays(self) -> list[psutil.Process]:
        """Those that nobody is responsible for any more: no living ancestor is this process."""
        return [each for each in self.ours() if not _descends(each, os.getpid())]

    def _remember(self) -> None:
        """Ray's workers write over their environment: their session tells whose they are."""
        self._sessions |= {each.process.pid for each in self.state.services if each.process is not None}

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return os.getsid(process.pid) in self._sessions or process.environ().get(MARK) == str(self.home)
        except (psutil.Error, ProcessLookupError, PermissionError):
            return False


def gone_within(seconds: float, find: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    """What of it is still there then."""
    until = time.monotonic() + seconds
    while (left := find()) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _descends(process: psutil.Process, ancestor: int) -> bool:
    try:
        return any(each.pid == ancestor for each in process.parents())
    except psutil.NoSuchProcess:
        return True  # gone
