"""The workers of a run: one for each unit of the resources ``ROLLOUT``, ``TRAIN`` and ``SCORE`` that it asks for.

A stage goes to a worker that is free; the caller waits for it, relays what it says, and cancels it when it is itself
cancelled. When a worker is lost the stage fails, and whether to try again is the Prefect task's to decide: the next
attempt first waits here until the worker is ready again. Only JSON goes over the wire; data goes through the store.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from pydantic import ValidationError

from grpo_lib.config import RunConfig
from grpo_lib.config_placement import RayConfig
from grpo_lib.errors import ConfigError, NobodyOffersError, StageCancelledError, WorkerError, WorkerLostError
from grpo_lib.placement.calls import StageCall
from grpo_lib.placement.code_version import code_digest
from grpo_lib.placement.failures import error_class
from grpo_lib.placement.ray_connection import (
    GONE,
    POLL_SECONDS,
    SILENT,
    answer_of,
    connect,
    end,
    is_dead,
    offered,
    restart,
    worker_handle,
    worker_name,
)
from grpo_lib.placement.worker_status import WorkerStatus
from grpo_lib.progress import progress
from grpo_lib.storage.manifests import ArtifactRef

CANCEL_SECONDS = 10.0
"""For which a cancelled stage may go on until its worker is killed."""
RETRY_SECONDS = 0.5
Message = Mapping[str, Any]
OnMessage = Callable[[Message], None]


class Cluster:
    """The workers that one run uses.

    Args:
        config: where they are and how many.
    """

    def __init__(self, config: RunConfig) -> None:
        self._ray, self._wait, self._run = config.placement.ray, config.placement.wait, config.run_name
        self._handles: dict[str, Any] = {}
        self._free = {role: list(range(count)) for role, count in asked(self._ray).items()}
        self._changed = threading.Condition()
        self._connecting = threading.Lock()
        self._stopped = threading.Event()
        self._doing: dict[tuple[str, int], str] = {}
        """By role and place of a worker that was busy when it was last asked: the key of its stage."""
        self.epoch: int | None = None
        """Of the training flow."""

    def check(self) -> None:
        """Waits until all workers are there.

        Raises:
            WorkerLostError: after ``placement.wait`` seconds, with what is missing and the command that starts it.
        """
        deadline = time.monotonic() + self._wait
        all_places = [(role, place) for role, places in self._free.items() for place in places]
        for each in all_places:
            if time.monotonic() > deadline:
                break
            with suppress(*GONE):  # they start side by side
                self._worker(*each)
        for each in all_places:
            self._ready(*each, deadline)

    def run(self, role: str, call: StageCall, on_message: OnMessage) -> ArtifactRef:
        """Has a worker of that role run a stage, and waits for it.

        Args:
            on_message: gets progress, notes and log lines as they come.

        Raises:
            GrpoError: what the stage raised.
            WorkerError: the stage raised anything else.
            WorkerLostError: the worker died, or the stage took longer than ``placement.ray.stage_seconds``.
        """
        call = call.model_copy(update={"epoch": self.epoch})
        with self._taken(role, call.key) as (place, worker):
            deadline = time.monotonic() + self._ray.stage_seconds
            name = worker_name(role, place)
            try:
                worker, answer = self._started(worker, role, place, call, deadline)
            except GONE as error:
                raise _lost(name, call, error) from error
            if "refused" in answer:
                raise StageCancelledError(answer["refused"])
            try:
                return self._follow(worker, answer["id"], call, on_message, deadline, name)
            except GONE as error:
                raise _lost(name, call, error) from error
            except _Ended as ended:
                raise ended.error from None
            except WorkerLostError:  # nobody is there to be told
                raise
            except BaseException:
                self._cancel(worker, answer["id"])
                raise

    def stop(self) -> None:
        """Cancels what this flow has running, and refuses more: the flow is over."""
        with self._changed:
            self._stopped.set()
            self._changed.notify_all()

    def _started(self, worker: Any, role: str, place: int, call: StageCall, deadline: float) -> tuple[Any, Any]:
        """The worker, which may have had to start anew, and its answer to the call."""
        name, told = worker_name(role, place), False
        while True:
            answer = json.loads(answer_of(worker.start.remote(call.model_dump_json())))
            if "stale" not in answer:
                return worker, answer
            if "busy" not in answer:
                progress().note(f"{name} starts anew: {answer['stale']}")
                restart(worker)
                worker = self._ready(role, place, time.monotonic() + self._wait)
                continue
            if not told:
                progress().note(
                    f"{name} has to start anew ({answer['stale']}); first it ends what {answer['busy']} asked"
                )
                told = True
            if self._stopped.is_set() or time.monotonic() > deadline:
                raise StageCancelledError(f"{call.name} was cancelled before {name} was free for it")
            time.sleep(RETRY_SECONDS)

    def _follow(
        self, worker: Any, job: str, call: StageCall, on_message: OnMessage, deadline: float, name: str
    ) -> ArtifactRef:
        seen, heard = 0, time.monotonic()
        while True:
            if self._stopped.is_set():
                raise StageCancelledError(f"{call.name} was cancelled: its flow ends")
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"{call.name} on {name} took longer than placement.ray.stage_seconds="
                    f"{self._ray.stage_seconds:g} and was cancelled; raise it, or look at the worker's log"
                )
            try:
                messages = json.loads(answer_of(worker.poll.remote(job, seen, POLL_SECONDS)))
            except SILENT:
                if time.monotonic() - heard > self._wait:
                    raise
                continue
            heard = time.monotonic()
            if messages is None:
                raise WorkerLostError(f"{name} was killed while it ran {call.name}, and is there again")
            for message in messages:
                if message["kind"] == "done":
                    return ArtifactRef.model_validate(message["ref"])
                if message["kind"] == "failed":
                    raise _Ended(_error(message, name))
                on_message(message)
            seen += len(messages)

    def _cancel(self, worker: Any, job: str) -> None:
        """Stops a stage: at its next sign of life, or with its worker."""
        until = time.monotonic() + CANCEL_SECONDS
        try:
            answer_of(worker.cancel.remote(job))
            seen = 0
            while time.monotonic() < until:
                messages = json.loads(answer_of(worker.poll.remote(job, seen, POLL_SECONDS)))
                if messages is None or any(each["kind"] in ("done", "failed") for each in messages):
                    return
                seen += len(messages)
        except SILENT:
            pass  # nor will it hear us
        except GONE:
            return  # it is gone already
        with suppress(*GONE):
            restart(worker)

    @contextmanager
    def _taken(self, role: str, key: str) -> Iterator[tuple[int, Any]]:
        """A worker that is free and answers; among several that which an earlier flow left the stage with, then those
        that it left nothing with; those that don't answer come last."""
        with self._changed:
            self._changed.wait_for(lambda: self._free[role] or self._stopped.is_set())
            if self._stopped.is_set():
                raise StageCancelledError("the flow ends")
            found = [self._doing.get((role, each)) for each in self._free[role]]
            ranks = [0 if doing == key else 1 if doing is None else 2 for doing in found]
            place = self._free[role].pop(ranks.index(min(ranks)))
            self._doing.pop((role, place), None)
        try:
            worker = self._ready(role, place, time.monotonic() + self._wait)
            yield place, worker
        except WorkerLostError:
            with self._changed:
                self._free[role].append(place)  # the others first
                self._changed.notify()
            raise
        except BaseException:
            self._give_back(role, place)
            raise
        self._give_back(role, place)

    def _give_back(self, role: str, place: int) -> None:
        with self._changed:
            self._doing.pop((role, place), None)
            self._free[role].insert(0, place)  # it is warm
            self._changed.notify()

    def _ready(self, role: str, place: int, deadline: float) -> Any:
        """The worker, once it answers and has this code.

        Raises:
            WorkerLostError: it does not in time.
        """
        name, said = worker_name(role, place), False
        problem: BaseException | str = "it does not answer"
        restarted = False
        while True:
            try:
                worker = self._worker(role, place)
                host, busy, wrong = self._look(answer_of(worker.status.remote()), role, place)
                if wrong is None:
                    return worker
                if restarted:
                    raise ConfigError(f"worker {name} on {host} {wrong}; install the same version there")
                problem = wrong if busy is None else f"it {wrong}, and is busy with run {busy}"
                if busy is None:
                    progress().note(f"{name} starts anew: it {wrong}")
                    end(worker)
                    self._handles.pop(name, None)
                    restarted = True
            except GONE as error:
                problem = error
                if is_dead(error):
                    self._handles.pop(name, None)
            if self._stopped.is_set():
                raise StageCancelledError("the flow ends")
            if time.monotonic() > deadline:
                raise self._missing(role, name, problem)
            if not said:
                progress().note(f"waiting for {name} (placement.wait={self._wait:g} s)")
                said = True
            time.sleep(RETRY_SECONDS)

    def _look(self, said: str, role: str, place: int) -> tuple[str, str | None, str | None]:
        """Host of a worker, the other run that it works for, and why it can't be used."""
        try:
            status = WorkerStatus.model_validate_json(said)
        except ValidationError:
            return "its machine", None, "is of another version"
        with self._changed:
            self._doing.pop((role, place), None)
            if status.key is not None:
                self._doing[role, place] = status.key
        return status.host, status.run if status.run != self._run else None, self._unfit(status, role)

    def _unfit(self, status: WorkerStatus, role: str) -> str | None:
        if status.code != code_digest():
            return f"runs other code ({status.code}) than this flow ({code_digest()})"
        gpus = _gpus(self._ray)[role]
        return None if status.gpus == gpus else f"has {status.gpus:g} GPUs, the run asks for {gpus:g}"

    def _worker(self, role: str, place: int) -> Any:
        """Its handle, which outlives it: to ask the head each time would wait for a head that is gone."""
        name = worker_name(role, place)
        if name not in self._handles:
            with self._connecting:
                connect(self._ray.address)
            self._handles[name] = worker_handle(role, place, _gpus(self._ray)[role])
        return self._handles[name]

    def _missing(self, role: str, name: str, problem: BaseException | str) -> WorkerLostError:
        resource, count = role.upper(), asked(self._ray)[role]
        start = f"start one with `grpo worker --role {role} --address {self._ray.address}`, or all with `grpo up`"
        try:
            there = offered(resource)
        except Exception:
            return NobodyOffersError(f"no Ray cluster answers at {self._ray.address} ({_line(problem)}); {start}")
        if there < count:
            return NobodyOffersError(
                f"the run asks for {count} x {resource} (placement.ray), the cluster offers {there:g}, and nobody "
                f"offered more within placement.wait={self._wait:g} s; {start}"
            )
        gpus = _gpus(self._ray)[role]
        also = f"; it needs {gpus:g} GPUs on a machine that offers {resource}" if gpus else ""
        return WorkerLostError(
            f"{name} did not come up within placement.wait={self._wait:g} s ({_line(problem)}){also}; see `grpo status`"
        )


