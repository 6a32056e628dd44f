"""Processes in which reward functions run, so that one that hangs, crashes or takes all memory costs one reward.

Every sample is judged once: its process answers for one after another, so that of a process that ended everybody knows
which sample it ended on. Only samples of an async function that were being judged side by side when it blocked are
judged again, one at a time.
"""

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from grpo_lib.config_reward import RewardRunnerConfig
from grpo_lib.errors import RewardError
from grpo_lib.rewards.judge_process import Order
from grpo_lib.rewards.judges import Judge
from grpo_lib.rewards.verdicts import Verdict, from_values
from grpo_lib.types import Sample

logger = logging.getLogger(__name__)
CHUNK = 64
"""Samples that a process gets at a time."""
GRACE_SECONDS = 2.0
"""After its timeout a sample has so long to let itself be interrupted."""
START_SECONDS = 120.0
PRINTED_BYTES = 64 * 1024
"""Of what functions print, so much is logged."""

Chunk = list[int]


class JudgePool:
    """Judges samples in processes.

    Args:
        plugins: modules that register functions.
        stop_after: so many null rewards end the work: the run is going to stop anyway.
    """

    def __init__(
        self,
        judge: Judge,
        runner: RewardRunnerConfig,
        timeout_seconds: float,
        plugins: Sequence[str] = (),
        stop_after: float = float("inf"),
    ) -> None:
        self._judge, self._runner, self._stop_after = judge, runner, stop_after
        self._order = Order(
            place=judge.place,
            kind=judge.kind,
            options=dict(judge.options),
            plugins=list(plugins),
            folder=os.getcwd(),
            timeout_seconds=timeout_seconds,
            concurrency=runner.concurrency,
            rate=runner.rate,
            memory_bytes=int(runner.memory_gib * 2**30),
        )
        self._lock = threading.Lock()

    def judge(self, samples: Sequence[Sample], done: Callable[[], None] = lambda: None) -> list[Verdict | None]:
        """A verdict for each sample; None for those that were not judged any more (``stop_after``).

        Args:
            done: is called after each sample.

        Raises:
            RewardError: a process does not start.
        """
        verdicts: list[Verdict | None] = [None] * len(samples)
        side_by_side = self._judge.kind != "sample"
        size = max(1, len(samples)) if side_by_side else CHUNK
        chunks = deque(list(range(start, min(start + size, len(samples)))) for start in range(0, len(samples), size))
        failed, errors = [0], list[BaseException]()

        def keep(place: int, verdict: Verdict) -> None:
            with self._lock:
                verdicts[place] = verdict
                failed[0] += verdict[0] is None
                done()

        def work() -> None:
            try:
                self._work(samples, chunks, keep, lambda: failed[0] > self._stop_after or bool(errors))
            except BaseException as error:
                errors.append(error)

        count = 1 if side_by_side else min(self._runner.processes, len(chunks))
        threads = [threading.Thread(target=work, name="judges", daemon=True) for _ in range(count)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if errors:
            raise errors[0]
        return verdicts

    def _work(
        self,
        samples: Sequence[Sample],
        chunks: "deque[Chunk]",
        keep: Callable[[int, Verdict], None],
        enough: Callable[[], bool],
    ) -> None:
        """The life of one thread: it has one process at a time."""
        process: _Process | None = None
        alone: deque[int] = deque()  # to be judged again, one at a time
        try:
            while not enough():
                if alone:
                    chunk = [alone.popleft()]
                else:
                    try:
                        chunk = chunks.popleft()
                    except IndexError:
                        return
                if process is None:
                    process = _Process(self._order, self._judge.name)
                left = set(chunk)
                for place, verdict in process.judge([samples[each] for each in chunk]):
                    left.discard(chunk[place])
                    keep(chunk[place], verdict)
                    if enough():
                        return
                if not left:
                    continue
                reason = process.end()
                process = None
                rest = [each for each in chunk if each in left]
                if self._judge.kind == "samples" or self._judge.kind == "async samples":
                    for each in rest:
                        keep(each, (None, reason))
                elif self._judge.kind == "sample" or len(chunk) == 1:
                    keep(rest[0], (None, reason))
                    if rest[1:]:
                        chunks.appendleft(rest[1:])
                else:  # one of those that were judged side by side
                    alone.extend(rest[: self._runner.concurrency])
                    if rest[self._runner.concurrency :]:
                        chunks.appendleft(rest[self._runner.concurrency :])
        finally:
            if process is not None:
                process.end()


class _Process:
    """One process of judges."""

    def __init__(self, order: Order, name: str) -> None:
        self._order, self._name = order, name
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "grpo_lib.rewards.judge_process", str(writing)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
            start_new_session=True,
        )
        os.close(writing)
        self._answers, self._rest, self._why = reading, b"", ""
        self._printed = bytearray()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._send(order.line())
        first = next(self._lines(START_SECONDS), None)
        if first is None:
            self.end()
            said = self._printed.decode(errors="replace").strip()
            raise RewardError(f"the process of reward function {name!r} did not start: {said[-2000:]}")

    def judge(self, samples: Sequence[Sample]) -> Iterator[tuple[int, Verdict]]:
        """Verdicts as they come, each with its sample's place; fewer than samples if the process ended or hung."""
        self._send(json.dumps([_as_values(each) for each in samples]).encode() + b"\n")
        count = 0
        for line in self._lines(self._order.timeout_seconds + GRACE_SECONDS):
            if "done" in line:
                yield line["done"], from_values(line["verdict"])
                count += 1
                if count == len(samples):
                    return

    def end(self) -> str:
        """Ends the process and whatever it started; returns how it ended, if by itself."""
        code = self._process.poll()
        if code is None and not self._why:
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
        try:
            self._process.stdin.close()
        except OSError:
            pass
        os.close(self._answers)
        if self._printed:
            logger.info("%s printed: %s", self._name, self._printed.decode(errors="replace").strip())
        how = f"by signal {-code}" if code is not None and code < 0 else f"with code {code}"
        return self._why or f"the process of the reward function ended {how}"

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError:
            pass  # it is gone, as reading will tell

    def _lines(self, silence: float) -> Iterator[dict[str, Any]]:
        """Messages, until there was none for ``silence`` seconds or the process is gone."""
        until = time.monotonic() + silence
        while True:
            line, found, rest = self._rest.partition(b"\n")
            if found:
                self._rest = rest
                yield json.loads(line)
                until = time.monotonic() + silence
                continue
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                self._why = f"took longer than reward.timeout_seconds={self._order.timeout_seconds:g} and was killed"
                return
            data = os.read(self._answers, 1 << 20)
            if not data:
                return
            self._rest += data

    def _listen(self) -> None:
        """Keeps the beginning of what functions print, and lets the rest go."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while data := output.read1(1 << 16):  # type: ignore[attr-defined]
                self._printed += data[: PRINTED_BYTES - len(self._printed)]


def _as_values(sample: Sample) -> dict[str, object]:
    return asdict(replace(sample, response_ids=[int(each) for each in sample.response_ids]))
