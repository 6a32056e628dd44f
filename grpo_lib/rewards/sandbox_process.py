"""The process of a sandbox: fed, listened to, and ended with all that it started."""

import os
import selectors
import signal
import subprocess
import time
from glob import glob
from pathlib import Path
from typing import Literal

Why = Literal["cpu time", "wall time", "memory", "output", "killed"]
LOOKS = 20
"""Times a second that the memory of all processes is added up."""
ENDING_SECONDS = 5.0


class Talk:
    """Both ends of the pipes of a process: feeds it, reads what it says up to the limit."""

    def __init__(self, process: "subprocess.Popen[bytes]", stdin: bytes) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._left = memoryview(stdin)
        self._stdin = process.stdin
        self.out, self.err = bytearray(), bytearray()
        self._read = {process.stdout.fileno(): self.out, process.stderr.fileno(): self.err}
        self.ended = os.pidfd_open(process.pid)
        for each in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(each.fileno(), False)

    def hold(self, until: float, memory: int, output: int) -> Why | None:
        """Until it ended (then all it said is read), or is to be ended: for the reason that is returned.

        Args:
            until: by the monotonic clock.
            memory: bytes, of all its processes.
            output: bytes, of each of its outputs.
        """
        look = time.monotonic() + 1 / LOOKS
        with selectors.DefaultSelector() as ready:
            for each in (*self._read, self.ended):
                ready.register(each, selectors.EVENT_READ)
            if self._write():
                ready.register(self._stdin.fileno(), selectors.EVENT_WRITE)
            while True:
                now = time.monotonic()
                if now >= until:
                    return "wall time"
                if now >= look:
                    if _memory(self._process.pid) > memory:
                        return "memory"
                    look = now + 1 / LOOKS
                able = [key.fd for key, _ in ready.select(max(0.0, min(until, look) - now))]
                for each in able:
                    if each in self._read:
                        if not self._take(each):
                            ready.unregister(each)
                            continue
                        if len(self._read[each]) > output:
                            return "output"
                    elif each != self.ended:
                        number = self._stdin.fileno()
                        if not self._write():
                            ready.unregister(number)
                if self.ended in able:
                    return self._rest(output)

    def _rest(self, output: int) -> Why | None:
        for each, said in self._read.items():
            while self._take(each):
                if len(said) > output:
                    return "output"
        return None

    def _take(self, number: int) -> bool:
        """False where nothing comes any more, or now."""
        try:
            data = os.read(number, 65536)
        except BlockingIOError:
            return False
        self._read[number] += data
        return bool(data)

    def _write(self) -> bool:
        """False when all is written, and the pipe closed."""
        try:
            while self._left:
                self._left = self._left[os.write(self._stdin.fileno(), self._left[:65536]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            pass  # it does not want to know more
        self._stdin.close()
        return False


def end(process: "subprocess.Popen[bytes]", talk: Talk, session: bool) -> None:
    """Ends what still runs, and waits for it.

    Args:
        session: it leads a session, and no namespace.
    """
    for pipe in (process.stdin, process.stdout, process.stderr):  # now: unshare has a last word, and may find it full
        if pipe is not None:
            pipe.close()
    if session:
        os.killpg(process.pid, signal.SIGKILL)  # its number is not given to others before wait
    elif not _wait(talk.ended, 0.0):
        # The first process of the namespace: with it all others end, and its parent ends after the last of them.
        for child in _children(process.pid):
            _kill(child)
        if not (_children(process.pid) and _wait(talk.ended, ENDING_SECONDS)):
            _kill(process.pid)
    process.wait()
    os.close(talk.ended)


def _wait(ended: int, seconds: float) -> bool:
    with selectors.DefaultSelector() as ready:
        ready.register(ended, selectors.EVENT_READ)
        return bool(ready.select(seconds))


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has just ended


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in glob(f"/proc/{pid}/task/*/children"):
        try:
            found += map(int, Path(path).read_text().split())
        except OSError:
            pass  # it has just ended
    return found


def _memory(pid: int) -> int:
    """Resident bytes of a process and all below it."""
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        own = 0
    return own + sum(_memory(child) for child in _children(pid))
