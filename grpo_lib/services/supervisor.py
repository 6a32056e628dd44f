"""Starts services in order, starts again what dies, and ends all: one loop in one thread."""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from grpo_lib.errors import ServiceError
from grpo_lib.services.processes import end, launch, session_of

Phase = Literal["waiting", "starting", "up", "ended"]
TAIL_BYTES = 3000
LOG_BYTES = 2**20
"""Of what a service has said since it was started, the part that ``ready`` gets."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """What to start, and how to see that it works."""

    name: str
    address: str
    """Where it listens, for people."""
    command: Sequence[str]
    env: Mapping[str, str]
    log: Path
    ready: Callable[[str], bool]
    """Asked until it says yes, with what the service has written since it was started; must take a second at most."""
    after: str | None = None
    """Name of an earlier service that must be up when this one starts again."""
    prepare: Callable[[], None] = lambda: None
    """Called before every start."""
    tries: int = 1
    """Starts that may fail in a row until the first has worked."""
    start_seconds: float = 180.0
    stop_seconds: float = 15.0


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """How often, and how soon, a service is started again."""

    first: float = 0.5
    """Seconds before the first start again; each quick death doubles them."""
    longest: float = 30.0
    quick: float = 20.0
    """A service that dies so many seconds after it was up, or before it was, died quickly."""
    deaths: int = 5
    """After so many quick deaths in a row there is no further start."""


@dataclass
class Member:
    """A service, and where it stands."""

    service: Service
    phase: Phase = "waiting"
    process: "subprocess.Popen[bytes] | None" = None
    since: float = field(default_factory=time.time)
    """When the phase began, in Unix seconds."""
    restarts: int = 0
    quick_deaths: int = 0
    has_been_up: bool = False
    not_before: float = 0.0
    log_start: int = 0


class Supervisor:
    """Keeps services up.

    Args:
        services: in the order in which they are started, one after another: together they would slow each other down
            beyond what some of them wait. They are ended in the reverse order.
        changed: called after each change, with the member and a line for people.
    """

    def __init__(
        self, services: Sequence[Service], changed: Callable[[Member, str], None], backoff: Backoff | None = None
    ) -> None:
        self.members = [Member(service) for service in services]
        self._by_name = {member.service.name: member for member in self.members}
        self._changed, self._backoff = changed, backoff or Backoff()

    @property
    def all_up(self) -> bool:
        return all(member.phase == "up" for member in self.members)

    def step(self) -> None:
        """One look at every service. To be called again and again, in the main thread.

        Raises:
            ServiceError: one did not come up at its first start, or died too often.
        """
        for member in self.members:
            if member.phase == "waiting":
                if time.monotonic() >= member.not_before and self._may_start(member):
                    self._start(member)
            elif member.process is not None and member.process.poll() is not None:
                self._died(member, _how(member.process.returncode))
            elif member.phase == "starting":
                self._look(member)

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Ends all services with everything that they have started.

        Args:
            hurry: asked while they get the time that they need: whether to kill them instead.

        Raises:
            ServiceError: the kernel did not end a process that was killed; all others have ended.
        """
        stuck = []
        for member in reversed(self.members):
            if member.process is None:
                continue
            try:
                _end(member.process, member.service.stop_seconds, hurry)
            except ServiceError as error:
                stuck.append(f"{member.service.name}: {error}")
            member.process = None
            self._enter(member, "ended", f"{member.service.name} ended")
        if stuck:
            raise ServiceError("; ".join(stuck))

    def _may_start(self, member: Member) -> bool:
        if not member.has_been_up:
            return all(each.has_been_up for each in self.members[: self.members.index(member)])
        return member.service.after is None or self._by_name[member.service.after].phase == "up"

    def _start(self, member: Member) -> None:
        service = member.service
        service.prepare()
        member.log_start = service.log.stat().st_size if service.log.exists() else 0
        member.process = launch(service.command, service.env, service.log)
        self._enter(member, "starting", f"{service.name} starts at {service.address}")

    def _look(self, member: Member) -> None:
        service, seconds = member.service, time.time() - member.since
        if service.ready(_said(member, LOG_BYTES)):
            again = " again" if member.has_been_up else ""
            member.has_been_up = True
            self._enter(member, "up", f"{service.name} is up{again} at {service.address} ({seconds:.0f} s)")
        elif seconds > service.start_seconds:
            self._died(member, f"did not answer within {service.start_seconds:g} s")

    def _died(self, member: Member, how: str) -> None:
        service, lived = member.service, time.time() - member.since
        assert member.process is not None
        _end(member.process, 1.0)  # what it leaves behind may hold its port
        member.process = None
        quick = member.phase != "up" or lived < self._backoff.quick
        member.quick_deaths = member.quick_deaths + 1 if quick else 0
        if not member.has_been_up and member.quick_deaths >= service.tries:
            raise ServiceError(f"{service.name} {how} at its start{_tail(member)}")
        if member.quick_deaths >= self._backoff.deaths:
            raise ServiceError(
                f"{service.name} {how}, the last {member.quick_deaths} times within {self._backoff.quick:g} s of its "
                f"start: no further try{_tail(member)}"
            )
        member.restarts += 1
        delay = min(self._backoff.longest, self._backoff.first * 2.0 ** max(0, member.quick_deaths - 1))
        member.not_before = time.monotonic() + delay
        self._enter(member, "waiting", f"{service.name} {how}; it starts again in {delay:g} s")

    def _enter(self, member: Member, phase: Phase, line: str) -> None:
        member.phase, member.since = phase, time.time()
        self._changed(member, line)


def _end(process: "subprocess.Popen[bytes]", patience: float, hurry: Callable[[], bool] = lambda: False) -> None:
    def left() -> list[psutil.Process]:
        process.poll()  # takes its status, if it has ended
        return session_of(process.pid)

    end(process.pid, left, patience, hurry)


def _said(member: Member, at_most: int) -> str:
    """The last bytes of what a service has written since it was started."""
    with member.service.log.open("rb") as log:
        size = log.seek(0, 2)
        log.seek(max(member.log_start, size - at_most))
        return log.read().decode(errors="replace")


def _tail(member: Member) -> str:
    said = _said(member, TAIL_BYTES).strip()
    return f"; its log ends with\n{said}\n(all of it: {member.service.log})" if said else "; it wrote nothing"


def _how(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
