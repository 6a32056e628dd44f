"""What must be right before a service is started, and whether it works."""

import importlib.util
import os
import secrets
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from grpo_lib.errors import ConfigError, MissingPackageError

ANSWER_SECONDS = 1.0


def check_ray_installed() -> None:
    """
    Raises:
        MissingPackageError: it is not.
    """
    if importlib.util.find_spec("ray") is None:
        raise MissingPackageError("Ray is not installed; install the extra: pip install 'grpo-pipeline[ray]'")


def check_dashboard() -> None:
    """
    Raises:
        MissingPackageError: the packages of Ray's dashboard are not installed.
    """
    command = [sys.executable, "-c", "import ray.dashboard.optional_deps"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise MissingPackageError("--dashboard-port needs Ray's dashboard: pip install 'ray[default]>=2.60,<2.61'")


def check_port(name: str, host: str, port: int) -> None:
    """
    Args:
        name: option that sets the port.

    Raises:
        ConfigError: somebody listens there, or this machine has no such address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed connections don't count
        try:
            probe.bind((host, port))
            probe.listen()
        except socket.gaierror as error:
            raise ConfigError(f"--host {host}: {error.strerror}; give an address of this machine") from None
        except OSError as error:
            raise ConfigError(
                f"{name} {port}: can't listen at {host}:{port} ({error.strerror}{_holder(port)}); give another port or "
                "address, or end what uses it"
            ) from None


def _holder(port: int) -> str:
    try:
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid is not None:
                return f", process {each.pid} {psutil.Process(each.pid).name()}"
    except psutil.Error:
        pass  # of another user
    return ""


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def own_address() -> str:
    """Address under which other machines reach this one; no packet is sent to find out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"  # no network


def split_address(address: str) -> tuple[str, int]:
    """
    Raises:
        ConfigError: it is not HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"address {address!r} is not HOST:PORT, e.g. 192.168.1.10:6379")
    return host, int(port)


def listens(address: str, seconds: float = ANSWER_SECONDS) -> bool:
    """Whether somebody takes connections at HOST:PORT."""
    try:
        with socket.create_connection(split_address(address), timeout=seconds):
            return True
    except OSError:
        return False


def answers(url: str) -> bool:
    """Whether a server says that it is healthy."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


def token_file() -> Path:
    """Where Ray looks for the token, unless RAY_AUTH_TOKEN holds it."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()


def check_token_mode() -> None:
    """
    Raises:
        ConfigError: the environment switches the token off.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode != "token":
        raise ConfigError(
            f"RAY_AUTH_MODE={mode}: whoever reaches the cluster could run programs on it; unset it (the cluster uses a "
            "token)"
        )


def make_token() -> str:
    """Makes the secret of the cluster unless there is one, readable for its owner alone; says where it is.

    Ray's own command leaves the file readable for everybody.
    """
    check_token_mode()
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "the environment variable RAY_AUTH_TOKEN"
    file = token_file()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as token:
            token.write(secrets.token_hex(32))
    except FileExistsError:
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            file.chmod(0o600)
    return str(file)


def check_token() -> None:
    """Whether this machine has the secret of the cluster that it shall join.

    Raises:
        ConfigError: it has none.
    """
    check_token_mode()
    file = token_file()
    if os.environ.get("RAY_AUTH_TOKEN") or (file.is_file() and file.stat().st_size):
        return
    raise ConfigError(
        f"no token: copy the file that `grpo up` named on the head's machine to {file} here (mode 0600), or set "
        "RAY_AUTH_TOKEN_PATH"
    )
