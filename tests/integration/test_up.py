"""`grpo up` with the real services: killed one by one, they are there again; ended, nothing is left of them."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_lib.services.checks import free_port
from grpo_lib.services.processes import MARK, runs

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="Ray's nodes as on Linux")]
GRPO = [sys.executable, "-m", "flows.cli.main"]
START_SECONDS = 400
CALLS = """
import os, time
from grpo_lib.placement.ray_connection import connect  # sets what Ray reads when it is imported
import ray
connect("auto")

class Counter:
    def __init__(self):
        self.count = 0
    def add(self):
        self.count += 1
        return os.getpid(), self.count

how = {"lifetime": "detached", "max_restarts": -1, "resources": {"ROLLOUT": 1}}
place = ray.remote(Counter).options(name="counter", namespace="test", **how)
counter = place.remote()
while True:
    print(*ray.get(counter.add.remote()), flush=True)
    time.sleep(0.2)
"""


class Set:
    """A set of services in a folder of its own, with its own token and temporary folder of Ray."""

    def __init__(self, detach: bool = False) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="gr", dir="/tmp"))  # short: paths of sockets are limited
        self.folder = self.place / "set"
        self.ports = {name: free_port() for name in ("prefect", "mlflow", "ray")}
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "RAY_", MARK))}
        self.env |= {
            "RAY_TMPDIR": str(self.place), "RAY_AUTH_TOKEN_PATH": str(self.place / "token"),
            "PREFECT_HOME": str(self.place / "prefect"), "COLUMNS": "200",
        }  # fmt: skip
        self.seen: set[psutil.Process] = set()
        self.log = self.place / "log"
        words = ["up", *self.options, *(["--detach", "--runs", "0"] if detach else [])]
        for name, port in self.ports.items():
            words += [f"--{name}-port", str(port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*GRPO, *words], env=self.env, stdout=log, stderr=log)

    @property
    def options(self) -> list[str]:
        return ["--folder", str(self.folder)]

    @property
    def said(self) -> str:
        return self.log.read_text()

    def grpo(self, *words: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*GRPO, *words], env=self.env | (env or {}), capture_output=True, text=True, timeout=200, check=False
        )

    def status(self) -> dict[str, Any]:
        done = self.grpo("status", *self.options, "--json")
        assert done.stdout, done.stderr[-3000:]
        return json.loads(done.stdout)

    def service(self, name: str) -> dict[str, Any]:
        state = json.loads((self.folder / "up.json").read_text())
        return next(each for each in state["services"] if each["name"] == name)

    def until(self, condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, self.said[-4000:]
            self.look()
            time.sleep(0.2)

    def look(self) -> None:
        """Remembers every process that belongs to the set."""
        for process in psutil.process_iter():
            try:
                if self._belongs(process):
                    self.seen |= {process, *process.children(recursive=True)}
            except psutil.Error:
                continue

    def left(self) -> list[psutil.Process]:
        self.look()
        return [each for each in self.seen if runs(each)]

    def _belongs(self, process: psutil.Process) -> bool:
        if process.environ().get(MARK) == str(self.folder):
            return True
        return process.pid != os.getpid() and any(self.place.name in word for word in process.cmdline())

    def back(self, name: str) -> None:
        """Waits until a service was started again and is up."""
        self.until(lambda: self.service(name)["phase"] == "up" and self.service(name)["restarts"] > 0)

    def remove(self) -> None:
        for each in self.left():
            each.kill()
        self.process.wait()
        shutil.rmtree(self.place, ignore_errors=True)


@pytest.fixture(scope="module")
def running() -> Iterator[Set]:
    made = Set()
    try:
        made.until(lambda: "all is up" in made.said, START_SECONDS)
        yield made
    finally:
        made.remove()


@pytest.fixture
def calls(running: Set) -> Iterator[Callable[[], list[tuple[int, int]]]]:
    """A driver that found the cluster by `address: auto` and calls a worker all the time: what it got, so far."""
    log = running.place / "calls.log"
    with log.open("wb") as output:
        driver = subprocess.Popen([sys.executable, "-c", CALLS], env=running.env, stdout=output, stderr=output)

    def answers() -> list[tuple[int, int]]:
        lines = [line.split() for line in log.read_text().splitlines()]
        return [(int(line[0]), int(line[1])) for line in lines if len(line) == 2 and line[0].isdecimal()]

    try:
        running.until(lambda: bool(answers()) or driver.poll() is not None)
        assert driver.poll() is None, log.read_text()[-3000:]
        yield answers
        assert driver.poll() is None, log.read_text()[-3000:]
    finally:
        driver.kill()
        driver.wait()


def ask(url: str, **body: object) -> Any:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.loads(answer.read() or "null")


def prefect(running: Set) -> str:
    return f"http://127.0.0.1:{running.ports['prefect']}/api"


def mlflow(running: Set) -> str:
    return f"http://127.0.0.1:{running.ports['mlflow']}/api/2.0/mlflow"


def test_everything_is_up_and_status_says_so(running: Set) -> None:
    found = running.status()
    assert found["problem"] is None
    assert {each["name"]: each["state"] for each in found["services"]} == dict.fromkeys(
        ("prefect", "mlflow", "ray head", "ray node", "runs"), "up"
    )
    assert all(each["memory_bytes"] > 2**24 and each["restarts"] == 0 for each in found["services"])
    (node,) = found["nodes"]
    assert node["resources"]["ROLLOUT"] == node["resources"]["TRAIN"] == 1 and "SCORE" not in node["resources"]
    assert found["workers"] == [] and "none yet" in running.grpo("status", *running.options).stdout
    assert ask(f"{prefect(running)}/health") is True
    assert f"export PREFECT_API_URL={prefect(running)}" in running.said
    forms = {each["name"]: each for each in ask(f"{prefect(running)}/deployments/filter", limit=20)}
    assert {"train", "evaluate", "retrain", "rerun-stage", "rescore", "sweep"} == forms.keys()
    tracking = forms["train"]["parameters"]["config"]["tracking"]
    assert tracking["uri"] == f"http://127.0.0.1:{running.ports['mlflow']}"
    token = running.place / "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and str(token) in running.said
    assert token.read_text() not in running.said


def test_a_second_set_in_the_folder_is_refused_and_changes_nothing(running: Set) -> None:
    before = (running.folder / "up.json").read_bytes()
    done = running.grpo("up", *running.options)
    assert done.returncode == 2 and f"`grpo up` already runs in {running.folder}" in done.stderr
    assert (running.folder / "up.json").read_bytes() == before


def test_a_machine_with_another_token_is_refused_at_once(running: Set) -> None:
    address = running.status()["address"]
    began = time.monotonic()
    done = running.grpo("worker", "--role", "rollout", "--address", address, env={"RAY_AUTH_TOKEN": "0" * 64})
    assert done.returncode == 2 and "refuses the token of this machine" in done.stderr
    assert time.monotonic() - began < 60


def test_doctor_looks_at_all_of_it_and_says_what_is_wrong(running: Set) -> None:
    where = [
        "--store",
        str(running.place / "store"),
        "--mlflow",
        f"http://127.0.0.1:{running.ports['mlflow']}",
        "--json",
    ]
    here = {"PREFECT_API_URL": prefect(running)}
    done = running.grpo("doctor", *where, env=here)
    found = {each["check"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 0 and {each["state"] for each in found.values()} <= {"ok", "warning"}, found
    assert found["prefect"]["found"].startswith(f"{prefect(running)}, version 3.7.")
    assert "1 machines, 2 places for workers, 0 are warm" in found["ray"]["found"]
    done = running.grpo("doctor", *where, env=here | {"RAY_AUTH_TOKEN": "0" * 64})
    wrong = {each["check"]: each["found"] for each in json.loads(done.stdout) if each["state"] == "wrong"}
    assert done.returncode == 1 and list(wrong) == ["ray"] and "refuses the token of this machine" in wrong["ray"]


def test_killed_servers_are_back_with_what_they_knew(running: Set) -> None:
    ask(f"{prefect(running)}/variables/", name="kept", value="yes")
    experiment = ask(f"{mlflow(running)}/experiments/create", name="kept")["experiment_id"]
    for name in ("prefect", "mlflow"):
        os.kill(running.service(name)["process"]["pid"], signal.SIGKILL)
    for name in ("prefect", "mlflow"):
        running.back(name)
        assert f"{name} was killed by signal 9; it starts again in 0.5 s" in running.said
    assert ask(f"{prefect(running)}/variables/name/kept")["value"] == "yes"
    found = ask(f"{mlflow(running)}/experiments/get-by-name?experiment_name=kept")
    assert found["experiment"]["experiment_id"] == experiment


def test_a_killed_head_is_back_while_worker_and_driver_go_on(
    running: Set, calls: Callable[[], list[tuple[int, int]]]
) -> None:
    head = psutil.Process(running.service("ray head")["process"]["pid"])
    (books,) = [each for each in head.children() if each.name() == "gcs_server"]
    before = calls()[-1]
    books.kill()
    running.until(lambda: running.service("ray head")["phase"] != "up")
    during = calls()[-1]
    running.until(lambda: calls()[-1][1] > during[1] + 3 and running.service("ray head")["phase"] != "up")
    running.back("ray head")
    after = calls()[-1]
    assert after[0] == before[0] and after[1] > before[1]  # the same process, with its memory
    found = running.status()
    assert found["problem"] is None and len(found["nodes"]) == 1


def test_a_killed_node_is_back_and_offers_the_same(running: Set) -> None:
    os.kill(running.service("ray node")["process"]["pid"], signal.SIGKILL)
    running.back("ray node")
    running.until(lambda: len(running.status()["nodes"]) == 1)  # the head notices a death after a few seconds
    (node,) = running.status()["nodes"]
    assert node["resources"]["ROLLOUT"] == node["resources"]["TRAIN"] == 1


def test_another_machine_joins_and_leaves_without_a_trace(running: Set) -> None:
    log = running.place / "worker.log"
    command = [*GRPO, "worker", "--role", "score", "--workers", "3", "--cpus", "1", "--gpus", "0"]
    command += ["--address", running.status()["address"], "--folder", str(running.place / "worker")]
    with log.open("wb") as output:
        worker = subprocess.Popen(command, env=running.env, stdout=output, stderr=output)
    try:
        running.until(lambda: "offers" in log.read_text() or worker.poll() is not None)
        assert "offers 1 CPU cores, 3 score to the cluster" in log.read_text(), log.read_text()
        assert sorted(each["resources"].get("SCORE", 0) for each in running.status()["nodes"]) == [0, 3]
        started = psutil.Process(worker.pid).children(recursive=True)
        assert len(started) > 3
        worker.send_signal(signal.SIGINT)
        assert worker.wait(60) == 0
        assert [each for each in started if runs(each)] == []
        running.until(lambda: len(running.status()["nodes"]) == 1)
    finally:
        worker.kill()
        worker.wait()


def test_down_leaves_no_process_no_port_and_no_note_of_the_cluster(running: Set) -> None:
    running.look()
    assert len(running.seen) > 20
    done = running.grpo("down", *running.options)
    assert done.returncode == 0 and "ended: no process is left" in done.stdout
    assert running.process.wait(10) == 0
    assert running.left() == []
    nothing_is_left(running)
    assert "nothing runs in" in running.grpo("down", *running.options).stdout


def test_a_detached_set_whose_supervisor_is_killed_ends_and_down_tidies_up() -> None:
    detached = Set(detach=True)
    try:
        assert detached.process.wait(START_SECONDS) == 0, detached.said
        assert "all is up" in detached.said
        supervisor = json.loads((detached.folder / "up.json").read_text())["supervisor"]["pid"]
        detached.look()
        assert psutil.Process(supervisor) in detached.seen
        os.kill(supervisor, signal.SIGKILL)
        done = detached.grpo("status", *detached.options)
        assert done.returncode == 1 and "`grpo up` was killed" in done.stdout
        done = detached.grpo("down", *detached.options)
        assert done.returncode == 0, done.stderr
        assert detached.left() == []
        nothing_is_left(detached)
    finally:
        detached.remove()


def nothing_is_left(ended: Set) -> None:
    for port in ended.ports.values():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("0.0.0.0", port))
            probe.listen()
    assert not (ended.folder / "up.json").exists() and not (ended.folder / "ray").exists()
    assert not (ended.place / "ray" / "ray_current_cluster").exists()
    assert [each.name for each in ended.place.glob("grpo-head-*")] == []
