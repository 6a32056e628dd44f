"""Reward functions that do what reward functions must not; each acts on what the response says."""

import asyncio
import os
import signal
import sys
import threading
import time
from typing import Any

from grpo_lib.types import NoRewardError, RewardResult

calls = 0
met = threading.Barrier(40)


def reward(sample: Any) -> Any:
    what = sample.response
    if what == "loop":
        while True:
            pass
    if what == "stubborn":
        while True:
            try:
                while True:
                    pass
            except BaseException:
                continue
    if what == "memory":
        return float(len(bytearray(10 * 2**30)))
    if what == "exit":
        os._exit(0)
    if what == "signal":
        os.kill(os.getpid(), 9)
    if what == "print":
        for _ in range(1024):
            sys.stdout.write("x" * 2**20)
    if what == "string":
        return "1.0"
    if what == "nan":
        return float("nan")
    if what == "none":
        return None
    if what == "stack":
        return reward(sample)
    return float(len(what))


def every_third(sample: Any) -> float:
    global calls
    calls += 1
    if calls % 3 == 0:
        raise RuntimeError("every third")
    return 1.0


def needs_option(sample: Any, *, factor: float) -> float:
    return factor * len(sample.response)


def wrong_parameter(response: str) -> float:
    return 1.0


def batched(samples: list[Any]) -> list[Any]:
    if any(each.response == "short" for each in samples):
        return [1.0]
    return [None if each.response == "none" else float(len(each.response)) for each in samples]


def paid(sample: Any) -> RewardResult:
    if sample.response == "none":
        raise NoRewardError("nobody knows", {"cost": 3})
    if sample.response == "bad":
        raise NoRewardError("nobody knows", {"cost": float("nan")})
    return RewardResult(value=1.0, components={"correct": 1.0}, spent={"cost": 2})


def own_clock(sample: Any) -> float:
    """Uses the alarm of its process for itself, and switches it off."""
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.alarm(5)
    signal.alarm(0)
    return 1.0 if sample.response == "a" else float(reward(sample))


def process(sample: Any) -> float:
    time.sleep(0.5)
    return os.getpid()


def seen(sample: Any) -> float:
    assert sample.response_ids == [5, 6, 7], sample.response_ids
    return sample.metadata["day"].toordinal()


async def batched_slow(samples: list[Any]) -> list[Any]:
    if any(each.response == "block" for each in samples):
        time.sleep(3600)
    await asyncio.sleep(3600 if any(each.response == "sleep" for each in samples) else 0.01)
    return [ValueError("no") if each.response == "raise" else float(len(each.response)) for each in samples]


async def own_timeout(sample: Any) -> float:
    async with asyncio.timeout(0.01):
        await asyncio.sleep(10)
    return 1.0


async def slow(sample: Any, *, seconds: float = 0.02) -> float:
    if sample.response == "block":
        time.sleep(3600)
    await asyncio.sleep(3600 if sample.response == "sleep" else seconds)
    if sample.response == "raise":
        raise ValueError("no")
    return float(len(sample.response))


def catches_everything(sample: Any) -> float:
    try:
        while sample.response == "loop":
            pass
    except Exception:
        return 0.0
    return 1.0


def swallows_everything(sample: Any) -> float:
    try:
        while sample.response == "loop":
            pass
    except BaseException:
        return 0.0
    return 1.0


async def swallows_its_end(sample: Any) -> float:
    try:
        if sample.response == "loop":
            await asyncio.sleep(3600)
    except BaseException:
        return 0.0
    return 1.0


async def deaf(sample: Any) -> float:
    while sample.response == "deaf":
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
    await asyncio.sleep(0.7)
    return float(len(sample.response))


async def deaf_to_all(samples: list[Any]) -> list[float]:
    return [await deaf(each) for each in samples]


async def meets_others(sample: Any) -> float:
    """Comes back only if 40 threads run side by side."""
    await asyncio.to_thread(met.wait, 20.0)
    return 1.0


async def clock(sample: Any) -> float:
    await asyncio.sleep(0.2)
    return time.monotonic()


def forks(sample: Any) -> float:
    if sample.response == "fork":
        os.fork()
    return float(len(sample.response))


def scribbles(sample: Any, *, line: str) -> float:
    """Writes to the pipe of its verdicts."""
    if sample.response == "scribble":
        os.write(int(sys.argv[1]), line.encode())
    return float(len(sample.response))


def changes_itself(sample: Any) -> float:
    """Of a copy of this file."""
    if sample.response == "change":
        with open(__file__, "a") as file:
            file.write("# later")
        os._exit(0)
    return 1.0
