"""Ray's one door: joining a cluster as a driver, its named workers, and waiting for what they answer.

Workers are named, detached actors: they outlive flows, keep their engines warm, and are restarted by Ray when they are
killed. Ray never runs a call again by itself (``max_task_retries=0``). A handle outlives its worker, and calls go there
directly: they work while the head of the cluster is gone, and only what asks the head waits for it.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from grpo_lib.services.checks import listens, token_file
from grpo_lib.services.ray_nodes import current_cluster

# Read when Ray is imported. The head may be gone for minutes.
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
if os.environ.get("RAY_AUTH_TOKEN") or token_file().is_file():
    os.environ.setdefault("RAY_AUTH_MODE", "token")

import ray
from pydantic import ValidationError
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError

from grpo_lib.placement.calls import ROLES
from grpo_lib.placement.clusters import ray_folder
from grpo_lib.placement.ray_worker import StageWorker
from grpo_lib.placement.worker_status import WorkerStatus

NAMESPACE = "grpo"
WORKER_PREFIX = "grpo-"
ANSWER_SECONDS = 10.0
"""Within which a living worker answers a question."""
POLL_SECONDS = 0.5
GONE = (RayError, ConnectionError, OSError)
"""What a lost worker or cluster looks like."""
SILENT = GetTimeoutError
"""What a worker looks like that is busy with something that lets nothing else in its process go on."""


def connect(address: str) -> None:
    """Joins the cluster as a driver, once.

    Raises:
        ConnectionError: nobody answers there, or the token does not fit.
    """
    if ray.is_initialized():
        return
    if address == "auto":
        address = current_cluster() or ""
        if not address:
            raise ConnectionError("no Ray cluster was started on this machine")
    if not listens(address):  # Ray itself would ask for minutes
        raise ConnectionError(f"nobody answers at {address}")
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            _temp_dir=ray_folder(),
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (RuntimeError, ValueError) as error:
        raise ConnectionError(str(error)) from error


def within(seconds: float, ask: Callable[[], Any]) -> Any:
    """The head's answer; it gives none while it is gone."""
    answer: Future[Any] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()  # a pool's thread would keep the process from ending
    return answer.result(seconds)


def statuses(address: str) -> list[WorkerStatus]:
    """What every worker of a cluster says of itself.

    Raises:
        ConnectionError: no cluster answers.
    """
    connect(address)
    found: dict[str, Any] = {}
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [
        each["name"] for each in named if each["namespace"] == NAMESPACE and each["name"].startswith(WORKER_PREFIX)
    ]
    for name in sorted(names):
        found[name] = ray.get_actor(name, namespace=NAMESPACE).status.remote()
    ray.wait(list(found.values()), num_returns=len(found), timeout=ANSWER_SECONDS) if found else None
    return [_status(name, answer) for name, answer in found.items()]


def _status(name: str, answer: Any) -> WorkerStatus:
    try:
        return WorkerStatus.model_validate_json(ray.get(answer, timeout=0.1))
    except RayActorError:
        state = "starting"
    except (RayError, ValidationError):  # the second: it is of another version
        state = "unreachable"
    role = next((each for each in ROLES if f"-{each}-" in name), "?")
    return WorkerStatus(name=name, role=role, host="", pid=0, state=state)


def worker_name(role: str, place: int) -> str:
    return f"{WORKER_PREFIX}{role}-{place}"


def worker_handle(role: str, place: int, gpus: float) -> Any:
    """The handle of a worker, which is made if there is none; Ray starts it where its resource is free."""
    name = worker_name(role, place)
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": 16,
        "num_cpus": 0,
        "num_gpus": gpus,
        "resources": {role.upper(): 1},
    }
    return ray.remote(StageWorker).options(**options).remote(name, role, gpus)


def restart(handle: Any) -> None:
    """Kills the worker; Ray starts it anew, with the code that there is now."""
    ray.kill(handle, no_restart=False)


def end(handle: Any) -> None:
    """Kills the worker for good; the next to ask for it makes another."""
    ray.kill(handle, no_restart=True)


def is_dead(error: BaseException) -> bool:
    """Whether a worker will not come back by itself, as one that starts again does."""
    return isinstance(error, ActorDiedError)


def answer_of(call: Any) -> Any:
    """Waits in small steps: a blocking `ray.get` would see a signal only at its end.

    Raises:
        GetTimeoutError: the worker does not answer within ``ANSWER_SECONDS``.
    """
    until = time.monotonic() + ANSWER_SECONDS + POLL_SECONDS
    while not ray.wait([call], timeout=POLL_SECONDS)[0]:
        if time.monotonic() > until:
            raise GetTimeoutError(f"no answer within {ANSWER_SECONDS:g} s")
    return ray.get(call)


def offered(resource: str) -> float:
    """How much of a resource the cluster has, used or not.

    Raises:
        TimeoutError, RayError: its head does not answer.
    """
    return float(within(ANSWER_SECONDS, ray.cluster_resources).get(resource, 0))
