"""The processes of a Ray cluster: a head that carries no worker, and nodes that do.

The head only keeps the cluster's books, on disk. When it dies it is started again at the same port with the same books,
and nodes, workers and flows live on meanwhile: nothing of theirs runs inside it (decision 9).
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, Field

from grpo_lib.errors import ConfigError, ServiceError
from grpo_lib.placement.clusters import ray_folder
from grpo_lib.services.checks import free_port, listens, split_address
from grpo_lib.services.processes import MARK
from grpo_lib.services.supervisor import Service

ROLES = ("rollout", "train", "score")
HEAD, NODE = "ray head", "ray node"
STARTED = "Ray runtime started."
RECONNECT_SECONDS = 600
"""For which nodes, workers and flows go on without a head; Ray's own 60 s may be less than a busy machine needs."""
HEAD_STORE_BYTES = 80_000_000
"""Ray's least, nearly: no object is ever kept at the head."""
NODE_STORE_BYTES = 256 * 2**20
"""Of shared memory. Data goes through the store of the run; only messages go through Ray."""
PROBE_SECONDS = 60.0
TRIES = 2
"""`ray start` gives itself 30 s, which can be too few on a machine that is busy."""
_CURRENT = "ray_current_cluster"
_RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats")
# Ray's fixed ports would collide with those of another cluster on this machine.
_PORTS = ("--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-agent-listen-port", "0")


class Node(BaseModel):
    """A machine of a cluster."""

    id: str
    host: str
    alive: bool
    head: bool
    resources: dict[str, float] = Field(description="What it offers.")


def ray_environment(mark: str) -> dict[str, str]:
    """Environment of Ray's processes, and so of the workers."""
    return dict(os.environ) | {
        MARK: mark,
        "RAY_AUTH_MODE": "token",
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_SECONDS),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # workers have no requests to serve to their end
        "RAY_agent_register_timeout_ms": "120000",  # by default a node that is slow to start ends itself after 30 s
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def head(folder: Path, port: int, address: str, dashboard_port: int | None) -> Service:
    """
    Args:
        folder: for its books and log.
        address: HOST:PORT under which nodes find it.
        dashboard_port: None: no dashboard.
    """
    books, temporary = folder / "ray", head_folder(port)
    env = ray_environment(str(folder)) | {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(books)}
    command = [*_RAY, *_PORTS, "--head", "--port", str(port), "--temp-dir", str(temporary)]
    command += ["--node-ip-address", address.rpartition(":")[0]]
    command += ["--num-cpus", "0", "--num-gpus", "0", "--object-store-memory", str(HEAD_STORE_BYTES)]
    command += ["--no-monitor", "--include-log-monitor", "false"]
    command += ["--include-dashboard", "false" if dashboard_port is None else "true"]
    if dashboard_port is not None:
        command += ["--dashboard-port", str(dashboard_port)]
    if importlib.util.find_spec("grpc") is not None:  # then Ray serves remote drivers too, by default at a fixed port
        command += ["--ray-client-server-port", str(free_port())]

    def prepare() -> None:
        # With this file, and a node that lives on, `ray start` believes that the old head still runs.
        (temporary / _CURRENT).unlink(missing_ok=True)

    return Service(
        name=HEAD, address=address, command=command, env=env, log=folder / "logs" / "ray-head.log",
        ready=lambda said: STARTED in said and listens(address), prepare=prepare, tries=TRIES,
    )  # fmt: skip


def node(
    address: str, offers: Mapping[str, int], log: Path, mark: str, *, gpus: int | None = None, cpus: int | None = None,
    after: str | None = None,
) -> Service:  # fmt: skip
    """A machine that offers places to workers.

    Args:
        address: of the head.
        offers: workers by role.
        gpus, cpus: None: what Ray finds.
    """
    places = {role.upper(): count for role, count in offers.items() if count}
    command = [*_RAY, *_PORTS, "--address", address, "--temp-dir", ray_folder(), "--resources", json.dumps(places)]
    command += ["--object-store-memory", str(NODE_STORE_BYTES)]
    for option, count in (("--num-gpus", gpus), ("--num-cpus", cpus)):
        if count is not None:
            command += [option, str(count)]
    return Service(
        name=NODE, address=address, command=command, env=ray_environment(mark), log=log,
        ready=lambda said: STARTED in said, after=after, tries=TRIES,
    )  # fmt: skip


def head_folder(port: int) -> Path:
    """Temporary folder of a head: short, since paths of sockets may have no more than 107 letters."""
    return Path(ray_folder()).parent / f"grpo-head-{os.getuid()}-{port}"


def forget(folder: Path, address: str) -> None:
    """Removes the books of a head that has ended, and the note by which ``address: auto`` finds it."""
    shutil.rmtree(folder / "ray", ignore_errors=True)
    shutil.rmtree(head_folder(split_address(address)[1]), ignore_errors=True)
    if current_cluster() == address:
        (Path(ray_folder()) / _CURRENT).unlink(missing_ok=True)


def current_cluster() -> str | None:
    """The cluster whose node was started last on this machine: what ``placement.ray.address: auto`` means."""
    try:
        return (Path(ray_folder()) / _CURRENT).read_text(encoding="ascii").strip() or None
    except OSError:
        return None


def nodes(address: str) -> list[Node]:
    """The machines of a cluster, asked for in a process of its own: a lost cluster would end this one.

    Raises:
        ConfigError: nobody listens there, or the token does not fit.
        ServiceError: it listens and does not answer.
    """
    if not listens(address, 5):
        raise ConfigError(f"no Ray cluster answers at {address}; start one with `grpo up`, or correct --address")
    command = [sys.executable, "-m", "grpo_lib.placement.ray_probe", address]
    try:
        done = subprocess.run(
            command, env=ray_environment(""), capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ServiceError(f"the Ray cluster at {address} did not answer within {PROBE_SECONDS:g} s") from None
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise ServiceError(f"could not ask the Ray cluster at {address}: {done.stderr.strip()[-1000:]}") from None
    if "refused" in answer:
        raise ConfigError(f"the Ray cluster at {address} {answer['refused']}")
    return [Node.model_validate(each) for each in answer["nodes"]]
