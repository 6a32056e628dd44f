"""The cluster of deployments/compose as plain processes: its commands and environments, with other hosts and ports."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from grpo_lib.services.checks import free_port, listens, own_address
from grpo_lib.services.processes import runs
from tests.compose_files import ROOT, make_env, services
from tests.programs import missing, postgres
from tests.s3_server import s3_server

START_SECONDS = 240
SETTLE_SECONDS = 60
RESTARTS = 3
MARK = "GRPO_TESTS_OF"
NOBODY = "nobody"
"""Who runs PostgreSQL, which refuses to be root's."""


class ClusterSet:
    """A cluster that runs; ``secrets`` are those of its `.env`, and the key of a judge."""

    def __init__(self, s3: str) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="gc", dir="/tmp"))  # short: paths of sockets are limited
        self.home.chmod(0o755)  # for PostgreSQL's user
        self.logs = self.home / "logs"
        for name in ("logs", "ca", "state", "tmp", "user"):
            (self.home / name).mkdir()
        self.secrets = make_env(self.home / ".env") | {"JUDGE_API_KEY": secrets.token_hex(24)}
        self.s3_url = s3
        ports = {name: free_port() for name in ("postgres", "prefect-server", "mlflow", "ray-head")}
        self.prefect_url = f"http://127.0.0.1:{ports['prefect-server']}/api"
        self.mlflow_url = f"http://127.0.0.1:{ports['mlflow']}"
        self.ray_address = f"{own_address()}:{ports['ray-head']}"
        self.ports = ports
        self._services = services(self.secrets | {"PREFECT_PORT": str(ports["prefect-server"])})
        self._places = {
            "http://prefect-server:4200": self.prefect_url.removesuffix("/api"),
            "http://mlflow:5000": self.mlflow_url,
            "http://s3:9000": s3,
            "ray-head:6379": self.ray_address,
            "/app/": f"{ROOT}/",
            "/app": str(ROOT),
            "/state": str(self.home / "state"),
            "/ca": str(self.home / "ca"),
            "0.0.0.0": "127.0.0.1",
            "4200": str(ports["prefect-server"]),
            "5000": str(ports["mlflow"]),
            "6379": str(ports["ray-head"]),
            "5432": str(ports["postgres"]),
            "postgres": "127.0.0.1",
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self, service: str) -> dict[str, str]:
        """Nothing of this process but where programs are."""
        given = dict(self._services[service].get("environment", {}))
        if "MLFLOW_TRACKING_PASSWORD" in given:  # runs: a user's own key besides
            given["JUDGE_API_KEY"] = self.secrets["JUDGE_API_KEY"]
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.home / "user"),
            "TMPDIR": str(self.home / "tmp"),
            "RAY_TMPDIR": str(self.home),
            "PREFECT_HOME": str(self.home / "user" / service),
            "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
            "DO_NOT_TRACK": "true",
            MARK: str(self.home),
        } | {name: self._here(str(value)) for name, value in given.items()}

    def command(self, service: str) -> list[str]:
        """Entry point and command; containers have `tini` besides."""
        words = [*self._services[service].get("entrypoint", []), *self._services[service]["command"]]
        words = [self._here(str(word)) for word in words]
        return words[2:] if words[:2] == ["tini", "--"] else words

    def start(self, service: str, *more: str) -> None:
        """Starts a service and returns at once."""
        with self._log(service) as log:
            self._running[service] = subprocess.Popen(
                [*self.command(service), *more], env=self.environment(service), cwd=ROOT, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def once(self, service: str) -> str:
        """Runs a service that ends by itself; returns what it said."""
        self.start(service)
        code = self._running.pop(service).wait(START_SECONDS)
        assert code == 0, self.said(service)
        return self.said(service)

    def said(self, service: str) -> str:
        return (self.logs / service).read_text(errors="replace")[-3000:]

    def wait(self, service: str, ready: Callable[[], bool]) -> None:
        """Starts again what ended, as the file's `restart` asks."""
        until, restarts = time.monotonic() + START_SECONDS, 0
        while not ready():
            if self._running[service].poll() is not None:
                assert restarts < RESTARTS and "restart" in self._services[service], f"{service}: {self.said(service)}"
                self.start(service)
                restarts += 1
            assert time.monotonic() < until, f"{service} did not come up: {self.said(service)}"
            time.sleep(0.2)

    def start_postgres(self) -> None:
        """With the roles and databases of deployments/cluster/databases.sh."""
        programs, data = postgres() or missing("PostgreSQL"), self.home / "postgres"
        user = {"user": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        data.mkdir()
        (password := self.home / "password").write_text(self.secrets["POSTGRES_PASSWORD"])
        if user:
            for each in (data, password):
                shutil.chown(each, NOBODY)
        plain = {"PATH": f"{programs}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8", MARK: str(self.home)}
        options = ["--username=postgres", "--auth=scram-sha-256", f"--pwfile={password}", "--no-sync"]
        making = [f"{programs}/initdb", f"--pgdata={data}", *options]
        subprocess.run(making, env=plain, cwd="/", check=True, capture_output=True, **user)
        password.unlink()
        port = str(self.ports["postgres"])
        settings = ["-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={data}", "-c", "fsync=off"]
        with self._log("postgres") as log:
            self._running["postgres"] = subprocess.Popen(
                [f"{programs}/postgres", "-D", str(data), "-p", port, *settings], env=plain, cwd="/", stdout=log,
                stderr=log, start_new_session=True, **user,
            )  # fmt: skip
        given = {name: str(value) for name, value in self._services["postgres"]["environment"].items()}
        self._psql = plain | given | {"PGHOST": "127.0.0.1", "PGPORT": port, "PGPASSWORD": given["POSTGRES_PASSWORD"]}
        asking = [f"{programs}/pg_isready", "--host=127.0.0.1", "--username=postgres"]
        self.wait("postgres", lambda: subprocess.run(asking, env=self._psql, capture_output=True).returncode == 0)
        script = next(each.split(":")[0] for each in self._services["postgres"]["volumes"] if "initdb.d" in each)
        made = subprocess.run(
            [str(ROOT / "deployments" / "compose" / script)], env=self._psql, capture_output=True, text=True
        )
        assert made.returncode == 0, made.stderr

    def postgres(self, program: str, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Runs one of PostgreSQL's programs, as its administrator unless the environment says otherwise."""
        return subprocess.run(
            [program, *words], env=self._psql | environment, capture_output=True, text=True, timeout=60, check=False
        )

    def start_all(self) -> None:
        """In the order of the file's `depends_on`."""
        self.start_postgres()
        self.once("authority")
        self.start("prefect-server")
        self.start("mlflow")
        self.start("ray-head")
        self.wait("prefect-server", lambda: healthy(f"{self.prefect_url}/health"))
        self.wait("mlflow", lambda: healthy(f"{self.mlflow_url}/health"))
        self.once("prepare")
        self.wait("ray-head", lambda: listens(self.ray_address))
        self.start("ray-train")
        self.once("deploy")
        self.start("prefect-worker")
        self.wait("ray-train", lambda: "ray node is up" in self.said("ray-train"))
        self.wait("prefect-worker", lambda: "started!" in self.said("prefect-worker"))

    def stop(self) -> list[psutil.Process]:
        """Ends all; returns what is left all the same."""
        ours = [each for process in self._running.values() for each in _family(process.pid)]
        # As Compose does, one after the other: a worker that ends tells Prefect's server.
        for service in ("prefect-worker", "ray-train", "ray-head", "mlflow", "prefect-server", "postgres"):
            if service in self._running:
                self._running[service].terminate()
                try:
                    self._running[service].wait(SETTLE_SECONDS)
                except subprocess.TimeoutExpired:
                    self._running[service].kill()
        _, there = psutil.wait_procs(ours, SETTLE_SECONDS)  # Ray's agents look every few seconds for their parent
        left = [each for each in there if runs(each)]  # not zombies that nobody collects
        for each in left:
            each.kill()
        shutil.rmtree(self.home, ignore_errors=True)
        return left

    def _here(self, text: str) -> str:
        if text in self._places:
            return self._places[text]
        for there, here in self._places.items():
            if there.startswith(("http:", "/")) or there == "ray-head:6379":
                text = text.replace(there, here) if there.startswith("http") or text.startswith(there) else text
        return text

    @contextmanager
    def _log(self, service: str) -> Iterator[Any]:
        with (self.logs / service).open("ab") as log:
            yield log


def healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextmanager
def cluster_set() -> Iterator[ClusterSet]:
    """A cluster, while the block runs."""
    with s3_server() as s3:
        cluster = ClusterSet(s3)
        try:
            cluster.start_all()
            yield cluster
        except BaseException:
            cluster.stop()
            raise
        left = cluster.stop()
        assert left == [], f"left behind: {left}"
