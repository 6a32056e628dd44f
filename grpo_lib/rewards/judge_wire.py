"""What a process of judges and its parent say to each other.

first line in   what to run: see `Order`
then in         frames: a length of 8 bytes, and so many of pickled samples; an empty one ends a round
lines out       []: it is alive; [n, verdict]: of the n-th sample; [why] or [why, n]: it ends because of that sample
"""

import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from typing import IO, Any

from grpo_lib.rewards.verdicts import Verdict, as_values
from grpo_lib.types import Sample

LENGTH_BYTES = 8
_NAMES = ("response_ids", *(each.name for each in fields(Sample) if each.name != "response_ids"))
_OTHERS = attrgetter(*_NAMES[1:])


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
    files: dict[str, str]
    """`Judge.files`."""

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def frame(samples: Sequence[Sample]) -> bytes:
    """What a process is sent; token ids as lists, so that it needs no numpy."""
    rows = [(_tokens(each.response_ids), *_OTHERS(each)) for each in samples]
    data = pickle.dumps(rows, pickle.HIGHEST_PROTOCOL) if samples else b""
    return len(data).to_bytes(LENGTH_BYTES) + data


def _tokens(ids: Any) -> list[int]:
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


class Ears:
    """Samples that come in."""

    def __init__(self, given: IO[bytes]) -> None:
        self.given, self.closed, self._count = given, False, 0

    def frames(self) -> Iterator[tuple[int, list[Sample]]]:
        """Those of a round, each with the number of its first sample."""
        while True:
            head = self.given.read(LENGTH_BYTES)
            self.closed = not head
            length = int.from_bytes(head)
            if not length:
                return
            rows = pickle.loads(self.given.read(length))
            samples = [Sample(**dict(zip(_NAMES, each, strict=True))) for each in rows]
            yield self._count, samples
            self._count += len(samples)

    def samples(self, begun: Callable[[], None] = lambda: None) -> Iterator[tuple[int, Sample]]:
        """Those of a round with their numbers; ``begun`` is called for each frame."""
        for first, samples in self.frames():
            begun()
            yield from enumerate(samples, first)


class Mouth:
    """Lines that go out; each is written when it is said."""

    def __init__(self, number: int) -> None:
        self._number, self._process = number, os.getpid()

    def say(self, *values: Any) -> None:
        if os.getpid() != self._process:  # the function has forked, and came back from that twice
            os._exit(1)
        data = json.dumps(values).encode() + b"\n"
        while data:
            data = data[os.write(self._number, data) :]

    def judged(self, number: int, verdict: Verdict) -> None:
        self.say(number, as_values(verdict))
