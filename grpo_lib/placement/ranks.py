"""One persistent group of ranks for a training run: started by torchrun, commanded from here, gone with this process.

    with RankGroup(ranks=2, handler="package.module:Trainer", setup={...}, device="cpu", ...) as group:
        metrics = group.call("update", batch=7)   # Trainer.update(batch=7) in every rank; rank 0's result

Every rank holds a line to the parent (see ``rank_main``): an exception, a death or silence of any rank is noticed at
once even when the others hang in a collective. After any of them the whole group is killed; a group never goes on
with a rank in an unknown state. When the parent is killed the lines close, and every rank ends itself.
"""

import json
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import JsonValue

from grpo_lib.errors import GrpoError, RankError, RankLostError
from grpo_lib.placement.failures import error_class
from grpo_lib.placement.rank_main import SHOW_STACK, Line
from grpo_lib.placement.rank_processes import Log, Processes, listener, torchrun
from grpo_lib.placement.rank_processes import alone as start_alone

Progress = Callable[[dict[str, JsonValue]], None]

GRACE_SECONDS = 1.0
"""How long the other ranks may take to report an exception too, after the first did."""
CLOSE_SECONDS = 10.0
SEND_SECONDS = 10.0
POLL_SECONDS = 0.1
STACK_SECONDS = 1.0


