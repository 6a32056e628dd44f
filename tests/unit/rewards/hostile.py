"""Reward functions that do what reward functions must not; each acts on what the response says."""

import asyncio
import os
import sys
import time
from typing import Any

calls = 0


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


async def slow(sample: Any, *, seconds: float = 0.02) -> float:
    if sample.response == "block":
        time.sleep(3600)
    await asyncio.sleep(3600 if sample.response == "sleep" else seconds)
    if sample.response == "raise":
        raise ValueError("no")
    return float(len(sample.response))