class _Ended(Exception):
    """The stage ended by itself, with an error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def asked(config: RayConfig) -> dict[str, int]:
    """Workers that a run asks for, by role."""
    counts = {"train": 1, "rollout": config.rollout_workers, "score": config.score_workers}
    return {role: count for role, count in counts.items() if count}


def _gpus(config: RayConfig) -> dict[str, float]:
    return {"train": config.train_gpus, "rollout": config.rollout_gpus, "score": config.score_gpus}


def _error(message: Message, name: str) -> BaseException:
    kind = error_class(message)
    if kind is not None:
        return kind(message["message"])
    return WorkerError(f"{name} raised {message['summary']}\n{message['traceback']}")


def _lost(name: str, call: StageCall, error: BaseException) -> WorkerLostError:
    return WorkerLostError(f"{name} was lost while it ran {call.name} ({_line(error)})")


def _line(problem: BaseException | str) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:200]


_LOCK = threading.Lock()
_clusters: dict[str, Cluster] = {}


def cluster(config: RunConfig) -> Cluster:
    """The workers of a run, for this process."""
    with _LOCK:
        key = config.run_name + config.placement.model_dump_json()
        if key not in _clusters:
            _clusters[key] = Cluster(config)
        return _clusters[key]


def stop_clusters() -> None:
    """Cancels what flows of this process have running on workers."""
    with _LOCK:
        for each in _clusters.values():
            each.stop()
        _clusters.clear()
