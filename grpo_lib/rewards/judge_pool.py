"""Samples shared out to processes in which reward functions run, and what becomes of them when one ends.

Every sample is judged once: its process answers for one after another, so that of a process that ended everybody knows
which sample it ended on. Only samples of an async function that were being judged side by side when it blocked are
judged again, one at a time.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache

from grpo_lib.config_reward import RewardRunnerConfig
from grpo_lib.rewards.judge_pipe import JudgeProcess, Work
from grpo_lib.rewards.judge_wire import Order
from grpo_lib.rewards.judges import Judge
from grpo_lib.rewards.verdicts import NoReward, Verdict
from grpo_lib.types import Sample

Keep = Callable[[int, Verdict], None]
"""Takes the place of a sample and its verdict."""


@cache
def _turn_of(digest: str) -> threading.Lock:
    return threading.Lock()


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
        self._timeout_seconds, self._plugins = timeout_seconds, list(plugins)
        self._lock = threading.Lock()

    def judge(self, samples: Sequence[Sample], done: Callable[[], None] = lambda: None) -> list[Verdict | None]:
        """A verdict for each sample; None for those that were not judged any more (``stop_after``).

        Pools of one async function take turns: what ``runner`` allows, it allows them together.

        Args:
            done: is called after each sample.

        Raises:
            RewardError: a process does not start.
        """
        verdicts: list[Verdict | None] = [None] * len(samples)
        failed, errors = [0], list[BaseException]()
        order, every = self._order(len(samples)), Work(range(len(samples)))

        def keep(place: int, verdict: Verdict) -> None:
            with self._lock:
                verdicts[place] = verdict
                failed[0] += isinstance(verdict, NoReward)
                done()

        def work() -> None:
            try:
                self._work(order, samples, every, keep, lambda: failed[0] > self._stop_after or bool(errors))
            except BaseException as error:
                errors.append(error)

        turn = _turn_of(self._judge.digest) if self._judge.kind.startswith("async") else nullcontext()
        count = min(self._runner.processes, len(samples)) if self._judge.kind == "sample" else 1
        threads = [threading.Thread(target=work, name="judges", daemon=True) for _ in range(count)]
        with turn:
            for each in threads:
                each.start()
            for each in threads:
                each.join()
        if errors:
            raise errors[0]
        return verdicts

    def _order(self, count: int) -> Order:
        return Order(
            place=self._judge.place,
            kind=self._judge.kind,
            options=dict(self._judge.options),
            plugins=self._plugins,
            folder=os.getcwd(),
            timeout_seconds=self._timeout_seconds,
            concurrency=min(self._runner.concurrency, max(1, count)),
            rate=self._runner.rate,
            memory_bytes=int(self._runner.memory_gib * 2**30),
            files=dict(self._judge.files),
        )

    def _work(
        self, order: Order, samples: Sequence[Sample], every: Work, keep: Keep, enough: Callable[[], bool]
    ) -> None:
        """The life of one thread: it has one process at a time."""
        process: JudgeProcess | None = None
        alone: list[int] = []
        """To be judged again, one at a time."""
        try:
            while not enough():
                work = Work([alone.pop(0)]) if alone else every
                if not work:
                    return
                process = process or JudgeProcess(order, self._judge.name)
                for place, verdict in process.judge(samples, work):
                    keep(place, verdict)
                    if enough():
                        return
                if not process.gone:
                    continue
                reason = process.end()
                lost, again, later = self._sorted(process, order.concurrency)
                process = None
                for each in lost:
                    keep(each, NoReward(reason))
                alone += again
                every.put_back(later)
        finally:
            if process is not None:
                process.end(finished=True)

    def _sorted(self, process: JudgeProcess, concurrency: int) -> tuple[list[int], list[int], list[int]]:
        """Of a process that ended: those that it was lost on, those to be judged alone, and those not begun."""
        left = process.left
        if process.blamed and self._judge.kind == "async sample":
            return process.blamed, [], [each for each in left if each not in process.blamed]
        if self._judge.kind.endswith("samples"):
            return left, [], []
        if self._judge.kind == "sample" or len(left) == 1:
            return left[:1], [], left[1:]
        return [], left[:concurrency], left[concurrency:]
