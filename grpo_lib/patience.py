"""Patience with a service that is away for a minute: what it could not do is tried again, for a while.

Only what may pass by itself is tried again: no answer, or one that says "not now". A wrong password is not.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from grpo_lib.errors import StoreDownError, TrackingDownError
from grpo_lib.progress import progress

AWAY = (StoreDownError, TrackingDownError)
LONGEST_PAUSE = 5.0
"""Seconds between two tries, at most: so soon a service that is back is noticed."""

T = TypeVar("T")
_impatient: ContextVar[bool] = ContextVar("impatient", default=False)


@contextmanager
def impatient() -> Iterator[None]:
    """Calls of this thread fail at once when the service is away: for checks, and for what has a rhythm of its own."""
    token = _impatient.set(True)
    try:
        yield
    finally:
        _impatient.reset(token)


class Patience:
    """Shared by all threads that call one service, so that people read once that it is away and once that it is back.

    Args:
        seconds: from the first failure of a call to its last try; 0: one try.
        service: its name and address, for people.
        setting: where ``seconds`` is set.
    """

    def __init__(self, seconds: float, service: str, setting: str) -> None:
        self._seconds, self._service, self._setting = seconds, service, setting
        self._lock = threading.Lock()
        self._away_since: float | None = None

    def call(self, work: Callable[[], T]) -> T:
        """The result of ``work``, which is called again while it raises StoreDownError or TrackingDownError.

        Raises:
            what ``work`` raised last, when it took too long.
        """
        if self._seconds <= 0 or _impatient.get():
            return work()
        tries = Retrying(
            retry=retry_if_exception_type(AWAY),
            wait=wait_random_exponential(multiplier=0.2, max=LONGEST_PAUSE),
            stop=stop_after_delay(self._seconds),
            before_sleep=self._is_away,
            reraise=True,
        )
        result = tries(work)
        self._is_back()
        return result

    def _is_away(self, state: RetryCallState) -> None:
        with self._lock:
            if self._away_since is not None:
                return
            self._away_since = time.monotonic()
        error = state.outcome.exception() if state.outcome is not None else None
        progress().note(f"{error}; tried again for {self._seconds:g} s ({self._setting})")

    def _is_back(self) -> None:
        if self._away_since is None:
            return
        with self._lock:
            since, self._away_since = self._away_since, None
        if since is not None:
            progress().note(f"{self._service} answers again, after {time.monotonic() - since:.0f} s")
