"""The complete set for one machine: Prefect, MLflow, and a Ray head with a node that offers places to workers."""

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_lib.errors import ConfigError, ServiceError
from grpo_lib.services.checks import answers, check_dashboard, check_port, check_ray_installed, own_address
from grpo_lib.services.processes import MARK, ProcessId
from grpo_lib.services.ray_nodes import HEAD, forget, head, node, nodes
from grpo_lib.services.state import ServiceState, SetState, end_leftovers, read_state, remove_state, write_state
from grpo_lib.services.supervisor import Backoff, Member, Service, Supervisor

LOOPBACK = ("127.0.0.1", "localhost")
EVERYWHERE = "0.0.0.0"


@dataclass(frozen=True, kw_only=True)
class SetOptions:
    """What `grpo up` was asked for; ``folder`` is absolute."""

    folder: Path
    host: str
    """Where Prefect and MLflow listen."""
    prefect_port: int
    mlflow_port: int
    ray_port: int
    dashboard_port: int | None
    workers: dict[str, int]
    """Places that the node offers, by role."""
    runs: int
    """Runs at a time that are started from Prefect's pages; 0: none can be."""

    @property
    def reached(self) -> str:
        """Host name under which Prefect and MLflow are reached."""
        return own_address() if self.host == EVERYWHERE else self.host

    @property
    def prefect_url(self) -> str:
        return f"http://{self.reached}:{self.prefect_port}"

    @property
    def mlflow_url(self) -> str:
        return f"http://{self.reached}:{self.mlflow_port}"

    @property
    def ray_address(self) -> str:
        """Ray listens on every interface, and gives nodes one address, which a loopback one can't be."""
        host = own_address() if self.host in (EVERYWHERE, *LOOPBACK) else socket.gethostbyname(self.host)
        return f"{host}:{self.ray_port}"


def check_set(options: SetOptions) -> None:
    """Everything that can be wrong before a process is started.

    Raises:
        GrpoError: with the remedy.
    """
    check_ray_installed()
    ports = {
        "--prefect-port": (options.host, options.prefect_port),
        "--mlflow-port": (options.host, options.mlflow_port),
        "--ray-port": (EVERYWHERE, options.ray_port),
    }
    if options.dashboard_port is not None:
        check_dashboard()
        ports["--dashboard-port"] = ("127.0.0.1", options.dashboard_port)
    taken: dict[int, str] = {}
    for name, (host, port) in ports.items():
        if port in taken:
            raise ConfigError(f"{name} {port}: {taken[port]} has the same port; give each its own")
        taken[port] = name
        check_port(name, host, port)


def services(options: SetOptions) -> list[Service]:
    """In the order of their start."""
    folder = options.folder
    log = folder / "logs" / "ray-node.log"
    asked = [
        head(folder, options.ray_port, options.ray_address, options.dashboard_port),
        node(options.ray_address, options.workers, log, mark=str(folder), after=HEAD),
        _prefect(options),
        _mlflow(options),
    ]
    return asked + ([_runs(options)] if options.runs else [])


def _environment(options: SetOptions) -> dict[str, str]:
    return dict(os.environ) | {MARK: str(options.folder), "DO_NOT_TRACK": "true"}


