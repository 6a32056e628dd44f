"""One flow at a time works on a run: what happens when its holder dies, pauses or can't be reached."""

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from grpo_lib.errors import LeaseHeldError, LeaseLostError, StoreDownError
from grpo_lib.storage.claims import Claim, newest_epoch, start_of, this_process
from grpo_lib.storage.lease import Contest, Lease, Pace, check_lease, holding, holding_in_turn
from grpo_lib.storage.objects import ObjectStore
from tests.memory_store import MemoryStore

PACE = Pace(beat=5, expiry=30, poll=0.5)
QUICK = Pace(beat=0.2, expiry=1.5, poll=0.05)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def elsewhere(name: str = "far") -> Claim:
    """A process whose end can't be seen from here."""
    return this_process().model_copy(update={"id": name, "host": f"{name}-host", "place": f"boot of {name}"})


def ask(objects: Any, clock: Clock, me: Claim | None = None) -> Contest:
    return Contest(objects, "demo", me or elsewhere(), PACE, clock)


def won(objects: Any, clock: Clock, me: Claim | None = None) -> Lease:
    made = ask(objects, clock, me).poll()
    assert made is not None
    return made


def test_a_run_is_claimed_released_and_claimed_again_with_a_higher_number(objects: ObjectStore, clock: Clock) -> None:
    first = won(objects, clock)
    first.check()
    first.release()
    second = won(objects, clock)
    assert (first.epoch, second.epoch) == (1, 2)
    second.check()


def test_of_two_that_ask_at_once_one_gets_the_run(objects: ObjectStore, clock: Clock) -> None:
    one, other = ask(objects, clock, elsewhere("one")), ask(objects, clock, elsewhere("other"))
    assert one.is_free() and other.is_free()
    assert one.poll() is not None
    with pytest.raises(LeaseHeldError, match=r"held by process .* on one-host"):
        other._claim()


def test_a_holder_whose_heart_beats_is_left_alone_and_named(objects: ObjectStore, clock: Clock) -> None:
    holder, second = won(objects, clock, elsewhere("first")), ask(objects, clock)
    assert second.poll() is None
    clock.now += 3
    assert second.poll() is None
    holder.beat()
    with pytest.raises(LeaseHeldError) as caught:
        second.poll()
    message = str(caught.value)
    assert "run 'demo' is held by process" in message and "on first-host" in message and "since 20" in message
    assert "last heartbeat says 20" in message and f"`kill {os.getpid()}` on first-host" in message
    holder.check()


def test_a_holder_without_a_heartbeat_gives_way_after_the_expiry_and_not_before(
    objects: ObjectStore, clock: Clock
) -> None:
    won(objects, clock, elsewhere("dead"))
    second = ask(objects, clock)
    for _ in range(10):
        assert second.poll() is None
        clock.now += 3
    taken = second.poll()
    assert taken is not None and taken.epoch == 2


def test_a_paused_holder_that_wakes_up_stops_and_says_who_has_the_run(objects: ObjectStore, clock: Clock) -> None:
    paused, second = won(objects, clock, elsewhere("paused")), ask(objects, clock, elsewhere("next"))
    while (taken := second.poll()) is None:
        clock.now += 3
    with pytest.raises(LeaseLostError, match=r"taken over while this process was paused: .* on next-host"):
        paused.check()
    paused.beat()
    with pytest.raises(LeaseLostError):
        paused.check()
    taken.check()


def test_while_the_store_is_away_nobody_takes_over(clock: Clock) -> None:
    memory = MemoryStore()
    holder, second = won(memory, clock, elsewhere("first")), ask(memory, clock)
    assert second.poll() is None

    def away() -> None:
        raise StoreDownError("away")

    memory.before = away
    for _ in range(30):
        clock.now += 2
        with pytest.raises(StoreDownError):
            second.poll()
        with pytest.raises(StoreDownError):
            holder.beat()
    memory.before = lambda: None
    assert second.poll() is None, "both come back: the watch begins anew"
    clock.now += 4
    holder.check()
    holder.beat()
    with pytest.raises(LeaseHeldError):
        second.poll()


def test_a_holder_that_comes_back_while_it_is_replaced_is_waited_for(clock: Clock) -> None:
    memory = MemoryStore()
    holder, second = won(memory, clock, elsewhere("first")), ask(memory, clock)
    while clock.now < 1029:
        assert second.poll() is None
        clock.now += 3
    operations: list[int] = []

    def come_back() -> None:
        operations.append(1)
        if len(operations) == 4:  # between the last look of the second and its claim
            memory.before = lambda: None
            holder.beat()

    memory.before = come_back
    assert second.poll() is None
    holder.check()  # it is sure for a while, so the second waits
    clock.now += PACE.trust
    with pytest.raises(LeaseLostError):
        holder.check()
    clock.now += PACE.expiry
    taken = second.poll()
    assert taken is not None and taken.epoch == 2


