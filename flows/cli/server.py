"""The embedded Prefect server of a command: started first, so that it comes up while heavy packages are imported.

Prefect would start one by itself, later, and would leave it running when the command is killed (SIGKILL). This one ends
with the command, however that ends.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from grpo_lib.errors import RunError
from grpo_lib.parent import end_with_parent

START_SECONDS = 120.0
UVICORN = "import sys; sys.modules['pandas'] = None; import uvicorn; uvicorn.main()"
"""Prefect imports pandas where it finds it, some 20 MiB of which the server has no use."""
EMBEDDED = "GRPO_EMBEDDED_PREFECT"
"""In the environment: the server ends with this process, and has no pages."""


def start_prefect() -> Callable[[], None]:
    """Starts a server, unless the user has one; returns a function that waits until it answers.

    To be called before Prefect is imported: what is registered first at exit ends last, so that the server is still
    there when Prefect sends its last logs.
    """
    if os.environ.get("PREFECT_API_URL") or _profile_has_a_server():
        return lambda: None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/api"
    log = tempfile.TemporaryFile()  # noqa: SIM115  open for as long as the server runs
    server = _start(address, log.fileno())
    atexit.register(_stop, server)
    os.environ["PREFECT_API_URL"] = address
    os.environ[EMBEDDED] = "1"
    return lambda: _wait(server, address, log)


def _stop(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    try:
        server.wait(timeout=5)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def prefect_home() -> Path:
    return Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()


def _profile_has_a_server() -> bool:
    """Whether the active Prefect profile names a server."""
    try:
        profiles = tomllib.loads((prefect_home() / "profiles.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return False
    active = os.environ.get("PREFECT_PROFILE", profiles.get("active"))
    return "PREFECT_API_URL" in profiles.get("profiles", {}).get(active, {})


def _start(address: str, log: int) -> "subprocess.Popen[bytes]":
    port = address.rpartition(":")[2].removesuffix("/api")
    command = [sys.executable, "-c", UVICORN, "--factory", "prefect.server.api.server:create_app"]
    command += ["--host", "127.0.0.1", "--port", port, "--log-level", "error", "--lifespan", "on"]
    # The flags with which Prefect starts its own temporary server: no user interface, no schedulers.
    flags = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    end = partial(end_with_parent, signal.SIGTERM)
    return subprocess.Popen(command, env=os.environ | flags, stdout=log, stderr=log, preexec_fn=end)


def _wait(server: "subprocess.Popen[bytes]", address: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.05)
    log.seek(0)
    said = log.read().decode(errors="replace").strip()[-500:]
    raise RunError(
        f"the embedded Prefect server did not come up within {START_SECONDS:.0f} s; it said: {said or 'nothing'}. "
        "Start one with `prefect server start` and set PREFECT_API_URL=http://127.0.0.1:4200/api"
    )
