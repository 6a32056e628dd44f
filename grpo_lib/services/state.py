"""What a set of services writes down of itself in its folder, for `grpo status`, `grpo down` and the next `grpo up`."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_lib.errors import ConfigError
from grpo_lib.services.processes import ProcessId, end, owned_session, runs
from grpo_lib.services.supervisor import Phase

STATE, LOCK = "up.json", "up.lock"
LEFTOVER_SECONDS = 10.0
"""That a leftover gets to end by itself."""


class ServiceState(BaseModel):
    """One service, as its supervisor saw it last."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    address: str
    phase: Phase
    process: ProcessId | None
    since: float = Field(description="When the phase began, in Unix seconds.")
    restarts: int
    log: str


class SetState(BaseModel):
    """A set of services and the process that supervises it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    supervisor: ProcessId
    ready: bool = Field(description="Whether all services were up at least once.")
    ray_address: str
    services: list[ServiceState]

    def running(self) -> bool:
        return self.supervisor.alive()


def read_state(folder: Path) -> SetState | None:
    """None: no set was started there, or it ended cleanly.

    Raises:
        ConfigError: the file is not ours.
    """
    file = folder / STATE
    try:
        return SetState.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ConfigError(
            f"{file} is not what this version of `grpo up` writes ({error.error_count()} problems); if no service runs "
            "any more, remove it"
        ) from None


def write_state(folder: Path, state: SetState) -> None:
    temporary = folder / f"{STATE}.tmp"
    temporary.write_text(state.model_dump_json(indent=1), encoding="utf-8")
    os.replace(temporary, folder / STATE)


def remove_state(folder: Path) -> None:
    (folder / STATE).unlink(missing_ok=True)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """One set in a folder. The lock goes with the process that holds it, however it ends.

    Raises:
        ConfigError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            state = read_state(folder)
            who = f" (process {state.supervisor.pid})" if state is not None and state.running() else ""
            raise ConfigError(
                f"`grpo up` already runs in {folder}{who}; end it with `grpo down --folder {folder}`, or give this one "
                "another --folder and other ports"
            ) from None
        yield


def leftovers(folder: Path, state: SetState) -> dict[int, list[psutil.Process]]:
    """Processes of services whose supervisor was killed, by the number of their leader."""
    found = {}
    for service in state.services:
        if service.process is not None and (left := owned_session(service.process, str(folder))):
            found[service.process.pid] = left
    return found


def end_leftovers(folder: Path, state: SetState) -> int:
    """Ends what a killed supervisor has left behind, and returns how many processes that were."""
    count = 0
    for service in reversed(state.services):
        if service.process is not None and (left := owned_session(service.process, str(folder))):
            count += len(left)
            end(service.process.pid, partial(_still, left, service.process, folder), LEFTOVER_SECONDS)
    return count


def _still(left: list[psutil.Process], leader: ProcessId, folder: Path) -> list[psutil.Process]:
    """Those that run of the ones that were found, and what they have started since. One that dies loses its mark."""
    return list({*filter(runs, left), *owned_session(leader, str(folder))})