@pytest.mark.parametrize("operation", [1, 2])
def test_a_heartbeat_during_which_the_run_is_taken_over_makes_nobody_sure(clock: Clock, operation: int) -> None:
    memory = MemoryStore()
    holder, second = won(memory, clock, elsewhere("first")), ask(memory, clock)
    while clock.now < 1030:
        assert second.poll() is None
        clock.now += 3
    left, taken = [operation], []

    def take_over() -> None:
        left[0] -= 1
        if left[0] == 0:
            memory.before = lambda: None
            with suppress(LeaseHeldError):
                taken.append(second.poll())

    memory.before = take_over
    holder.beat()
    assert sum(is_sure(each) for each in [holder, *taken]) == 1


def test_a_process_of_this_machine_that_is_gone_gives_way_at_once_even_as_a_zombie(
    objects: ObjectStore, clock: Clock
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    claim = this_process().model_copy(update={"pid": child.pid, "started": start_of(child.pid)})
    won(objects, clock, claim)
    with pytest.raises(LeaseHeldError, match=f"process {child.pid} "):
        ask(objects, clock).poll()
    child.kill()
    deadline = time.monotonic() + 10
    while start_of(child.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    taken = ask(objects, clock).poll()  # nobody has asked for its exit status yet
    child.wait()
    assert taken is not None and taken.epoch == 2
    taken.release()
    reborn = claim.model_copy(update={"pid": os.getpid(), "started": "1"})
    won(objects, clock, reborn)
    assert ask(objects, clock).poll() is not None, "another process has the number now"


@pytest.mark.parametrize("damage", [b"", b"\xff", b"{}", b'{"id": 3}'])
def test_an_unreadable_claim_is_watched_like_any_other(clock: Clock, damage: bytes) -> None:
    memory = MemoryStore()
    won(memory, clock)
    for path in memory.content:
        memory.content[path] = damage
    second = ask(memory, clock)
    assert second.poll() is None
    while (taken := second.poll()) is None:
        clock.now += 3
    assert clock.now >= 1030 and taken.epoch == 2


def test_claims_that_were_tidied_up_behind_ones_back_give_no_run_to_two(clock: Clock) -> None:
    memory = MemoryStore()
    won(memory, clock, elsewhere("a")).release()
    slow = ask(memory, clock, elsewhere("slow"))
    assert slow.is_free()
    won(memory, clock, elsewhere("b")).release()
    holder = won(memory, clock, elsewhere("c"))
    for epoch in (1, 2):
        memory.content.pop(f"runs/demo/leases/{epoch:06d}.json")
    slow._claim()
    with pytest.raises(LeaseHeldError, match="c-host"):
        slow.poll()
    holder.check()


def run_of(objects: ObjectStore) -> Any:
    return SimpleNamespace(objects=objects, name="demo", place="here/runs/demo")


def test_a_run_is_held_for_as_long_as_the_block_and_released_after_an_error(objects: ObjectStore) -> None:
    run = run_of(objects)
    with suppress(RuntimeError), holding(run) as lease:
        check_lease(run)
        with pytest.raises(LeaseHeldError, match=f"process {os.getpid()} "), holding(run):
            pass
        raise RuntimeError("failed")
    check_lease(run)  # no matter of leases any more
    with holding(run) as again:
        assert (lease.epoch, again.epoch) == (1, 2)


def test_a_second_holder_is_refused_as_soon_as_a_heartbeat_is_seen(objects: ObjectStore) -> None:
    pace = Pace(beat=0.2, expiry=20, poll=0.05)
    run = run_of(objects)
    with holding(run, me=elsewhere("one"), pace=pace):
        began = time.monotonic()
        with pytest.raises(LeaseHeldError), holding(run, me=elsewhere("two"), pace=pace):
            pass
        assert time.monotonic() - began < pace.expiry / 2, "a beat was seen; the expiry was not waited for"
        check_lease(run)


def test_a_holder_at_work_keeps_the_run_longer_than_the_expiry(objects: ObjectStore) -> None:
    pace = Pace(beat=0.2, expiry=4, poll=0.05)
    run = run_of(objects)
    with holding(run, me=elsewhere("one"), pace=pace):
        time.sleep(pace.expiry + 0.5)
        check_lease(run)


def test_one_who_waits_for_a_turn_gets_it_when_the_holder_is_done(local_store: ObjectStore) -> None:
    run, events = run_of(local_store), []
    busy = threading.Event()

    def first() -> None:
        with holding(run, me=elsewhere("one"), pace=QUICK):
            busy.set()
            time.sleep(0.6)
            events.append("first is done")

    thread = threading.Thread(target=first)
    thread.start()
    assert busy.wait(10)
    with holding_in_turn(run, 20, pace=QUICK) as lease:
        events.append("second")
        assert lease.epoch == 2
    assert events == ["first is done", "second"]
    thread.join()


def test_one_who_waits_for_a_turn_gives_up_in_time_and_errors_of_its_own_pass_through(local_store: ObjectStore) -> None:
    run = run_of(local_store)
    with holding(run, me=elsewhere("one"), pace=QUICK):
        began = time.monotonic()
        with pytest.raises(LeaseHeldError, match="one-host"), holding_in_turn(run, 0.5, pace=QUICK):
            pass
        assert 0.4 < time.monotonic() - began < 5
    with pytest.raises(LeaseHeldError, match="mine"), holding_in_turn(run, 20, pace=QUICK):
        raise LeaseHeldError("mine")  # from inside: not waited for


def test_a_holder_that_stands_still_loses_the_run_to_the_next(
    local_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(local_store)
    with holding(run, me=elsewhere("one"), pace=QUICK) as first:
        with monkeypatch.context() as patch:
            patch.setattr(first, "beat", lambda: None)
            time.sleep(2 * QUICK.beat)
            second = Contest(local_store, "demo", elsewhere("two"), QUICK, time.monotonic)
            while (taken := second.poll()) is None:
                time.sleep(QUICK.poll)
        with pytest.raises(LeaseLostError, match="two-host"):
            check_lease(run)
        taken.check()
        assert newest_epoch(local_store, "demo") == 2


def test_a_store_that_is_away_when_the_run_is_released_hides_no_error(clock: Clock) -> None:
    memory = MemoryStore()
    holder = won(memory, clock)

    def away() -> None:
        raise StoreDownError("away")

    memory.before = away
    holder.release()
    memory.before = lambda: None
    stopped = threading.Event()
    stopped.set()
    holder.keep(stopped)


class Holders(RuleBasedStateMachine):
    """Processes on machines of their own that ask, beat, pause, die, and come between each other's calls."""

    asking = Bundle("asking")
    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.memory, self.count = Clock(), MemoryStore(), 0
        self.alive: list[Lease] = []

    @rule(target=asking)
    def somebody_asks(self) -> Contest:
        self.count += 1
        offset = 1e4 * self.count  # the clock of each machine is its own
        return Contest(self.memory, "demo", elsewhere(str(self.count)), PACE, lambda: self.clock() + offset)

    @rule(contest=asking, target=holders)
    def polls(self, contest: Contest) -> Any:
        try:
            lease = contest.poll()
        except LeaseHeldError:
            return multiple()
        if lease is None or any(lease is each for each in self.alive):
            return multiple()
        contest.poll = lambda: None  # type: ignore[method-assign]  # it has what it asked for
        self.alive.append(lease)
        return lease

    @rule(
        contest=asking,
        target=holders,
        times=st.integers(0, 11),
        operation=st.integers(1, 6),
        seconds=st.sampled_from([0, 1, 6, 24, 31]),
        other=st.none() | holders,
    )
    def watches_polls_and_is_interrupted(
        self, contest: Contest, times: int, operation: int, seconds: float, other: Lease | None
    ) -> Any:
        for _ in range(times):
            try:
                if contest.is_free():
                    break
            except LeaseHeldError:
                return multiple()
            self.clock.now += 3
        self._interrupt(operation, seconds, other)
        return self.polls(contest)

    @rule(holder=holders)
    def beats(self, holder: Lease) -> None:
        if holder in self.alive:
            holder.beat()

    @rule(
        holder=holders, operation=st.integers(1, 3), seconds=st.sampled_from([0, 6, 25, 31]), contest=st.none() | asking
    )
    def beats_and_is_interrupted(self, holder: Lease, operation: int, seconds: float, contest: Contest | None) -> None:
        if holder in self.alive:
            self._interrupt(operation, seconds, contest)
            holder.beat()

    @rule(holder=holders)
    def dies(self, holder: Lease) -> None:
        self.alive = [each for each in self.alive if each is not holder]

    @rule(holder=holders)
    def releases(self, holder: Lease) -> None:
        if holder in self.alive:
            self.alive.remove(holder)
            holder.release()

    @rule(seconds=st.sampled_from([0.5, 3, 5, 20, 24, 30, 100]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    def _interrupt(self, operation: int, seconds: float, other: Lease | Contest | None) -> None:
        left = [operation]

        def before() -> None:
            left[0] -= 1
            if left[0] == 0:
                self.memory.before = lambda: None
                self.clock.now += seconds
                if isinstance(other, Lease) and other in self.alive:
                    other.beat()
                elif isinstance(other, Contest):
                    self.polls(other)

        self.memory.before = before

    @invariant()
    def at_most_one_is_sure_of_the_run(self) -> None:
        self.memory.before = lambda: None
        sure = [each.epoch for each in self.alive if is_sure(each)]
        assert len(sure) <= 1, sure


def is_sure(lease: Lease) -> bool:
    try:
        lease.check()
    except LeaseLostError:
        return False
    return True


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