def _prefect(options: SetOptions) -> Service:
    settings = {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{options.folder / 'prefect.db'}",
        "PREFECT_SERVER_UI_API_URL": f"{options.prefect_url}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    command = [sys.executable, "-m", "prefect", "server", "start"]
    command += ["--host", options.host, "--port", str(options.prefect_port)]
    return Service(
        name="prefect", address=options.prefect_url, command=command, env=_environment(options) | settings,
        log=options.folder / "logs" / "prefect.log", ready=_healthy(f"{options.prefect_url}/api/health"),
    )  # fmt: skip


def _mlflow(options: SetOptions) -> Service:
    # Without this, MLflow starts eight further processes for jobs that nobody submits, 250 MB each.
    settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
    command += ["--host", options.host, "--port", str(options.mlflow_port)]
    command += ["--backend-store-uri", f"sqlite:///{options.folder / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(options.folder / "mlflow-artifacts")]
    if options.host not in LOOPBACK:  # it answers no request, and no page, that names another host
        names = [name for host in _names(options) for name in (host, f"{host}:{options.mlflow_port}")]
        origins = [f"http://{host}:{options.mlflow_port}" for host in _names(options)]
        command += ["--allowed-hosts", ",".join(names), "--cors-allowed-origins", ",".join(origins)]
    return Service(
        name="mlflow", address=options.mlflow_url, command=command, env=_environment(options) | settings,
        log=options.folder / "logs" / "mlflow.log", ready=_healthy(f"{options.mlflow_url}/health"),
    )  # fmt: skip


def _runs(options: SetOptions) -> Service:
    """Puts the deployments on Prefect's server, and carries out in the folder of this process what is started there."""
    settings = [
        f"tracking.uri={options.mlflow_url}",
        f"placement.kind={'ray' if all(options.workers.get(role) for role in ('rollout', 'train')) else 'local'}",
    ]
    return Service(
        name="runs", address=options.prefect_url,
        command=[sys.executable, "-m", "flows.cli.main", "serve", *settings, "--limit", str(options.runs)],
        env=_environment(options) | {"PREFECT_API_URL": f"{options.prefect_url}/api"},
        log=options.folder / "logs" / "runs.log", ready=lambda said: "started!" in said, after="prefect",
    )  # fmt: skip


def _names(options: SetOptions) -> list[str]:
    """Names that people may use for this machine."""
    return list(dict.fromkeys([options.reached, socket.gethostname(), socket.getfqdn(), *LOOPBACK]))


def _healthy(url: str) -> Callable[[str], bool]:
    return lambda _: answers(url)


class LocalSet:
    """A set that runs: its supervisor, and what is written down of it.

    Args:
        say: gets a line for people at every change.
    """

    def __init__(self, options: SetOptions, say: Callable[[str], None], backoff: Backoff | None = None) -> None:
        self.options, self._say = options, say
        self._supervisor = Supervisor(services(options), self._changed, backoff)
        self._ready = False

    @property
    def waits_for(self) -> list[str]:
        """Services that are not up."""
        return [each.service.name for each in self._supervisor.members if each.phase != "up"]

    def step(self) -> None:
        """One look at every service.

        Raises:
            ServiceError: one does not come up, or dies again and again.
        """
        self._supervisor.step()
        if not self._ready and self._supervisor.all_up:
            self._check_places()
            self._ready = True
            self._write()

    @property
    def ready(self) -> bool:
        """Whether everything was up at least once."""
        return self._ready

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Ends all; see `Supervisor.stop`."""
        self._supervisor.stop(hurry)
        forget(self.options.folder, self.options.ray_address)
        remove_state(self.options.folder)

    def _check_places(self) -> None:
        """Whether the cluster itself says that it offers what was asked for."""
        offered = [each.resources for each in nodes(self.options.ray_address) if each.alive and not each.head]
        for role, count in self.options.workers.items():
            found = sum(each.get(role.upper(), 0) for each in offered)
            if found < count:
                raise ServiceError(f"the Ray cluster offers {found:g} places for {role} workers, asked were {count}")

    def _changed(self, _: Member, line: str) -> None:
        self._write()
        self._say(line)

    def _write(self) -> None:
        states = [
            ServiceState(
                name=each.service.name,
                address=each.service.address,
                phase=each.phase,
                process=None if each.process is None else ProcessId.of(each.process.pid),
                since=each.since,
                restarts=each.restarts,
                log=str(each.service.log),
            )
            for each in self._supervisor.members
        ]
        state = SetState(
            supervisor=ProcessId.of(os.getpid()),
            ready=self._ready,
            ray_address=self.options.ray_address,
            services=states,
        )
        try:
            write_state(self.options.folder, state)
        except OSError as error:  # the services can go on
            self._say(f"can't write down what runs, `grpo status` and `grpo down` don't see it: {error}")


def clear(folder: Path) -> int:
    """Ends what a killed `grpo up` has left, and returns how many processes that were. Call it with the folder held."""
    state = read_state(folder)
    if state is None:
        return 0
    ended = end_leftovers(folder, state)
    forget(folder, state.ray_address)
    remove_state(folder)
    return ended
