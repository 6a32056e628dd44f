"""`grpo status`: services and workers, what each does and since when."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from grpo_lib.services.state import ServiceState

PREFECT_HEALTH, MLFLOW_HEALTH = "/api/health", "/health"


def status(
    folder: Annotated[Path, typer.Option("--folder", help="Of `grpo up`.")] = Path(".grpo"),
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT of the Ray head; default: that of the folder, else of this machine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Show services and workers; ends with code 1 if something is down."""
    with only_errors_printed():
        found = look(folder.absolute(), address)
    if as_json:
        import json

        typer.echo(json.dumps(found))
    else:
        _print(found)
    if found["problem"] is not None:
        raise typer.Exit(1)


@contextmanager
def only_errors_printed() -> Iterator[None]:
    """Inside, what anybody writes to the standard output goes to the standard error: Ray's parts print there, too."""
    output = sys.stdout
    output.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        output.flush()  # of whoever has kept it from before
        os.dup2(kept, 1)
        os.close(kept)


def look(folder: Path, address: str | None) -> dict[str, Any]:
    """Everything that can be known now; ``problem`` is None if all that should be up is up."""
    from grpo_lib.services.ray_nodes import current_cluster
    from grpo_lib.services.state import leftovers, read_state

    state = read_state(folder)
    found: dict[str, Any] = {"folder": str(folder), "services": [], "nodes": [], "workers": [], "problem": None}
    if state is not None:
        found["services"] = [_service(each) for each in state.services]
        away = [each["name"] for each in found["services"] if each["state"] != "up"]
        if not state.running():
            left = sum(len(each) for each in leftovers(folder, state).values())
            found["problem"] = f"`grpo up` was killed and left {left} processes; `grpo down` ends them"
        elif away:
            found["problem"] = f"not up: {', '.join(away)}"
        address = address or state.ray_address
    found["address"] = address = address or current_cluster()
    if address is None:
        found["problem"] = (
            f"no `grpo up` runs in {folder}, no Ray cluster on this machine; start one, or give --address"
        )
        return found
    cluster = _cluster(address)
    return found | cluster | {"problem": found["problem"] or cluster["problem"]}


def _service(state: "ServiceState") -> dict[str, Any]:
    from grpo_lib.services.processes import memory_of, session_of

    alive = state.process is not None and state.process.alive()
    phase: str = state.phase if alive or state.phase == "waiting" else "down"
    if phase == "up" and not _answers(state):
        phase = "not answering"
    return {
        "name": state.name,
        "state": phase,
        "address": state.address,
        "pid": state.process.pid if alive and state.process is not None else None,
        "since": state.since,
        "restarts": state.restarts,
        "memory_bytes": memory_of(session_of(state.process.pid)) if alive and state.process is not None else 0,
        "log": state.log,
    }


def _answers(state: "ServiceState") -> bool:
    from grpo_lib.services.checks import answers, listens

    if state.address.startswith("http"):
        return answers(state.address + (PREFECT_HEALTH if state.name == "prefect" else MLFLOW_HEALTH))
    return listens(state.address)


def _cluster(address: str) -> dict[str, Any]:
    """Machines and workers of a cluster."""
    from grpo_lib.errors import GrpoError
    from grpo_lib.services.checks import check_ray_installed, check_token
    from grpo_lib.services.ray_nodes import nodes

    nothing: dict[str, Any] = {"nodes": [], "workers": [], "problem": None}
    try:
        check_ray_installed()
        check_token()
        machines = [each.model_dump() for each in nodes(address) if each.alive and not each.head]
    except GrpoError as error:
        return nothing | {"problem": str(error)}
    from grpo_lib.placement.code_version import code_digest
    from grpo_lib.placement.ray_connection import statuses

    try:
        workers = [each.model_dump() | {"same_code": each.code == code_digest()} for each in statuses(address)]
    except ConnectionError as error:
        return nothing | {"nodes": machines, "problem": f"no Ray cluster answers at {address}: {error}"}
    return {"nodes": machines, "workers": workers, "problem": None}


def _print(found: dict[str, Any]) -> None:
    from rich.table import Table

    from flows.cli.console import console

    if found["services"]:
        table = Table("service", "state", "address", "process", "since", "restarts", "memory", box=None)
        for each in found["services"]:
            state = f"[green]{each['state']}[/]" if each["state"] == "up" else f"[red]{each['state']}[/]"
            pid = "" if each["pid"] is None else str(each["pid"])
            memory = _size(each["memory_bytes"])
            table.add_row(each["name"], state, each["address"], pid, _ago(each["since"]), str(each["restarts"]), memory)
        console.print(table)
    if found["nodes"]:
        console.print(f"\nRay cluster at {found['address']}", markup=False)
        table = Table("machine", "offers", box=None)
        for each in found["nodes"]:
            table.add_row(each["host"], _offer(each["resources"]))
        console.print(table)
        _print_workers(found["workers"])
    if found["problem"] is not None:
        console.print(found["problem"], style="red", markup=False, soft_wrap=True)


def _print_workers(workers: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from flows.cli.console import console

    if not workers:
        console.print("workers: none yet: they start with the first run")
        return
    table = Table("worker", "role", "where", "does", "since", "policy", "memory", "GPU", "code", box=None)
    for each in workers:
        where = f"{each['host']} {each['pid']}" if each["host"] else ""
        policy = "" if each["policy_version"] is None else str(each["policy_version"])
        code = ("this" if each["same_code"] else "[red]other[/]") if each["code"] else ""
        sizes = _size(each["memory_bytes"]), _size(each["gpu_memory_bytes"])
        table.add_row(each["name"], each["role"], where, _does(each), _ago(each["since"]), policy, *sizes, code)
    console.print(table)


def _does(worker: dict[str, Any]) -> str:
    if worker["state"] != "busy":
        return str(worker["state"])
    place = "" if worker["iteration"] is None else f" {worker['iteration']}"
    shard = f".{worker['shard']}" if worker["shard"] else ""
    rows = f" {worker['done']}/{worker['total']}" if worker["total"] else ""
    return f"{worker['run']}: {worker['stage']}{place}{shard}{rows}"


def _offer(resources: dict[str, float]) -> str:
    names = {"ROLLOUT": "rollout", "TRAIN": "train", "SCORE": "score", "GPU": "GPUs", "CPU": "CPU cores"}
    return ", ".join(f"{resources[key]:g} {name}" for key, name in names.items() if resources.get(key))


def _size(amount: int) -> str:
    return f"{amount / 2**20:,.0f} MiB" if amount else ""


def _ago(moment: float | None) -> str:
    if moment is None:
        return ""
    seconds = max(0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
