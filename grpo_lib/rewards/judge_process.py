"""What runs in a process of judges: a reward function on samples that come as JSON, and never more than that.

    first line in       what to run: see `Order`
    further lines in    a list of samples each
    lines out           {"ready": true}, {"beat": true}, {"done": place in the list, "verdict": [result, reason]}

What the function prints goes where the parent reads it, apart from these. It may hang, crash, or take all memory: then
this process ends, and the parent knows which sample it was.
"""

import asyncio
import importlib
import inspect
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO, Any

from grpo_lib.rewards.verdicts import as_values, reason_of, verdict_of
from grpo_lib.types import Sample

BEAT_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a process is to run."""

    place: str
    """`Judge.place`."""
    kind: str
    options: dict[str, Any]
    plugins: list[str]
    folder: str
    """Working folder."""
    timeout_seconds: float
    concurrency: int
    rate: float | None
    memory_bytes: int

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


class TookTooLongError(Exception):
    """A sample was not judged in time."""


def main() -> None:
    """The body of the process; its pipes are its standard input and the number in its arguments."""
    given, out = os.fdopen(os.dup(0), "rb"), os.fdopen(int(sys.argv[1]), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    order = Order(**json.loads(given.readline()))
    os.chdir(order.folder)
    function = partial(_function(order), **order.options)
    resource.setrlimit(resource.RLIMIT_AS, (order.memory_bytes, order.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _say(out, ready=True)
    for line in given:
        samples = [Sample(**each) for each in json.loads(line)]
        if order.kind == "sample":
            _one_by_one(function, samples, order, out)
        elif order.kind == "samples":
            _all_at_once(function, samples, order, out)
        else:
            asyncio.run(_side_by_side(function, samples, order, out))


def _function(order: Order) -> Any:
    from grpo_lib.plugins import load_function, load_plugins

    place, _, name = order.place.partition(":")
    if place != "registry":
        return load_function(order.place, "reward.functions")
    from grpo_lib.rewards.judges import BUILT_IN
    from grpo_lib.rewards.registry import REWARDS

    for module in BUILT_IN:
        importlib.import_module(module)
    load_plugins(order.plugins)
    for package in REWARDS[name].traits.get("imports", ()):  # type: ignore[attr-defined]
        importlib.import_module(package)  # now, and not within the first sample's time
    return REWARDS[name].function


def _one_by_one(function: Any, samples: list[Sample], order: Order, out: IO[str]) -> None:
    for place, sample in enumerate(samples):
        try:
            with _alarm(order.timeout_seconds):
                result: Any = function(sample)
            verdict = verdict_of(result, len(sample.response_ids), len(sample.response))
        except Exception as error:
            verdict = (None, reason_of(error))
        _say(out, done=place, verdict=as_values(verdict))


def _all_at_once(function: Any, samples: list[Sample], order: Order, out: IO[str]) -> None:
    try:
        with _alarm(order.timeout_seconds):
            results = function(samples)
        verdicts = _each(results, samples)
    except Exception as error:
        verdicts = [(None, reason_of(error))] * len(samples)
    for place, verdict in enumerate(verdicts):
        _say(out, done=place, verdict=as_values(verdict))


async def _side_by_side(function: Any, samples: list[Sample], order: Order, out: IO[str]) -> None:
    places, pace = asyncio.Semaphore(order.concurrency), _Pace(order.rate)

    async def judge(place: int, sample: Sample) -> None:
        async with places:
            await pace.turn()
            try:
                async with asyncio.timeout(order.timeout_seconds):
                    result = await function(sample)
                verdict = verdict_of(result, len(sample.response_ids), len(sample.response))
            except TimeoutError as error:
                heard = "; ".join(getattr(error.__cause__, "__notes__", []))
                verdict = (None, reason_of(_too_long(order.timeout_seconds, heard)))
            except Exception as error:
                verdict = (None, reason_of(error))
            _say(out, done=place, verdict=as_values(verdict))

    async def judge_all() -> None:
        try:
            async with asyncio.timeout(order.timeout_seconds):
                verdicts = _each(await function(samples), samples)
        except TimeoutError:
            verdicts = [(None, reason_of(_too_long(order.timeout_seconds)))] * len(samples)
        except Exception as error:
            verdicts = [(None, reason_of(error))] * len(samples)
        for place, verdict in enumerate(verdicts):
            _say(out, done=place, verdict=as_values(verdict))

    async def beat() -> None:
        while True:
            _say(out, beat=True)
            await asyncio.sleep(BEAT_SECONDS)

    beating = asyncio.create_task(beat())
    if order.kind == "async samples":
        await judge_all()
    else:
        await asyncio.gather(*(judge(place, sample) for place, sample in enumerate(samples)))
    beating.cancel()


class _Pace:
    """At most ``rate`` turns a second, evenly."""

    def __init__(self, rate: float | None) -> None:
        self._gap = 0.0 if rate is None else 1 / rate
        self._next = 0.0

    async def turn(self) -> None:
        if not self._gap:
            return
        now = time.monotonic()
        self._next = max(now, self._next + self._gap)
        await asyncio.sleep(self._next - now)


def _each(results: Any, samples: list[Sample]) -> list[Any]:
    if inspect.isawaitable(results) or not hasattr(results, "__len__") or isinstance(results, str | bytes | dict):
        raise TypeError(f"must give a list with an entry for each sample, found {type(results).__name__}")
    if len(results) != len(samples):
        raise ValueError(f"gave {len(results)} rewards for {len(samples)} samples")
    verdicts = []
    for result, sample in zip(results, samples, strict=True):
        try:
            verdicts.append(verdict_of(result, len(sample.response_ids), len(sample.response)))
        except Exception as error:
            verdicts.append((None, reason_of(error)))
    return verdicts


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raises TookTooLongError in this thread; the parent ends what does not let itself be interrupted."""

    def ring(number: int, frame: Any) -> None:
        raise _too_long(seconds)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _too_long(seconds: float, heard: str = "") -> TookTooLongError:
    return TookTooLongError(f"took longer than reward.timeout_seconds={seconds:g}" + (f": {heard}" if heard else ""))


def _say(out: IO[str], **values: Any) -> None:
    out.write(json.dumps(values) + "\n")


if __name__ == "__main__":
    main()
