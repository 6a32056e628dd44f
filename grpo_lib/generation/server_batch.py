"""The rows of one call, spread over servers that may fail.

One loop hands rows out, each to the well server with the fewest requests, and takes answers as they come. A row whose
request failed goes back to the front of the line; all others are untouched. A server that fails gets no rows until it
is well and holds the policy again.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from grpo_lib.errors import ServerLostError
from grpo_lib.generation.base import UNFINISHED, Progress
from grpo_lib.generation.server_dialects import Ask, Dialect, Reply
from grpo_lib.generation.server_http import Unwell
from grpo_lib.generation.server_peers import POLL_SECONDS, Peer, Policy, State, all_lost
from grpo_lib.generation.server_rows import Row, Terms, check_reply
from grpo_lib.progress import progress

TICK_SECONDS = 0.2
"""At least so often the loop looks at progress, budget and lost servers."""
FIRST_SECONDS = 2.0
"""Servers that answer within it share the first rows."""
WATCH_SECONDS, WATCH_MISSES = 10.0, 3
"""How often a server that works is asked whether it is well, and how many answers in a row may be missing: a machine
that is gone says nothing, and its requests would wait for their whole timeout."""


class Batch:
    """Makes the rows; what it finds is in them. Runs once.

    Args:
        peers: the servers, not asked yet.
        policy: that the rows shall come from.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        peers: Sequence[Peer],
        policy: Policy,
        dialect: Dialect,
        terms: Terms,
        on_progress: Progress | None,
    ) -> None:
        self._peers, self._policy, self._dialect, self._terms = peers, policy, dialect, terms
        self._on_progress = on_progress
        self._total = len(rows)
        self._waiting = deque(rows)
        self._open = len(rows)  # neither finished nor given up
        self._done = self._tokens = 0
        self._events: asyncio.Queue[_Event | Exception | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False
        self._began = self._reported = time.monotonic()
        self._handed_out: float | None = None  # when a budget's seconds begin
        self._alone_since: float | None = None
        self._out: set[Peer] = set()

    async def run(self) -> None:
        """
        Raises:
            ServerLostError: no server is left, or a row failed too often, or a server had other weights meanwhile.
            ConfigError: a server refuses a request, or cuts rows short.
        """
        for peer in self._peers:
            self._start(self._admit, peer)
            self._start(self._watch, peer)
        try:
            while self._open:
                if self._used_up():
                    self._give_up(len(self._waiting))
                    self._waiting.clear()
                self._hand_out()
                self._check_hope()
                await self._take_events()
                self._report()
            await self._check_weights()
        finally:
            self._ended = True
            tasks = [*self._tasks, *(task for peer in self._peers for task in peer.requests)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._report(last=True)

    def _start(self, work: Callable[[Peer], Awaitable[None]], peer: Peer) -> None:
        task = asyncio.create_task(self._guarded(work, peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Callable[[Peer], Awaitable[None]], peer: Peer) -> None:
        """What it raises is raised by the loop, which would not see it otherwise."""
        try:
            await work(peer)
        except Exception as error:
            self._events.put_nowait(error)

    async def _admit(self, peer: Peer) -> None:
        """Until it is well, or can't take the policy."""
        await peer.admit(self._policy)
        self._changed(peer)
        while peer.state is State.LOST:
            await asyncio.sleep(POLL_SECONDS)
            await peer.admit(self._policy)
        self._changed(peer)

    def _changed(self, peer: Peer) -> None:
        """Tells the loop, and people, once, if a server is out or back."""
        self._events.put_nowait(None)
        out = peer.state is not State.WELL
        if out != (peer in self._out):
            self._out ^= {peer}
            what = f"is left out for now ({peer.reason})" if out else "is back"
            progress().note(f"the generation server {peer.server.url} {what}")

    async def _watch(self, peer: Peer) -> None:
        misses = 0
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                await peer.connection.health()
                misses = 0
            except Unwell as error:
                misses += 1
                if misses >= WATCH_MISSES:
                    self._lose(peer, str(error))
                    for task in peer.requests:
                        task.cancel()

    def _lose(self, peer: Peer, reason: str) -> None:
        if peer.state is State.WELL:
            peer.lose(reason)
            self._changed(peer)
            self._start(self._admit_later, peer)

    async def _admit_later(self, peer: Peer) -> None:
        await asyncio.sleep(POLL_SECONDS)
        await self._admit(peer)

    def _check_hope(self) -> None:
        """Whether a server is there or may come back."""
        states = {peer.state for peer in self._peers}
        if states & {State.WELL, State.ASKED}:
            self._alone_since = None
            return
        if states == {State.REFUSED}:
            raise next(peer.error for peer in self._peers if peer.error is not None)
        now = time.monotonic()
        if self._alone_since is None:
            self._alone_since = now
        if now - self._alone_since >= self._terms.recovery_seconds:
            so_far = f"{self._done} of {self._total} rows were finished"
            raise all_lost(self._peers, self._terms.recovery_seconds, so_far)

    async def _check_weights(self) -> None:
        """A server that was restarted between two requests, unseen, made rows with the weights it starts with."""
        for peer in self._peers:
            if peer.state is not State.WELL or not peer.rows:
                continue
            try:
                another = await peer.holds_another(self._policy)
            except Unwell:
                continue  # it failed after its last row
            if another:
                raise ServerLostError(
                    f"the server {peer.server.url} was restarted, or given other weights, while it generated; its rows "
                    "are of no use and nothing was committed. Servers can't be shared with another run"
                )

    def _hand_out(self) -> None:
        asked = any(peer.state is State.ASKED for peer in self._peers)
        if asked and time.monotonic() - self._began < FIRST_SECONDS:
            return
        while self._waiting:
            limit = self._terms.max_in_flight
            free = [peer for peer in self._peers if peer.state is State.WELL and len(peer.requests) < limit]
            if not free:
                return
            self._send(min(free, key=lambda peer: len(peer.requests)), self._waiting.popleft())

    def _send(self, peer: Peer, row: Row) -> None:
        self._handed_out = self._handed_out or time.monotonic()
        task = asyncio.create_task(self._request(peer, row, row.ask(self._terms)))
        peer.requests.add(task)

    async def _request(self, peer: Peer, row: Row, ask: Ask) -> None:
        outcome: Reply | Exception
        try:
            outcome = await self._dialect.generate(peer.connection, ask, self._policy.digest)
        except asyncio.CancelledError:
            if self._ended:
                raise
            outcome = Unwell("its machine stopped answering")
        except Exception as error:
            outcome = error
        task = asyncio.current_task()
        assert task is not None
        self._events.put_nowait(_Event(peer=peer, row=row, ask=ask, outcome=outcome, task=task))

    async def _take_events(self) -> None:
        """Those that are there, or the next one, or none within a tick."""
        try:
            async with asyncio.timeout(TICK_SECONDS):
                events = [await self._events.get()]
        except TimeoutError:
            return
        while not self._events.empty():
            events.append(self._events.get_nowait())
        for event in events:
            if event is None:
                continue  # a server's state changed
            if isinstance(event, Exception):
                raise event
            event.peer.requests.discard(event.task)
            if isinstance(event.outcome, Reply):
                self._add(event.peer, event.row, event.ask, event.outcome)
            elif isinstance(event.outcome, Unwell):
                self._failed(event.peer, event.row, event.outcome)
            else:
                raise event.outcome

    def _add(self, peer: Peer, row: Row, ask: Ask, reply: Reply) -> None:
        check_reply(peer.server.url, ask, reply)
        before = len(row.ids)
        row.add(reply, self._terms)
        row.failures = 0
        peer.rows += 1
        self._tokens += len(row.ids) - before
        if row.finish != UNFINISHED:
            self._done += 1
            self._open -= 1
        elif self._used_up():
            self._give_up(1)
        elif peer.state is State.WELL:
            self._send(peer, row)  # which has the keys and values of what came so far
        else:
            self._waiting.appendleft(row)

    def _failed(self, peer: Peer, row: Row, error: Unwell) -> None:
        self._lose(peer, str(error))
        row.failures += 1
        if row.failures > self._terms.retries:
            raise ServerLostError(
                f"a row was asked for {row.failures} times in vain (rollout.server.retries={self._terms.retries}), at "
                f"last at {peer.server.url}: {error}. Look into the servers' logs; if they are only slow, raise "
                "rollout.server.timeout_seconds or lower rollout.server.max_in_flight"
            )
        if self._used_up():
            self._give_up(1)
        else:
            self._waiting.appendleft(row)

    def _used_up(self) -> bool:
        budget, began = self._terms.budget, self._handed_out
        return budget is not None and began is not None and budget.used_up(time.monotonic() - began, self._tokens)

    def _give_up(self, rows: int) -> None:
        """They stay unfinished."""
        self._open -= rows

    def _report(self, *, last: bool = False) -> None:
        now = time.monotonic()
        if self._on_progress is not None and (last or now - self._reported >= TICK_SECONDS):
            self._on_progress(self._done, self._total, self._tokens)
            self._reported = now


@dataclass(frozen=True, kw_only=True)
class _Event:
    """A request came to its end."""

    peer: Peer
    row: Row
    ask: Ask
    outcome: Reply | Exception
    task: asyncio.Task[None]
