"""How often an async function may ask somebody else."""

import asyncio
import time
from contextvars import ContextVar


class Pace:
    """At most ``rate`` turns a second, evenly; None: no bound."""

    def __init__(self, rate: float | None) -> None:
        self.bounded = rate is not None
        self._gap = 0.0 if rate is None else 1 / rate
        self._next = 0.0

    async def turn(self) -> None:
        """Returns when it is the caller's turn."""
        if not self.bounded:
            return
        now = time.monotonic()
        self._next = max(now, self._next + self._gap)
        await asyncio.sleep(self._next - now)


PACE: ContextVar[Pace] = ContextVar("pace", default=Pace(None))  # noqa: B039
"""Of ``reward.runner.rate``. The runner waits for the first turn of each sample; who asks again takes another."""
