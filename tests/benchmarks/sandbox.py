"""Programs a second in the sandbox, by level: `python tests/benchmarks/sandbox.py [--programs 1000] [--threads 2]`.

Small programs that read a line and print a number: what is measured is the start of Python and of its walls. The bare
start is Python alone, with nothing around it. Levels take turns; processor time is that of all processes together, so
that others on the machine disturb it little. At the end nothing may be left behind.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpo_lib.errors import ConfigError, MissingPackageError
from grpo_lib.rewards.sandbox import ENVIRONMENT, Limits, check_level, run
from grpo_lib.rewards.sandbox_levels import STRONG, own_python

PROGRAM = "print(sum(number * number for number in range(int(input()))))"
LIMITS = Limits(wall_seconds=60.0)
LEVELS = ("limits", "namespaces", "bubblewrap")
TURNS = 10
BOUND_SECONDS = 100.0
"""No further turn then: on a busy machine there are fewer."""


def bare(number: int) -> str:
    command = [own_python(), "-s", "-P", "-B", "-c", PROGRAM]
    done = subprocess.run(
        command, input=str(number), stdout=subprocess.PIPE, text=True, check=True, env=ENVIRONMENT, cwd="/"
    )
    return done.stdout


def inside(level: str) -> Callable[[int], str]:
    return lambda number: run(PROGRAM, str(number), level=level, limits=LIMITS).stdout


@dataclass(frozen=True, kw_only=True)
class Turn:
    """So many programs of a level, one after another in each thread."""

    programs: int
    seconds: float
    processor: float
    """Seconds of all processes."""
    each: list[float]
    """Seconds of each program."""


def turn(call: Callable[[int], str], programs: int, threads: int) -> Turn:
    def timed(number: int) -> float:
        began = time.perf_counter()
        assert call(number) == f"{sum(each * each for each in range(number))}\n"
        return time.perf_counter() - began

    began, before = time.perf_counter(), sum(os.times()[:4])
    with ThreadPoolExecutor(threads) as pool:
        each = list(pool.map(timed, range(programs)))
    return Turn(
        programs=programs,
        seconds=time.perf_counter() - began,
        processor=sum(os.times()[:4]) - before,
        each=each,
    )


def left() -> tuple[str, int, list[str]]:
    """Mounts, processes below this one, and files."""
    files = [each.name for each in Path(tempfile.gettempdir()).glob("sandbox-*")]
    return Path("/proc/self/mountinfo").read_text(), len(psutil.Process().children(recursive=True)), files


def sandbox(programs: int = 1000, threads: int = 2) -> None:
    """Of the weaker levels fewer programs: a fifth."""
    before, calls = left(), {"bare start": bare}
    print(f"sandbox: {programs:,} programs at each strong level, {threads} threads\n")
    for level in LEVELS:
        try:
            check_level(level)
            calls[level] = inside(level)
        except (ConfigError, MissingPackageError) as error:
            print(f"{level}: not measured, {str(error).split(';')[0]}\n")
    turns: dict[str, list[Turn]] = {level: [] for level in calls}
    began = time.perf_counter()
    for number in range(TURNS):
        if number and time.perf_counter() - began > BOUND_SECONDS:
            break
        for level, call in calls.items():
            count = programs // TURNS // (1 if level in STRONG else 5)
            turns[level].append(turn(call, max(threads, count), threads))
    print("| level | programs | a second | median (ms) | processor time (ms) | of the bare start |")
    print("|---|---|---|---|---|---|")
    for level, taken in turns.items():
        ratios = [
            mine.processor / mine.programs / (its.processor / its.programs)
            for mine, its in zip(taken, turns["bare start"], strict=True)
        ]
        print(
            f"| {level} | {sum(each.programs for each in taken):,} "
            f"| {statistics.median(each.programs / each.seconds for each in taken):.1f} "
            f"| {1000 * statistics.median(seconds for each in taken for seconds in each.each):.0f} "
            f"| {1000 * statistics.median(each.processor / each.programs for each in taken):.0f} "
            f"| {statistics.median(ratios):.1f}x |"
        )
    if left() != before:
        sys.exit(f"left behind: {left()[1:]}, before: {before[1:]}")
    print("\nNothing left behind: processes, mounts, files.", flush=True)


if __name__ == "__main__":
    asked = argparse.ArgumentParser()
    asked.add_argument("--programs", type=int, default=1000)
    asked.add_argument("--threads", type=int, default=2)
    chosen = asked.parse_args()
    sandbox(chosen.programs, chosen.threads)
