"""One flow at a time works on a run.

    runs/{run}/leases/000003.json         a claim: who; it is made once, and its number only grows
    runs/{run}/leases/000003.beat.json    its heartbeat, which only its holder writes

The newest claim holds the run until it is released, or its process is known to be gone, or its heartbeat was watched
for ``Pace.expiry`` and did not change. Clocks of different machines are never compared. While the store is away nobody
can take a run over, and nobody loses one.

A holder that was paused for long finds a newer claim: ``check`` then raises, and the flow stops before its next stage.
Up to there it harms nothing, since a commit is made only once.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from grpo_lib.errors import LeaseHeldError, LeaseLostError, StoreError
from grpo_lib.patience import impatient
from grpo_lib.progress import progress
from grpo_lib.storage import paths
from grpo_lib.storage.claims import (
    Beat,
    Claim,
    is_alive_here,
    is_gone,
    newest_epoch,
    parsed,
    read_claim,
    read_if_there,
    this_process,
    utc_now,
    who,
)
from grpo_lib.storage.objects import ObjectStore

logger = logging.getLogger(__name__)
Clock = Callable[[], float]


class Place(Protocol):
    """What can be held: a run."""

    @property
    def objects(self) -> ObjectStore: ...

    @property
    def name(self) -> str: ...

    @property
    def place(self) -> str:
        """Where it lies, for people; no other run does."""
        ...


@dataclass(frozen=True, kw_only=True)
class Held:
    """A place by its name alone: a run without a description, or, with a colon in the name, something that is none."""

    objects: ObjectStore
    name: str

    @property
    def place(self) -> str:
        return self.objects.location(paths.run_folder(self.name))


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds."""

    beat: float = 5.0
    """Between two heartbeats."""
    expiry: float = 30.0
    """Without one, watched, after which a holder counts as gone; several beats."""
    poll: float = 0.5
    """Between two looks at somebody else's heartbeat."""

    @property
    def trust(self) -> float:
        """So long after its own heartbeat a holder is sure of its claim without looking."""
        return 0.8 * self.expiry


class Lease:
    """A held run. Made by ``holding``."""

    def __init__(self, objects: ObjectStore, run: str, epoch: int, me: Claim, pace: Pace, clock: Clock) -> None:
        self.epoch = epoch
        self._objects, self._run, self._me, self._pace, self._clock = objects, run, me, pace, clock
        self._count = 0
        self._sure_from = -float("inf")
        self._lost: str | None = None
        self._one = threading.Lock()

    def check(self) -> None:
        """Between two stages: the run is still this flow's.

        Raises:
            LeaseLostError: naming who has it.
        """
        if self._lost is None and self._clock() - self._sure_from >= self._pace.trust:
            self._look()  # this process, or its connection to the store, was away for a while
        if self._lost is not None:
            raise LeaseLostError(
                f"{_what(self._run)} was taken over while this process was paused: {self._lost}. What was committed is "
                "kept; let the other go on"
            )

    def beat(self) -> None:
        """One heartbeat, then a look whether somebody took the run over meanwhile."""
        with self._one:
            began = self._clock()
            self._write(released=False)
            self._look()
            if self._lost is None:
                self._sure_from = began

    def release(self) -> None:
        """Lets the run go."""
        if not self._one.acquire(timeout=self._pace.beat):
            return  # a heartbeat waits for a store that is away: the lease will expire
        try:
            with impatient():
                self._write(released=True)
        except StoreError as error:
            logger.warning("the lease of %s could not be released, it expires by itself: %s", _what(self._run), error)
        finally:
            self._one.release()

    def keep(self, stopped: threading.Event) -> None:
        """Heartbeats until stopped: the body of a thread."""
        while not stopped.wait(self._pace.beat):
            try:
                with impatient():  # the next beat is the retry
                    self.beat()
            except StoreError as error:
                logger.info("no heartbeat of %s: %s", _what(self._run), error)

    def _look(self) -> None:
        newest = newest_epoch(self._objects, self._run)
        if newest > self.epoch:
            self._lost = who(read_claim(self._objects, self._run, newest))

    def _write(self, released: bool) -> None:
        self._count += 1
        beat = Beat(id=self._me.id, count=self._count, at=utc_now(), released=released)
        self._objects.put_bytes(paths.beat_file(self._run, self.epoch), beat.model_dump_json().encode())


def _what(name: str) -> str:
    """For people.

    >>> _what("demo"), _what("sweep:rates")
    ("run 'demo'", "sweep 'rates'")
    """
    kind, colon, rest = name.partition(":")
    return f"{kind} {rest!r}" if colon else f"run {name!r}"


