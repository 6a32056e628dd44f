"""A process of judges seen from outside: fed, listened to, and ended with all that it started."""

import fcntl
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from grpo_lib.errors import RewardError
from grpo_lib.rewards.judge_time import GRACE_SECONDS
from grpo_lib.rewards.judge_wire import Order, frame
from grpo_lib.rewards.verdicts import Verdict, cut, from_values
from grpo_lib.types import Sample

logger = logging.getLogger(__name__)
START_SECONDS = 120.0
PRINTED_BYTES = 64 * 1024
"""Of what functions print, so much is logged."""
FIRST_FRAME, LARGEST_FRAME, LONGEST_FRAME = 1, 4096, 4 * 2**20
"""Samples that a process gets at a time: first, at most, and at most so many characters."""
FRAME_SECONDS = 0.1
"""That a frame shall take."""
SIDE_BY_SIDE = 256
"""Samples of a frame for an async function."""
PAUSE_SECONDS = 0.001
"""After it was heard it may gather more verdicts for so long: to wake up for each takes longer than to judge it."""
PIPE_BYTES = 2**20
LONGEST_LINE = 64 * 2**20
BROKE = "the process of the reward function broke the protocol: something else wrote to the pipe of its verdicts"


class Work:
    """Places of samples that no process was given yet."""

    def __init__(self, places: Iterable[int]) -> None:
        self._places, self._lock = deque(places), threading.Lock()

    def __len__(self) -> int:
        return len(self._places)

    def take(self, count: int) -> list[int]:
        with self._lock:
            return [self._places.popleft() for _ in range(min(count, len(self._places)))]

    def put_back(self, places: Sequence[int]) -> None:
        """They come first then."""
        with self._lock:
            self._places.extendleft(reversed(places))


