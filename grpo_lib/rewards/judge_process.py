"""What runs in a process of judges: a reward function on the samples that it is sent, and never more than that.

What the function prints goes where the parent reads it, apart from verdicts. It may hang, crash, or take all memory:
then this process ends, and the parent knows which sample it was, because a verdict is written before the next sample.

It ends with its parent, however that ends.
"""

import asyncio
import ctypes
import gc
import hashlib
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from grpo_lib.errors import RewardError
from grpo_lib.parent import end_with_parent
from grpo_lib.rewards.judge_time import Alarm, Seat, TookTooLongError
from grpo_lib.rewards.judge_wire import Ears, Mouth, Order
from grpo_lib.rewards.pace import PACE, Pace
from grpo_lib.rewards.verdicts import Verdict, each_verdict, failed, verdict_of
from grpo_lib.types import Sample

BEAT_SECONDS = 0.5
COLLECTED = 50_000
"""New objects after which Python looks for garbage: samples come by the thousand, and are none."""
MOST_THREADS, THREAD_BYTES = 256, 32 * 2**20
"""For what async functions hand to threads: so many, and one for so much of the memory that the process may take."""
M_ARENA_MAX = -8


def main() -> None:
    """The body of the process; its arguments are a pipe's number (the other is its standard input) and its parent."""
    end_with_parent(signal.SIGKILL, int(sys.argv[2]))
    ears, mouth = Ears(os.fdopen(os.dup(0), "rb")), Mouth(int(sys.argv[1]))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    order = Order(**json.loads(ears.given.readline()))
    os.chdir(order.folder)
    try:
        _check_files(order)
        function = _function(order)
        _check_files(order)  # nor was it changed in between
    except RewardError as error:
        mouth.say(str(error))
        return
    resource.setrlimit(resource.RLIMIT_AS, (order.memory_bytes, order.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.freeze()
    gc.set_threshold(COLLECTED)
    mouth.say()
    if order.kind == "sample":
        while not ears.closed:
            _one_by_one(function, ears, mouth, order)
    elif order.kind == "samples":
        while not ears.closed:
            _all_at_once(function, ears, mouth, order)
    else:
        _rounds(function, ears, mouth, order)


def _check_files(order: Order) -> None:
    """A process that follows another one, which crashed, must not judge with another function.

    Raises:
        RewardError: a file is not what it was.
    """
    for path, digest in order.files.items():
        file = Path(path)
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise RewardError(f"{path} was changed while the run was judging with it; resume the run")


def _function(order: Order) -> Any:
    """With its options set."""
    from grpo_lib.plugins import load_function, load_plugins

    place, _, name = order.place.partition(":")
    if place != "registry":
        return partial(load_function(order.place, "reward.functions"), **order.options)
    from grpo_lib.rewards.judges import load_built_in
    from grpo_lib.rewards.registry import REWARDS

    load_built_in()
    load_plugins(order.plugins)
    for package in REWARDS[name].traits.get("imports", ()):  # type: ignore[attr-defined]
        importlib.import_module(package)  # now, and not within the first sample's time
    return REWARDS[name].bind(order.options, "kwargs")


def _one_by_one(function: Any, ears: Ears, mouth: Mouth, order: Order) -> None:
    alarm = Alarm(order.timeout_seconds)
    for number, sample in ears.samples(alarm.install):
        try:
            with alarm:
                result: Any = function(sample)
            verdict: Verdict = verdict_of(result, len(sample.response_ids), len(sample.response))
        except (Exception, TookTooLongError) as error:
            verdict = failed(error)
        mouth.judged(number, verdict)


def _all_at_once(function: Any, ears: Ears, mouth: Mouth, order: Order) -> None:
    alarm = Alarm(order.timeout_seconds)
    for first, samples in ears.frames():
        mouth.say()
        alarm.install()
        try:
            with alarm:
                results = function(samples)
            verdicts = each_verdict(results, samples)
        except (Exception, TookTooLongError) as error:
            verdicts = [failed(error) for _ in samples]
        for number, verdict in enumerate(verdicts, first):
            mouth.judged(number, verdict)


def _rounds(function: Any, ears: Ears, mouth: Mouth, order: Order) -> None:
    """All in one event loop: what a function has left behind in it or in a thread holds no round up."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_ARENA_MAX, 4)  # else each thread takes 64 MiB of the memory that the process may take
    threads = min(order.concurrency, MOST_THREADS, max(1, order.memory_bytes // THREAD_BYTES))
    PACE.set(Pace(order.rate))
    with asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(ThreadPoolExecutor(threads))
        while not ears.closed:
            runner.run(_side_by_side(function, ears, mouth, order))


async def _side_by_side(function: Any, ears: Ears, mouth: Mouth, order: Order) -> None:
    """A round of an async function, of a sample or of all."""
    if order.kind == "async sample":
        coming = ears.samples()
        seats = [Seat(order.timeout_seconds) for _ in range(order.concurrency)]
        judging = [asyncio.create_task(_judge(function, coming, mouth, seat)) for seat in seats]
    else:
        seats = [Seat(order.timeout_seconds)]
        judging = [asyncio.create_task(_judge_all(function, ears, mouth, seats[0]))]
    watching = asyncio.create_task(_watch(seats, mouth, order))
    await asyncio.gather(*judging)
    watching.cancel()


async def _watch(seats: Sequence[Seat], mouth: Mouth, order: Order) -> None:
    while True:
        mouth.say()
        now = time.monotonic()
        for seat in seats:
            if not seat.look(now):
                why = f"took longer than reward.timeout_seconds={order.timeout_seconds:g}, and its end was swallowed"
                mouth.say(why, seat.number)
                os._exit(1)
        await asyncio.sleep(min(BEAT_SECONDS, order.timeout_seconds / 10))


async def _judge(function: Any, coming: Iterator[tuple[int, Sample]], mouth: Mouth, seat: Seat) -> None:
    pace = PACE.get()
    for number, sample in coming:  # shared: each sample comes to one of those who wait for it
        if pace.bounded:
            await pace.turn()
        try:
            result = await seat.result(number, function(sample))
            verdict: Verdict = verdict_of(result, len(sample.response_ids), len(sample.response))
        except (Exception, TookTooLongError) as error:
            verdict = failed(error)
        mouth.judged(number, verdict)


async def _judge_all(function: Any, ears: Ears, mouth: Mouth, seat: Seat) -> None:
    for first, samples in ears.frames():
        try:
            verdicts = each_verdict(await seat.result(first, function(samples)), samples)
        except (Exception, TookTooLongError) as error:
            verdicts = [failed(error) for _ in samples]
        for number, verdict in enumerate(verdicts, first):
            mouth.judged(number, verdict)


if __name__ == "__main__":
    main()
