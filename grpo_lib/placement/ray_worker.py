"""A warm worker: runs one stage after another for whichever flow asks, and answers questions meanwhile.

``StageWorker`` is the class of the Ray actors (`ray_cluster.py`), and knows nothing of Ray. Its methods return at
once: ``start`` takes a stage, ``poll`` tells what it said since, ``cancel`` stops it at its next sign of life. The
stage itself runs in a thread that lasts as long as the process, so that engines stay warm, and goes on when the flow
that asked for it dies: what it commits is there for the next one.
"""

import importlib
import json
import logging
import os
import queue
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from grpo_lib.errors import ConfigError, StageCancelledError
from grpo_lib.placement.calls import StageCall
from grpo_lib.placement.code_version import code_digest, module_digests
from grpo_lib.placement.failures import failure_of
from grpo_lib.placement.worker_status import WorkerStatus
from grpo_lib.progress import show_progress_on
from grpo_lib.storage.attempts import package_versions

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.25
"""Progress is told at most so often."""
KEPT_JOBS = 64
"""Finished stages whose flow may still ask for the end."""
OURS = ("grpo_lib", "tasks")
"""Packages whose every word is told; of others only warnings."""


class Job:
    """A stage that was asked for, and what it said."""

    def __init__(self, call: StageCall) -> None:
        self.call = call
        self.id = uuid.uuid4().hex
        self.since = time.time()
        self.done = self.total = 0
        self.cancelled = threading.Event()
        self.ended = False
        self._messages: list[Mapping[str, Any]] = []
        self._news = threading.Condition()
        self._told = 0.0

    def say(self, kind: str, **values: Any) -> None:
        with self._news:
            self._messages.append({"kind": kind} | values)
            self.ended = self.ended or kind in ("done", "failed")
            self._news.notify_all()

    def advanced(self, stage: str, iteration: int | None, done: int, total: int, tokens: int) -> None:
        """Progress; here a stage that was cancelled ends."""
        if self.cancelled.is_set():
            raise StageCancelledError(f"{self.call.name} was cancelled at {done} of {total}")
        self.done, self.total = done, total
        now = time.monotonic()
        if now - self._told >= PROGRESS_SECONDS or done == total:
            self._told = now
            self.say("progress", stage=stage, iteration=iteration, done=done, total=total, tokens=tokens)

    def wait(self, seen: int, seconds: float) -> list[Mapping[str, Any]]:
        """Messages after the first ``seen``, as soon as there are any or the time is over."""
        with self._news:
            self._news.wait_for(lambda: len(self._messages) > seen, seconds)
            return self._messages[seen:]


