"""The processes and files of a ``RankGroup``: torchrun, its ranks, their private folder and log; and their end."""

import hmac
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from grpo_lib.placement.rank_main import SOCKET, TOKEN, Line, stack_file

KILL_SECONDS = 2.0
LONGEST_SOCKET_PATH = 100
"""Linux allows 107 bytes."""
LOG_BYTES = 16_384
LOG_LINES = 40
MAIN = "grpo_lib.placement.rank_main"
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Of the environment: what a launcher of this process said to it, not to those that it starts."""


@dataclass(frozen=True)
class Member:
    """A rank that showed the token."""

    line: Line
    pid: int
    """Of the process, which torchrun made the leader of a process group of its own."""
    born: str
    """Start time of the process: with it a pid that the system gave to somebody else later is told apart."""


@dataclass
class Processes:
    """Everything that has to go when a group ends."""

    folder: Path
    """Private and temporary: the socket, what torchrun writes, and the log if it is not kept elsewhere."""
    agent: subprocess.Popen[bytes]
    """torchrun, which starts the ranks and stops all when one ends; or the only rank itself."""
    members: dict[int, Member] = field(default_factory=dict)
    owner: int = field(default_factory=os.getpid)

    def admit(self, line: Line, token: str) -> None:
        """Takes in the rank whose first message shows the token; closes any other line."""
        try:
            (hello,) = line.receive() or [None]
            rank, pid, shown = int(hello["rank"]), int(hello["pid"]), str(hello["token"])
        except (ValueError, TypeError, KeyError):
            line.close()
            return
        if rank in self.members or not hmac.compare_digest(shown.encode(), token.encode()):
            line.close()
            return
        self.members[rank] = Member(line, pid, born(pid))

    def signal(self, number: int) -> None:
        """Sends ``number`` to every rank that is still there, and to what it started."""
        for member in self.members.values():
            if born(member.pid) == member.born:
                try:
                    os.killpg(member.pid, number)
                except ProcessLookupError:
                    pass  # it ended in between

    def stacks(self, name: str) -> str:
        """What the ranks wrote when they were asked for their stacks, one after another."""
        files = {rank: stack_file(self.folder / "socket", rank) for rank in sorted(self.members)}
        return "".join(f"{name} {rank} is here:\n{file.read_text()}" for rank, file in files.items() if file.exists())

    def kill(self) -> None:
        """Kills the ranks, then torchrun; one that was not known yet finds no parent to connect to, and ends."""
        self.signal(signal.SIGKILL)
        if self.agent.poll() is None:
            self.agent.terminate()
            if not self.wait(KILL_SECONDS):  # it had its chance to collect its children's exit codes
                os.killpg(self.agent.pid, signal.SIGKILL)
                self.agent.wait()

    def wait(self, seconds: float) -> bool:
        """Whether torchrun, and so every rank, ends by itself within ``seconds``."""
        try:
            self.agent.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """Leaves no process and no file; in a fork of the process that started them it does nothing."""
        if os.getpid() != self.owner:
            return
        self.kill()
        for member in self.members.values():
            member.line.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Log:
    """What torchrun and the ranks print: ``ranks.log`` in ``folder``, or while the group lives in ``private``."""

    def __init__(self, folder: Path | None, private: Path) -> None:
        self.path = (folder or private) / "ranks.log"
        self._kept = folder is not None
        # Groups before this one may have written to it.
        self._start = self.path.stat().st_size if self.path.exists() else 0

    def __str__(self) -> str:
        return str(self.path) if self._kept else f"{self.path} (not kept)"

    def add(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)

    def tail(self) -> str:
        """The last lines of this group."""
        with self.path.open("rb") as file:
            file.seek(max(self._start, file.seek(0, os.SEEK_END) - LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:]) or "(empty)"


def listener() -> tuple[Path, socket.socket]:
    """A fresh folder that only this user can enter, and a socket listening in it."""
    folder = Path(tempfile.mkdtemp(prefix="grpo-ranks-"))
    if len(os.fsencode(folder / "socket")) > LONGEST_SOCKET_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="grpo-ranks-", dir="/tmp"))
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "socket"))
    listening.listen()
    return folder, listening


def torchrun(
    ranks: int, folder: Path, log: Path, token: str, *, device: str, threads: int | None
) -> subprocess.Popen[bytes]:
    """Starts torchrun, which starts ``ranks`` times ``rank_main``. All that any of them prints goes to ``log``."""
    environment = {}
    if device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"  # DeepSpeed looks for other devices otherwise
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            environment["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are here; gloo encrypts nothing
    options = ["--standalone", "--nnodes=1", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    options += ["--local-addr=127.0.0.1", f"--log-dir={folder / 'torchrun'}"]
    command = ["-m", "torch.distributed.run", *options, "-m", MAIN]
    return _python(command, folder, log, token, threads, environment)


def alone(
    folder: Path, log: Path, token: str, *, threads: int | None, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts one ``rank_main`` that belongs to no process group, with ``environment`` besides this process's own."""
    mine = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    return _python(["-m", MAIN], folder, log, token, threads, environment, mine)


def _python(
    command: list[str],
    folder: Path,
    log: Path,
    token: str,
    threads: int | None,
    environment: Mapping[str, str],
    inherited: Mapping[str, str] = os.environ,
) -> subprocess.Popen[bytes]:
    whole = {**inherited, SOCKET: str(folder / "socket"), TOKEN: token, **environment}
    if threads is not None:
        whole["OMP_NUM_THREADS"] = str(threads)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            env=whole,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def born(pid: int) -> str:
    """When the process started, in the system's ticks; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""