class RankGroup:
    """Ranks that run the same commands together.

    Args:
        ranks: their number.
        handler: ``"module:callable"``. Each rank calls it with ``(setup, World)``; the public methods of what it
            returns are the commands.
        device: ``cuda`` gives rank i device i and NCCL; ``cpu`` is gloo.
        threads: torch's CPU threads in each rank; ``None`` leaves it to torchrun (one, with several ranks).
        start_seconds: within which every handler must be there.
        command_seconds: within which all ranks must have answered a command.
        folder: where ``ranks.log`` is kept; ``None`` keeps it only while the group lives.
        alone: with one rank: what to set in its environment. It is no member of a process group, and its handler is
            called with ``setup`` only.
        name: of a rank, in messages.

    Raises:
        GrpoError: what a handler raised as it was made, if it is one of ours.
        RankError: a rank raised anything else, also for a handler that can't be imported.
        RankLostError: the group did not come up.
    """

    def __init__(
        self,
        *,
        ranks: int,
        handler: str,
        setup: Mapping[str, JsonValue],
        device: Literal["cpu", "cuda"],
        threads: int | None,
        start_seconds: float,
        command_seconds: float,
        folder: Path | None = None,
        alone: Mapping[str, str] | None = None,
        name: str = "rank",
    ) -> None:
        assert ranks == 1 if alone is not None else ranks >= 1, ranks
        self._name = name
        if alone is None:
            self._agent, self._next = "torchrun", "the next attempt starts a fresh group"
            self._ended = f"all {ranks} ranks were killed, and {self._next}"
        else:
            self._agent, self._next = name, "the next attempt starts another"
            self._ended = self._next
        self._ranks = ranks
        self._seconds = command_seconds
        self._lock = threading.Lock()
        start = {"handler": handler, "setup": dict(setup), "device": device, "threads": threads}
        json.dumps(start)  # a TypeError of the caller's: before anything is started
        began = time.monotonic()
        token = secrets.token_hex(32)
        private, listening = listener()
        self._log = Log(folder, private)
        with listening:
            if alone is None:
                agent = torchrun(ranks, private, self._log.path, token, device=device, threads=threads)
            else:
                agent = start_alone(private, self._log.path, token, threads=threads, environment=alone)
            self._processes = Processes(private, agent)
            self._end = weakref.finalize(self, self._processes.end)
            try:
                self._accept(listening, token, began, start_seconds)
                self._send("start", start | {"command_seconds": command_seconds})
                self._answers("start", began, start_seconds)
            except BaseException:
                self._end()
                raise

    @property
    def alive(self) -> bool:
        """Whether the next command can work: nothing failed, and no rank died since."""
        return self._end.alive and self._processes.agent.poll() is None

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [self._processes.members[rank].pid for rank in range(self._ranks)]

    def call(self, command: str, /, on_progress: Progress | None = None, **arguments: JsonValue) -> JsonValue:
        """Runs ``handler.<command>(**arguments)`` in every rank, one command at a time, and returns rank 0's result.

        Args:
            on_progress: gets what rank 0 gives to ``rank_main.report``.

        Raises:
            GrpoError: every rank that failed raised this class.
            RankError: a rank raised anything else.
            RankLostError: a rank died or did not answer within ``command_seconds``, or the group ended before.
        """
        json.dumps(arguments)  # a TypeError of the caller's is no reason to end the group
        with self._lock:
            if not self._end.alive:
                what = f"no process of {self._name}: it was closed or failed before"
                raise RankLostError(f"{command!r} found {what}; {self._next}")
            try:
                began = time.monotonic()
                self._send(command, arguments)
                return self._answers(command, began, self._seconds, on_progress)
            except BaseException:  # an interrupt too: the ranks are in the middle of something
                self._end()
                raise

    def close(self) -> None:
        """Lets the ranks end, and kills them when they don't, or at once when another thread's command is running."""
        if not self._lock.acquire(blocking=False):
            self._processes.kill()
            self._lock.acquire()
        try:
            if self._end.alive:
                self._send(None, {})
                self._processes.wait(CLOSE_SECONDS)
                self._end()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, listening: socket.socket, token: str, began: float, seconds: float) -> None:
        """Waits until every rank has shown the token on a line of its own; others are sent away."""
        members = self._processes.members
        with selectors.DefaultSelector() as selector:
            selector.register(listening, selectors.EVENT_READ)
            while len(members) < self._ranks:
                code = self._processes.agent.poll()
                if code is not None:
                    raise self._lost(f"{self._agent} ended with code {code} before it was ready,", "start", began)
                if time.monotonic() - began > seconds:
                    absent = self._names(rank for rank in range(self._ranks) if rank not in members)
                    raise self._lost(f"{absent} did not come up within start_seconds={seconds:g},", "start", began)
                for key, _ in selector.select(POLL_SECONDS):
                    if key.fileobj is listening:
                        connection = listening.accept()[0]
                        connection.settimeout(SEND_SECONDS)
                        selector.register(connection, selectors.EVENT_READ, Line(connection))
                        continue
                    selector.unregister(key.fileobj)
                    self._processes.admit(key.data, token)

    def _send(self, command: str | None, arguments: Mapping[str, Any]) -> None:
        for member in self._processes.members.values():
            try:
                member.line.send({"command": command, "arguments": arguments})
            except OSError:
                pass  # a rank that is gone: its closed line is found when its answer is awaited

    def _answers(self, command: str, began: float, seconds: float, on_progress: Progress | None = None) -> JsonValue:
        """One answer from each rank.

        A death outweighs exceptions: those of the other ranks, whose collective broke, may arrive before it is seen.
        """
        waiting, result = set(range(self._ranks)), None
        failures: list[dict[str, Any]] = []
        until = began + seconds
        with selectors.DefaultSelector() as selector:
            for rank, member in self._processes.members.items():
                selector.register(member.line, selectors.EVENT_READ, rank)
            while waiting and (ready := selector.select(max(0.0, until - time.monotonic()))):
                arrived = [(key.data, self._processes.members[key.data].line.receive()) for key, _ in ready]
                dead = [rank for rank, messages in arrived if messages is None]
                if dead:
                    raise self._died(dead, failures, command, began)
                for rank, message in ((rank, message) for rank, messages in arrived for message in messages or ()):
                    if message["kind"] == "progress":
                        if on_progress is not None:
                            on_progress(message["values"])
                        continue
                    waiting.discard(rank)
                    if message["kind"] == "failed":
                        failures.append(message | {"rank": rank})
                        until = min(until, time.monotonic() + GRACE_SECONDS)
                    elif rank == 0:
                        result = message["result"]
        if failures:
            raise _failed(failures, command, self._name, self._ended)
        if waiting:
            raise self._silent(waiting, seconds, command, began)
        return result

    def _died(self, dead: list[int], failures: list[dict[str, Any]], command: str, began: float) -> RankLostError:
        also = "".join(f"; {_one_line(each, self._name)}" for each in failures)
        reason = "(the system kills with SIGKILL when memory runs out)"
        return self._lost(f"{self._with_pids(dead)} was killed or ended by itself {reason}{also},", command, began)

    def _silent(self, waiting: set[int], seconds: float, command: str, began: float) -> RankLostError:
        self._processes.signal(SHOW_STACK)
        time.sleep(STACK_SECONDS)
        self._log.add(self._processes.stacks(self._name))
        limit = f"{'start' if command == 'start' else 'command'}_seconds={seconds:g}"
        return self._lost(f"{self._with_pids(waiting)} did not answer within {limit},", command, began)

    def _lost(self, what: str, command: str, began: float) -> RankLostError:
        seconds = time.monotonic() - began
        return RankLostError(
            f"{what} {seconds:.1f} s after {command!r} was sent; {self._ended}. The last lines of {self._log}:\n"
            f"{self._log.tail()}"
        )

    def _with_pids(self, ranks: Iterable[int]) -> str:
        return self._names(f"{rank} (pid {self._processes.members[rank].pid})" for rank in sorted(ranks))

    def _names(self, ranks: Iterable[object]) -> str:
        return ", ".join(f"{self._name} {rank}" for rank in ranks)


def row_progress(on_progress: Callable[[int, int, int], None] | None) -> Progress:
    """For ``RankGroup.call``: gives on what ranks report as ``done``, ``total`` and ``tokens``."""

    def show(values: dict[str, JsonValue]) -> None:
        if on_progress is not None:
            on_progress(*(int(str(values[name])) for name in ("done", "total", "tokens")))

    return show


def _failed(failures: list[dict[str, Any]], command: str, name: str, ended: str) -> GrpoError:
    """The error to raise for what ranks raised: the first by time, with a line about each other."""
    first, *others = sorted(failures, key=lambda each: each["at"])
    kind = error_class(first)
    alike = all(each["error"] == first["error"] for each in others)
    if alike and kind is not None:
        return kind(first["message"])
    also = "".join(f"; {_one_line(each, name)}" for each in others)
    return RankError(f"{_one_line(first, name)} in {command!r}{also}; {ended}.\n{first['traceback']}")


def _one_line(failure: dict[str, Any], name: str) -> str:
    return f"{name} {failure['rank']} raised {failure['summary']}".splitlines()[0]
