"""Programs a second in the sandbox, by level: `python tests/benchmarks/sandbox.py [--programs 1000] [--threads 2]`.

Small programs that read a line and print a number: what is measured is the start of Python and of its walls. The bare
start is Python alone, with nothing around it. At the end nothing may be left behind.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from grpo_lib.errors import ConfigError, MissingPackageError
from grpo_lib.rewards.sandbox import Limits, check_level, run
from grpo_lib.rewards.sandbox_levels import _python

PROGRAM = "print(sum(number * number for number in range(int(input()))))"
LIMITS = Limits(wall_seconds=60.0)


def bare(number: int) -> str:
    command = [_python(), "-s", "-P", "-B", "-c", PROGRAM]
    return subprocess.run(command, input=str(number), stdout=subprocess.PIPE, text=True, check=True).stdout


def inside(level: str) -> Callable[[int], str]:
    return lambda number: run(PROGRAM, str(number), level=level, limits=LIMITS).stdout


def rate(call: Callable[[int], str], programs: int, threads: int) -> tuple[float, float]:
    """Programs a second, and the median's milliseconds."""

    def timed(number: int) -> float:
        began = time.perf_counter()
        assert call(number % 100) == f"{sum(each * each for each in range(number % 100))}\n"
        return time.perf_counter() - began

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        taken = sorted(pool.map(timed, range(programs)))
    return programs / (time.perf_counter() - began), 1000 * taken[len(taken) // 2]


def left() -> tuple[str, int, list[str]]:
    """Mounts, processes below this one, and files."""
    files = [each.name for each in Path(tempfile.gettempdir()).glob("sandbox-*")]
    return Path("/proc/self/mountinfo").read_text(), len(psutil.Process().children(recursive=True)), files


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--programs", type=int, default=1000)
    asked.add_argument("--threads", type=int, default=2)
    chosen = asked.parse_args()
    before = left()
    print(f"{chosen.programs:,} programs, {chosen.threads} threads\n")
    print("| level | programs a second | median, ms | of the bare start |\n|---|---|---|---|")
    base = 0.0
    for level in ("bare start", "limits", "namespaces", "bubblewrap"):
        if level != "bare start":
            try:
                check_level(level)
            except (ConfigError, MissingPackageError) as error:
                print(f"| {level} | {str(error).split(';')[0]} | | |", flush=True)
                continue
        fast, median = rate(bare if level == "bare start" else inside(level), chosen.programs, chosen.threads)
        base = base or fast
        print(f"| {level} | {fast:.1f} | {median:.0f} | {fast / base:.0%} |", flush=True)
    if left() != before:
        sys.exit(f"left behind: {left()[1:]}, before: {before[1:]}")
    print("\nNothing left behind: processes, mounts, files.")


if __name__ == "__main__":
    main()
