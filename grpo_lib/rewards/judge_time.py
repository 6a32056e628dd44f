"""The time that a sample has in a process of judges."""

import asyncio
import math
import signal
import time
from collections.abc import Awaitable
from typing import Any

GRACE_SECONDS = 2.0
"""After its timeout a sample has so long to let itself be interrupted."""


class TookTooLongError(BaseException):
    """A sample was not judged in time. No Exception: functions and libraries that catch all of those would give a 0."""


class Alarm:
    """Raises TookTooLongError in a body that takes too long; the parent ends what does not let itself be interrupted.

    After a body its timer runs on, and is set again by the next one: to switch all on and off would take longer than
    many a reward function.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._on, self._rang = seconds, False, False

    def install(self) -> None:
        """A function may have set its own in the meantime."""
        signal.signal(signal.SIGALRM, self._ring)

    def __enter__(self) -> None:
        self._on, self._rang = True, False
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, kind: object, *_: object) -> None:
        self._on = False
        if self._rang and kind is None:  # it was caught, and something was returned all the same
            raise _too_long(self._seconds)

    def _ring(self, number: int, stack: Any) -> None:
        if self._on:
            self._rang = True
            raise _too_long(self._seconds)


class Seat:
    """Where one sample is judged at a time.

    Who takes too long is found by looking at all seats now and then: a timer for each sample would take as long as all
    the rest that is done with it.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until, self._late = math.inf, False
        self._stuck_from = math.inf
        self._task: asyncio.Task[None] | None = None
        self.number = 0
        """Of the sample that is judged."""

    async def result(self, number: int, judging: Awaitable[Any]) -> Any:
        """
        Raises:
            TookTooLongError: it was ended.
        """
        self._task, self._late, self.number = asyncio.current_task(), False, number
        self._until = time.monotonic() + self._seconds
        try:
            result = await judging
            if self._late:  # it caught that it was ended
                raise _too_long(self._seconds)
            return result
        except asyncio.CancelledError as error:
            if not self._late:
                raise
            raise _too_long(self._seconds, "; ".join(getattr(error, "__notes__", []))) from None
        finally:
            self._until = self._stuck_from = math.inf
            if self._late and self._task is not None:
                self._task.uncancel()

    def look(self, now: float) -> bool:
        """Ends what takes too long; False: that was some time ago, and it goes on all the same."""
        if now > self._until and self._task is not None:
            self._late, self._until = True, math.inf
            self._stuck_from = now + GRACE_SECONDS
            self._task.cancel()
        return now <= self._stuck_from


def _too_long(seconds: float, heard: str = "") -> TookTooLongError:
    return TookTooLongError(f"took longer than reward.timeout_seconds={seconds:g}" + (f": {heard}" if heard else ""))
