"""A service's processes: all that it starts, and none of anybody else's.

Each service leads a session of its own (``setsid``). Its children, and theirs, stay in that session when their parent
dies, so the session holds everything that has to end with the service; Ctrl-C in the terminal does not reach it. A
process is known by its number and its birth: a number alone may belong to another by the time it is read again.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, Field

from grpo_lib.errors import ServiceError
from grpo_lib.parent import end_with_parent

MARK = "GRPO_SERVICE_OF"
"""Environment variable with the folder of the set that a process belongs to."""
KILL_SECONDS = 5.0
POLL_SECONDS = 0.05


class ProcessId(BaseModel):
    """One process, also after its number was given to another."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int = Field(ge=1)
    birth: str = Field(description="When it was started, on a clock that nobody sets; only ever compared.")

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        """
        Raises:
            psutil.NoSuchProcess: it has ended.
        """
        return cls(pid=pid, birth=_birth(pid))

    def alive(self) -> bool:
        try:
            return _birth(self.pid) == self.birth and runs(psutil.Process(self.pid))
        except psutil.NoSuchProcess:
            return False


def _birth(pid: int) -> str:
    if sys.platform != "linux":
        return str(psutil.Process(pid).create_time())
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{fields[19]}"  # ticks since that boot


def launch(command: Sequence[str], env: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Starts a service that gets SIGTERM when this process ends, however it ends.

    To be called in the main thread: the signal comes when the thread that started the process ends.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGTERM, os.getpid()),
        )  # fmt: skip


def session_of(leader: int) -> list[psutil.Process]:
    """Processes of a session, and of others that its leader's descendants lead (ranks of a trainer do).

    Those that have ended and wait for their parent are none.
    """
    found = {each.pid: each for each in _descendants(leader)}
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == leader and pid not in found:
                found[pid] = psutil.Process(pid)
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return [each for each in found.values() if runs(each)]


def _descendants(leader: int) -> list[psutil.Process]:
    try:
        return psutil.Process(leader).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; a zombie has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def owned_session(leader: ProcessId, mark: str) -> list[psutil.Process]:
    """What is left of a service that an earlier process started.

    A number is not given to a new process while a session of that number exists. So it is ours if its leader is the
    one we started, or, the leader being gone, if somebody in it carries our mark.
    """
    members = session_of(leader.pid)
    if leader.alive():
        return members
    if any(each.pid == leader.pid for each in members):
        return []  # a new leader: ours had ended, with all its session
    return members if any(_mark(each) == mark for each in members) else []


def _mark(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except (psutil.Error, OSError):
        return None  # of another user, or it has overwritten its environment with its title


def end(
    leader: int, members: Callable[[], list[psutil.Process]], patience: float, hurry: Callable[[], bool] = lambda: False
) -> None:
    """Ends a session: the leader is asked first, so that it can end its own in order; what is left is killed.

    Args:
        patience: seconds that it gets, as long as there is no ``hurry``.

    Raises:
        ServiceError: the kernel does not end a process that was killed.
    """
    present = members()
    leaders = [each for each in present if each.pid == leader]
    _send(leaders or present, signal.SIGTERM)
    if _gone(members, patience, hurry):
        return
    until = time.monotonic() + KILL_SECONDS
    while present := members():  # until nobody is left who could start another
        if time.monotonic() > until:
            raise ServiceError(f"processes {[each.pid for each in present]} do not end, though they were killed")
        _send(present, signal.SIGKILL)
        _gone(members, 0.5)


def _send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for each in processes:
        try:
            each.send_signal(number)
        except psutil.NoSuchProcess:
            pass  # it has just ended


def _gone(
    members: Callable[[], list[psutil.Process]], patience: float, hurry: Callable[[], bool] = lambda: False
) -> bool:
    until = time.monotonic() + patience
    while members():
        if hurry() or time.monotonic() > until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def memory_of(processes: list[psutil.Process]) -> int:
    """Resident bytes together."""
    total = 0
    for each in processes:
        try:
            total += each.memory_info().rss
        except psutil.Error:
            continue
    return total
