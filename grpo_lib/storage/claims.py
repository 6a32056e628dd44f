"""Who asks for a run, or has it: what a claim says about a process, and whether that process still is there."""

import getpass
import os
import socket
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from grpo_lib.errors import NotFoundError
from grpo_lib.storage import paths
from grpo_lib.storage.manifests import Record
from grpo_lib.storage.objects import ObjectStore

R = TypeVar("R", bound=Record)


class Claim(Record):
    """A process that holds a run, or held it."""

    id: str
    host: str
    place: str | None
    """Of its process id: boot and namespace; None: unknown, so that it can't be looked up."""
    pid: int
    started: str | None
    """When the process started, in ticks since boot: a process id is given again."""
    user: str
    command: str
    since: str


class Beat(Record):
    """A heartbeat."""

    id: str
    count: int
    at: str
    released: bool = False


def newest_epoch(objects: ObjectStore, run: str) -> int:
    """The number of the newest claim; 0: there is none."""
    epochs = [paths.epoch_of(info.path) for info in objects.list(paths.leases_folder(run))]
    return max((epoch for epoch in epochs if epoch is not None), default=0)


def user_name() -> str:
    """Of whom this process belongs to."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, in a container
        return str(os.getuid())


def this_process() -> Claim:
    """A new claim of this process."""
    pid = os.getpid()
    return Claim(
        id=uuid.uuid4().hex,
        host=socket.gethostname(),
        place=_pid_place(),
        pid=pid,
        started=start_of(pid),
        user=user_name(),
        command=" ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200],
        since=utc_now(),
    )


def is_gone(claim: Claim) -> bool:
    """Its process ran here and does no more."""
    here = claim.place is not None and claim.place == _pid_place()
    return here and start_of(claim.pid) != claim.started


def is_alive_here(claim: Claim) -> bool:
    return claim.place is not None and claim.place == _pid_place() and start_of(claim.pid) == claim.started


def _pid_place() -> str | None:
    """What a process id counts in: this boot of this machine, and a namespace of a container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None  # no Linux: heartbeats tell


def start_of(pid: int) -> str | None:
    """When a process started; None: there is none, or only what its parent has not asked for yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def read_if_there(objects: ObjectStore, path: str) -> bytes | None:
    try:
        return objects.get(path)
    except NotFoundError:
        return None


def read_claim(objects: ObjectStore, run: str, epoch: int) -> Claim | None:
    return parsed(Claim, read_if_there(objects, paths.claim_file(run, epoch)))


def parsed(kind: type[R], content: bytes | None) -> R | None:
    """None for what is not there or damaged: then heartbeats are watched all the same."""
    try:
        return None if content is None else kind.model_validate_json(content)
    except ValidationError:
        return None


def who(claim: Claim | None) -> str:
    if claim is None:
        return "a process that left no readable claim"
    return f"process {claim.pid} of {claim.user} on {claim.host} (`{claim.command}`) since {claim.since}"


def utc_now() -> str:
    """For people."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
