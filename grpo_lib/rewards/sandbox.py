"""Python that nobody trusts, run and ended: `run(program, stdin)`.

Levels by name: see `grpo_lib.rewards.sandbox_levels`. What stays possible behind the strong ones: to use the processors
until the time is over, and memory: `Limits.memory_mib` holds for each process and, checked twenty times a second, for
all together; memory that is no process's (files without a name) is bounded by open files times `disk_mib` in each
process. Where that is too much, run the judges in a container with a memory limit.

`limits` keeps a program from taking too much by mistake, and holds back none that means harm. Its folder stays if this
process is killed.
"""

import os
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import ceil
from typing import get_args

import httpx

from grpo_lib.errors import ConfigError, RewardError
from grpo_lib.rewards.sandbox_levels import STRONG, check_name, command
from grpo_lib.rewards.sandbox_process import Talk, Why, end
from grpo_lib.urls import without_secrets

REMOTE_GRACE_SECONDS = 30.0
"""A remote sandbox has so long beyond the program's time."""
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program says the same each time
    "OMP_NUM_THREADS": "1",  # threads count as processes
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one run of a program may take."""

    wall_seconds: float = 5.0
    cpu_seconds: float = 5.0
    """Of each process, rounded up to whole seconds."""
    memory_mib: int = 512
    """Of each process's address space, and what all together keep in memory."""
    processes: int = 16
    """With their threads."""
    disk_mib: int = 16
    """In /tmp; also the largest file."""
    output_kib: int = 256
    """Of stdout, and of stderr."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = {"memory_mib": 64}.get(name, 0 if isinstance(value, float) else 1)
            if not (value >= least and value > 0):
                raise ConfigError(f"sandbox limit {name}={value}: must be at least {least or 'a little above 0'}")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a program ended."""

    stdout: str
    stderr: str
    code: int
    """Its exit status; negative: the signal that ended it."""
    why: Why | None
    """What it took too much of; None: it ended by itself."""
    seconds: float
    """With the start of the sandbox."""


def run(
    program: str,
    stdin: str = "",
    *,
    level: str = "bubblewrap",
    limits: Limits | None = None,
    endpoint: str | None = None,
) -> Ran:
    """Runs Python source and ends everything it started.

    Args:
        endpoint: of level ``remote``: gets ``{"program", "stdin", "limits"}`` and gives ``{"stdout", "stderr", "code",
            "reason"}``, where reason is null or a word of `Why`.

    Raises:
        ConfigError: there is no such level.
        MissingPackageError: the level needs a program that is not installed.
        RewardError: the sandbox itself failed; that says nothing about the program.
    """
    check_name(level)
    limits = limits or Limits()
    if level == "remote":
        return _run_there(program, stdin, limits, endpoint)
    began = time.monotonic()
    text = ("\n" + program).encode("utf-8", "replace")  # never empty: read or not shows where its reader stands
    with ExitStack() as stack:
        folder = "/" if level in STRONG else stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-"))
        file = os.memfd_create("program")
        stack.callback(os.close, file)
        os.pwrite(file, text, 0)
        argv = command(
            level, file, ceil(limits.cpu_seconds), limits.memory_mib * 2**20, limits.processes, limits.disk_mib * 2**20
        )
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, cwd=folder,
            pass_fds=[file], start_new_session=level == "limits",
        )  # fmt: skip
        why: Why | None = None
        talk = Talk(process, stdin.encode("utf-8", "replace"))
        try:
            why = talk.hold(began + limits.wall_seconds, limits.memory_mib * 2**20, limits.output_kib * 1024)
        finally:
            end(process, talk, level == "limits")
        started = os.lseek(file, 0, os.SEEK_CUR) > 0
    out, err = (bytes(each).decode("utf-8", "replace") for each in (talk.out, talk.err))
    code = process.returncode
    if level in STRONG and code > 128:
        code = 128 - code
    if not started:  # whatever it was ended for, the program had no part in it
        how = "does not work here" if why is None else f"did not start: ended for {why} after {limits.wall_seconds:g} s"
        raise RewardError(f"sandbox level {level!r} {how}: {' '.join(err.split())[-500:]}")
    if why is None and code in (-signal.SIGKILL, -signal.SIGXCPU):
        why = "cpu time" if code == -signal.SIGXCPU else "killed"
    code = -signal.SIGKILL if why else code
    return Ran(stdout=out, stderr=err, code=code, why=why, seconds=time.monotonic() - began)


def check_level(level: str, endpoint: str | None = None) -> None:
    """Runs a small program there.

    Raises:
        ConfigError, MissingPackageError: the level does not work on this machine; with the reason and the others.
    """
    others = "levels: bubblewrap (apt-get install bubblewrap), namespaces, limits (weak), remote (a service of yours)"
    try:
        ran = run(TRIAL, "works", level=level, limits=Limits(wall_seconds=20.0), endpoint=endpoint)
    except RewardError as error:
        raise ConfigError(f"{error}; {others}") from None
    if ran.stdout != "works" or ran.code != 0:
        said = f"{ran.why or ran.code}: {' '.join(ran.stderr.split())[-500:]}"
        raise ConfigError(f"sandbox level {level!r} does not work here: a trial program ended with {said}; {others}")


TRIAL = """
import subprocess, sys, tempfile
with tempfile.TemporaryFile("w+") as file:
    file.write(sys.stdin.read())
    file.seek(0)
    subprocess.run(["cat"], stdin=file, check=True)
"""


def _run_there(program: str, stdin: str, limits: Limits, endpoint: str | None) -> Ran:
    if endpoint is None:
        raise ConfigError("sandbox level 'remote' needs the endpoint's address; set endpoint to its URL")
    began, most = time.monotonic(), limits.output_kib * 1024
    question = {"program": program, "stdin": stdin, "limits": asdict(limits)}
    try:
        answer = httpx.post(endpoint, json=question, timeout=limits.wall_seconds + REMOTE_GRACE_SECONDS)
        answer.raise_for_status()
        said = answer.json()
        out, err, code, why = (said[name] for name in ("stdout", "stderr", "code", "reason"))
        if not (isinstance(out, str) and isinstance(err, str) and type(code) is int):
            raise TypeError("stdout and stderr must be texts, and code a whole number")
        if why not in (None, *get_args(Why)):
            raise ValueError(f"reason {str(why)[:80]!r} is neither null nor one of {', '.join(get_args(Why))}")
        return Ran(stdout=out[:most], stderr=err[:most], code=code, why=why, seconds=time.monotonic() - began)
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        said = without_secrets(f"the sandbox at {endpoint} failed: {type(error).__name__}: {error}")
        raise RewardError(said) from None