class StageWorker:
    """Runs stages.

    Args:
        role: ``rollout``, ``train`` or ``score``.
        gpus: that it was placed with.
    """

    def __init__(self, name: str, role: str, gpus: float) -> None:
        self._name, self._role, self._gpus = name, role, gpus
        self._code = code_digest()
        self._plugins: dict[str, str] = {}
        self._lock = threading.Lock()
        self._epochs: dict[str, int] = {}
        self._jobs: dict[str, Job] = {}
        self._waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._running: Job | None = None
        show_progress_on(_Relay(self))
        self._logs = _Logs(self)
        threading.Thread(target=self._work, name="stages", daemon=True).start()

    def start(self, text: str) -> str:
        """Takes a `StageCall` and returns its id; the same stage of a flow that died is joined, another is cancelled.

        Returns:
            JSON: ``{"id": ...}``; ``{"stale": why}`` when this process can't run it and has to start anew, ``busy`` too
            when that has to wait for another run's stage; ``{"refused": why}`` when a later flow of the run has been
            here.
        """
        call = StageCall.model_validate_json(text)
        with self._lock:
            changed = [name for name, digest in call.plugins.items() if self._plugins.get(name, digest) != digest]
            run = str(call.run["place"])
            if changed:
                others = [job.call for job in self._jobs.values() if not job.ended and job.call.run["place"] != run]
                busy = {"busy": str(others[0].run["name"])} if others else {}
                return json.dumps({"stale": f"{', '.join(changed)} changed since this worker imported it"} | busy)
            self._plugins |= call.plugins
            newest = self._epochs.get(run, 0)
            if call.epoch is not None and call.epoch < newest:
                return json.dumps({"refused": f"run {call.run['name']} goes on in a later flow than this one"})
            self._epochs[run] = call.epoch or newest
            for job in self._jobs.values():
                if job.ended or job.call.run["place"] != run:
                    continue
                if job.call.key == call.key and not job.cancelled.is_set():
                    return json.dumps({"id": job.id})  # asked for again: by a later flow, or after a lost answer
                if job.call.epoch is not None and job.call.epoch < self._epochs[run]:
                    self._cancel(job)
            job = Job(call)
            self._jobs[job.id] = job
            for old in [each for each, known in self._jobs.items() if known.ended][:-KEPT_JOBS]:
                del self._jobs[old]
        self._waiting.put(job)
        return json.dumps({"id": job.id})

    def poll(self, job: str, seen: int, seconds: float) -> str:
        """JSON: what the stage said after its first ``seen`` messages; null when it is unknown here."""
        found = self._jobs.get(job)
        return json.dumps(None if found is None else found.wait(seen, seconds))

    def cancel(self, job: str) -> None:
        """Stops a stage at its next sign of life, or before it begins."""
        with self._lock:
            found = self._jobs.get(job)
            if found is not None and not found.ended:
                self._cancel(found)

    def _cancel(self, job: Job) -> None:
        job.cancelled.set()
        if job is not self._running:  # nobody has to wait until its turn comes
            job.say("failed", **failure_of(StageCancelledError(f"{job.call.name} was cancelled before it began")))

    def status(self) -> str:
        """JSON of `WorkerStatus`."""
        job = self._running
        shown: dict[str, Any] = {}
        if job is not None:
            call = job.call
            shown = {"run": str(call.run["name"]), "stage": call.stage, "iteration": call.iteration}
            shown |= {"shard": call.shard, "since": job.since, "done": job.done, "total": job.total}
            shown |= {"epoch": call.epoch, "key": call.key}
        return WorkerStatus(
            name=self._name,
            role=self._role,
            host=socket.gethostname(),
            pid=os.getpid(),
            state="idle" if job is None else "busy",
            policy_version=_policy_version(),
            memory_bytes=_memory(),
            gpu_memory_bytes=_gpu_memory(),
            code=self._code,
            versions=package_versions(),
            gpus=self._gpus,
            **shown,
        ).model_dump_json()

    def current(self) -> Job | None:
        """What runs."""
        return self._running

    def _work(self) -> None:
        with suppress(Exception):  # then it is the first stage's error
            importlib.import_module("grpo_lib.placement.local")  # takes seconds: not when the first stage waits for it
        while True:
            job = self._waiting.get()
            with self._lock:
                if job.ended:
                    continue
                job.since, self._running = time.time(), job
            try:
                self._prepare(job.call)
                if job.cancelled.is_set():
                    raise StageCancelledError(f"{job.call.name} was cancelled before it began")
                job.say("done", ref=job.call.execute().model_dump(mode="json"))
            except BaseException as error:
                logger.info("%s ended: %s", job.call.name, error)
                job.say("failed", **failure_of(error))
            finally:
                self._running = None

    def _prepare(self, call: StageCall) -> None:
        if os.path.isdir(call.folder) and os.getcwd() != call.folder:
            os.chdir(call.folder)
        if call.plugins and call.folder not in sys.path:
            sys.path.append(call.folder)
        here = module_digests(list(call.plugins))
        other = [name for name, digest in call.plugins.items() if here[name] != digest]
        if other:
            raise ConfigError(
                f"{', '.join(other)} on {socket.gethostname()} ({call.folder}) is not what the flow has; copy it there"
            )
        from grpo_lib.placement.devices import use_threads
        from grpo_lib.placement.local import only_generate
        from grpo_lib.run import Run

        if self._role == "rollout":
            only_generate()
        importlib.import_module(call.task.partition(":")[0])
        self._listen()
        # Ray leaves one thread to a worker that asks for no CPUs.
        use_threads(Run.from_json(call.run).config.placement.threads or len(os.sched_getaffinity(0)))

    def _listen(self) -> None:
        """Hears what is logged. Not before a stage is imported, and with it Prefect, which takes all handlers away."""
        for package in OURS:
            logging.getLogger(package).setLevel(logging.INFO)
        if self._logs not in logging.getLogger().handlers:
            logging.getLogger().addHandler(self._logs)


class _Relay:
    """Progress of this process, to the stage that runs."""

    def __init__(self, worker: StageWorker) -> None:
        self._worker = worker

    def stage_started(self, stage: str, iteration: int | None) -> None:
        pass

    def stage_advanced(self, stage: str, iteration: int | None, done: int, total: int, tokens: int) -> None:
        job = self._worker.current()
        if job is not None:
            job.advanced(stage, iteration, done, total, tokens)

    def stage_ended(
        self, stage: str, iteration: int | None, *, rows: int, tokens: int, seconds: float, reused: bool
    ) -> None:
        pass  # the flow says so

    def note(self, text: str) -> None:
        job = self._worker.current()
        if job is not None:
            job.say("note", text=text)


class _Logs(logging.Handler):
    """Warnings of any package and what this one says, to the stage that runs."""

    def __init__(self, worker: StageWorker) -> None:
        super().__init__(logging.INFO)
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        job = self._worker.current()
        if job is not None and (record.levelno >= logging.WARNING or record.name.startswith(OURS)):
            job.say("log", level=record.levelno, text=record.getMessage(), source=record.name)


def _policy_version() -> int | None:
    held = sys.modules.get("grpo_lib.placement.local")
    return None if held is None else held.held_policy()


def _memory() -> int:
    """Of this process and those that it started, in bytes."""
    import psutil

    own = psutil.Process()
    total = own.memory_info().rss
    for child in own.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            pass
    return total


def _gpu_memory() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return sum(torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count()))