class JudgeProcess:
    """One process.

    Raises:
        RewardError: it does not start.
    """

    def __init__(self, order: Order, name: str) -> None:
        self._order, self._name = order, name
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "grpo_lib.rewards.judge_process", str(writing), str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
            start_new_session=True,
        )
        os.close(writing)
        assert self._process.stdin is not None
        self._stdin, self._answers = self._process.stdin.fileno(), reading
        os.set_blocking(self._stdin, False)
        for each in (self._stdin, reading):
            try:
                fcntl.fcntl(each, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            except OSError:
                pass  # this user has too many large pipes: it works with small ones
        self._rest, self._why = b"", ""
        self.gone = False
        """It ended or hung, or what it says can't be trusted: it judges nothing any more."""
        self.blamed: list[int] = []
        """Places of the samples that it ended because of, if it said so."""
        self._sent = 0
        self._left: dict[int, int] = {}
        """Number and place of what was sent and not judged yet."""
        self._printed = bytearray()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._write(memoryview(order.line()))
        if not self._heard(time.monotonic() + START_SECONDS):
            self.end()
            said = self._why or self._printed.decode(errors="replace").strip()
            raise RewardError(f"the process of reward function {name!r} did not start: {said[-2000:]}")

    @property
    def left(self) -> list[int]:
        """Places of the samples that it was given and did not judge, in the order in which it began with them."""
        return list(self._left.values())

    def judge(self, samples: Sequence[Sample], work: Work) -> Iterator[tuple[int, Verdict]]:
        """Places and verdicts as they come, until there is no more work; or until the process is ``gone``: `left`."""
        self.gone = True  # unless it comes to the end
        silence = self._order.timeout_seconds + GRACE_SECONDS
        began, until, judged = time.monotonic(), time.monotonic() + silence, 0
        box, over = memoryview(b""), False  # what is being sent
        while not over or box or self._left:
            size, ahead = self._size(work, judged / (time.monotonic() - began))
            if not over and not box and len(self._left) <= ahead:
                places = self._fitting(samples, work, size)
                over = not places
                box = memoryview(frame([samples[each] for each in places]))
                self._left |= dict(enumerate(places, self._sent))
                self._sent += len(places)
            wait = max(0.0, until - time.monotonic())
            readable, writable, _ = select.select([self._answers], [self._stdin] if box else [], [], wait)
            if not readable and not writable:
                self._why = f"took longer than reward.timeout_seconds={self._order.timeout_seconds:g} and was killed"
                return
            until = time.monotonic() + silence
            if writable:
                box = self._write(box)
            if readable:
                said = self._read()
                if said is None:
                    return
                for line in filter(None, said):
                    found = self._understood(line, samples)
                    if found is None:
                        return
                    judged += 1
                    yield found
                if self._left:
                    time.sleep(PAUSE_SECONDS)
        self.gone = False

    def end(self, finished: bool = False) -> str:
        """Ends the process and whatever it started; returns how it ended, if by itself.

        Args:
            finished: nothing is wrong with it.
        """
        code = self._process.poll()
        if code is None and not self._why and not finished:
            try:  # its pipe was closed, but it is not gone yet
                code = self._process.wait(0.5)
            except subprocess.TimeoutExpired:
                code = None
        try:
            os.killpg(self._process.pid, 9)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._listener.join(GRACE_SECONDS)
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._answers)
        if self._printed:
            logger.info("%s printed: %s", self._name, self._printed.decode(errors="replace").strip())
        how = f"by signal {-code}" if code is not None and code < 0 else f"with code {code}"
        return self._why or f"the process of the reward function ended {how}"

    def _understood(self, line: Any, samples: Sequence[Sample]) -> tuple[int, Verdict] | None:
        """Place and verdict of a line; None: it is the last, or no such line."""
        try:
            if type(line[0]) is str:
                why, *numbers = line
                self.blamed, self._why = [self._left[each] for each in numbers], cut(why)
                return None
            number, values = line
            place = self._left[number]
            verdict = from_values(values, len(samples[place].response_ids), len(samples[place].response))
        except Exception:  # whatever it may be that a user's function wrote there
            self._why = BROKE
            return None
        del self._left[number]
        return place, verdict

    def _size(self, work: Work, rate: float) -> tuple[int, int]:
        """Samples of the next frame, and of how many the process may be behind when it gets that."""
        if self._order.kind == "sample":
            size = min(max(1, round(FRAME_SECONDS * rate)), LARGEST_FRAME) if rate else FIRST_FRAME
            return size, size
        if self._order.kind == "async sample":
            return SIDE_BY_SIDE, self._order.concurrency + SIDE_BY_SIDE
        return len(work), 0 if not self._sent else sys.maxsize

    def _fitting(self, samples: Sequence[Sample], work: Work, size: int) -> list[int]:
        places = work.take(size)
        if self._order.kind.endswith("samples"):
            return places  # they belong together
        chars = 0
        for count, place in enumerate(places):
            chars += len(samples[place].prompt) + len(samples[place].response)
            if chars > LONGEST_FRAME and count:
                work.put_back(places[count:])
                return places[:count]
        return places

    def _write(self, data: memoryview) -> memoryview:
        """Writes what the pipe takes; returns the rest."""
        try:
            return data[os.write(self._stdin, data[:PIPE_BYTES]) :]
        except BlockingIOError:
            return data
        except BrokenPipeError:
            return data[len(data) :]  # it is gone, as reading will tell

    def _heard(self, until: float) -> bool:
        """Whether it says something in time."""
        while True:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            said = self._read() if ready else None
            if said is None:
                return False
            if said:
                if said[0]:
                    self._why = str(said[0][0])
                return not said[0]

    def _read(self) -> list[list[Any]] | None:
        """The lines that it said, what is none as [BROKE]; None: it is gone."""
        data = os.read(self._answers, PIPE_BYTES)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            said = json.loads(b"[%b]" % b",".join(lines))
        except (ValueError, RecursionError):
            said = []
        if len(said) != len(lines) or any(type(each) is not list for each in said):
            said = [_line(each) for each in lines]
        return said if len(self._rest) <= LONGEST_LINE else [*said, [BROKE]]

    def _listen(self) -> None:
        """Keeps the beginning of what functions print, and lets the rest go."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while data := output.read1(1 << 16):  # type: ignore[attr-defined]
                self._printed += data[: PRINTED_BYTES - len(self._printed)]


def _line(data: bytes) -> list[Any]:
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        said = None
    return said if type(said) is list else [BROKE]