class Contest:
    """Asking for a run, step by step: ``poll`` until it gives a lease."""

    def __init__(self, objects: ObjectStore, run: str, me: Claim, pace: Pace, clock: Clock) -> None:
        self._objects, self._run, self._me, self._pace, self._clock = objects, run, me, pace, clock
        self._seen: tuple[int, bytes | None] | None = None
        self._watched_from = self._polled = 0.0
        self._claimed = 0
        self._sure_from = 0.0

    def poll(self) -> Lease | None:
        """The lease; None: it takes longer.

        Raises:
            LeaseHeldError: the holder is alive, or another was faster.
        """
        if not self._claimed:
            if not self.is_free():
                return None
            self._claim()
        if self._clock() < self._sure_from:
            return None
        lease = Lease(self._objects, self._run, self._claimed, self._me, self._pace, self._clock)
        lease.beat()
        newest = newest_epoch(self._objects, self._run)
        if newest > self._claimed:  # somebody tidied up old claims behind our back, or took ours for a dead one's
            raise self._held(newest, None)
        return lease

    def _claim(self) -> None:
        epoch, content = self._seen or (0, None)
        if not self._objects.create(paths.claim_file(self._run, epoch + 1), self._me.model_dump_json().encode()):
            raise self._held(epoch + 1, None)
        self._claimed = epoch + 1
        if epoch and read_if_there(self._objects, paths.beat_file(self._run, epoch)) != content:
            # The holder came back between our last look and our claim: wait until it has to look for itself.
            self._sure_from = self._clock() + self._pace.expiry

    def is_free(self) -> bool:
        """Whether the run may be claimed; False: its holder has to be watched for longer.

        Raises:
            LeaseHeldError: the holder is alive.
        """
        epoch = newest_epoch(self._objects, self._run)
        if epoch == 0:
            self._seen = None
            return True
        claim = read_claim(self._objects, self._run, epoch)
        content = read_if_there(self._objects, paths.beat_file(self._run, epoch))
        before, self._seen = self._seen, (epoch, content)
        beat = parsed(Beat, content)
        if (beat is not None and beat.released) or (claim is not None and is_gone(claim)):
            return True
        now, polled, self._polled = self._clock(), self._polled, self._clock()
        if before != self._seen or now - polled > self._pace.beat:  # we, or the store, were away: maybe the holder too
            self._watched_from = now
        beats = before is not None and before != self._seen
        if beats or (claim is not None and is_alive_here(claim)):
            raise self._held(epoch, beat)
        return now - self._watched_from >= self._pace.expiry

    def _held(self, epoch: int, beat: Beat | None) -> LeaseHeldError:
        claim = read_claim(self._objects, self._run, epoch)
        last = "" if beat is None else f"; its last heartbeat says {beat.at}"
        end = "" if claim is None else f", or end it with `kill {claim.pid}` on {claim.host}"
        return LeaseHeldError(
            f"{_what(self._run)} is held by {who(claim)}{last}. Let it go on{end}; a holder that is gone gives way "
            f"after {self._pace.expiry:g} s without a heartbeat"
        )


_held: dict[str, Lease] = {}


@contextmanager
def holding(run: Place, *, me: Claim | None = None, pace: Pace | None = None) -> Iterator[Lease]:
    """Holds a run during the block; waits for a holder that seems to be gone.

    Raises:
        LeaseHeldError: somebody else works on it.
    """
    lease = _acquire(run, me or this_process(), pace or Pace())
    stopped = threading.Event()
    keeper = threading.Thread(target=lease.keep, args=[stopped], name=f"lease of {run.name}", daemon=True)
    keeper.start()
    _held[run.place] = lease
    try:
        yield lease
    finally:
        del _held[run.place]
        stopped.set()
        lease.release()


@contextmanager
def holding_in_turn(run: Place, seconds: float, *, pace: Pace | None = None) -> Iterator[Lease]:
    """The same, and waits for so long for a holder that is alive.

    Raises:
        LeaseHeldError: it is held for longer.
    """
    pace, until, told = pace or Pace(), _monotonic() + seconds, False
    with ExitStack() as stack:
        while True:
            try:
                lease = stack.enter_context(holding(run, pace=pace))
                break
            except LeaseHeldError as error:
                if _monotonic() >= until:
                    raise
                if not told:
                    progress().note(f"waiting: {error}")
                    told = True
            time.sleep(min(pace.beat, max(0.0, until - _monotonic())))
        yield lease


def check_lease(run: Place) -> None:
    """Raises LeaseLostError when this process held the run and has lost it."""
    lease = _held.get(run.place)
    if lease is not None:
        lease.check()


def refuse_if_held(run: Place, pace: Pace | None = None) -> None:
    """A quick look before anything slow starts.

    Raises:
        LeaseHeldError: somebody surely works on the run.
    """
    pace = pace or Pace()
    contest = Contest(run.objects, run.name, this_process(), pace, _monotonic)
    until = _monotonic() + 2 * pace.beat
    while not contest.is_free() and _monotonic() < until:
        time.sleep(pace.poll)


def held_by_another(run: Place) -> bool:
    """Whether a process that is not known to be gone holds the run, and it is not this one."""
    epoch = newest_epoch(run.objects, run.name)
    claim = read_claim(run.objects, run.name, epoch)
    beat = parsed(Beat, read_if_there(run.objects, paths.beat_file(run.name, epoch)))
    if claim is None or is_gone(claim) or (beat is not None and beat.released):
        return False
    return not (is_alive_here(claim) and claim.pid == os.getpid())


def _acquire(run: Place, me: Claim, pace: Pace) -> Lease:
    contest = Contest(run.objects, run.name, me, pace, _monotonic)
    told = False
    while (lease := contest.poll()) is None:
        if not told:
            progress().note(f"{_what(run.name)} was not released by its last holder: watching for {pace.expiry:g} s")
            told = True
        time.sleep(pace.poll)
    return lease


def _monotonic() -> float:
    """Goes on while the machine sleeps, where there is such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
