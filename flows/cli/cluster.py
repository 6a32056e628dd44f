"""`grpo up`, `grpo down`, and the parts of a cluster, `grpo head`, `grpo worker`, `grpo join`: in the foreground."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from grpo_lib.services.local_set import SetOptions
    from grpo_lib.services.supervisor import Supervisor

LOOK_SECONDS = 0.2
DETACH_SECONDS = 600.0
DOWN_SECONDS = 90.0

Port = Annotated[int, typer.Option(min=1024, max=65535)]
Folder = Annotated[Path, typer.Option("--folder", help="For databases, logs and what is known of the services.")]
Places = Annotated[int, typer.Option(min=0, max=1024, help="Workers of that role that may run here.")]
HeadAddress = Annotated[str, typer.Option(help="HOST:PORT of the Ray head, as `grpo up` or `grpo head` prints it.")]


def up(
    folder: Folder = Path(".grpo"),
    host: Annotated[str, typer.Option(help="Where Prefect and MLflow listen; 0.0.0.0: everywhere.")] = "127.0.0.1",
    prefect_port: Port = 4200,
    mlflow_port: Port = 5000,
    ray_port: Port = 6379,
    rollout_workers: Places = 1,
    train_workers: Places = 1,
    score_workers: Places = 0,
    runs: Annotated[int, typer.Option(min=0, help="Runs at a time that are started on Prefect's pages; 0: none.")] = 2,
    dashboard_port: Annotated[
        int | None, typer.Option(min=1024, max=65535, help="Ray's dashboard (needs ray[default]); default: none.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when all is up; end it with `grpo down`.")] = False,
) -> None:
    """Start Prefect, MLflow and a Ray cluster on this machine, and keep them up until Ctrl-C or `grpo down`."""
    from grpo_lib.services.local_set import SetOptions
    from grpo_lib.services.state import held

    options = SetOptions(
        folder=folder.absolute(), host=host, prefect_port=prefect_port, mlflow_port=mlflow_port, ray_port=ray_port,
        dashboard_port=dashboard_port,
        workers={"rollout": rollout_workers, "train": train_workers, "score": score_workers}, runs=runs,
    )  # fmt: skip
    if detach:
        _detach(options)
        return
    with held(options.folder):
        _up(options)


def _up(options: "SetOptions") -> None:
    from flows.cli.console import console
    from grpo_lib.services.checks import make_token
    from grpo_lib.services.local_set import LocalSet, check_set, clear

    if ended := clear(options.folder):
        say(f"ended {ended} processes that a killed `grpo up` had left")
    check_set(options)
    secret = make_token()
    services = LocalSet(options, say)
    with signals() as stop:
        try:
            with console.status("starting"):
                while not services.ready and not stop.asked.is_set():
                    services.step()
                    stop.asked.wait(LOOK_SECONDS)
            if services.ready:
                console.print(usage(options, secret), soft_wrap=True, markup=False)
            while not stop.asked.is_set():
                services.step()
                stop.asked.wait(LOOK_SECONDS)
        finally:
            say("ending all")
            services.stop(lambda: stop.hurry)
    say("ended: no process is left")


def usage(options: "SetOptions", secret: str) -> str:
    """How to use a set that is up, and what is open."""
    from grpo_lib.services.local_set import LOOPBACK

    forms = f"in a browser: {options.prefect_url}/deployments has forms that start runs\n" if options.runs else ""
    places = ", ".join(f"{count} {role}" for role, count in options.workers.items() if count)
    warning = (
        f"--host {options.host}: whoever reaches this machine can read and change everything in Prefect and MLflow, "
        "which ask for no password; use a private network\n"
    )
    return f"""{"" if options.host in LOOPBACK else warning}
all is up: Prefect {options.prefect_url}, MLflow {options.mlflow_url}, Ray {options.ray_address} (places for: {places})
{forms}in another terminal:
  export PREFECT_API_URL={options.prefect_url}/api
  grpo run CONFIG placement.kind=ray tracking.uri={options.mlflow_url}
  grpo status{_option(options)}
another machine of a private network: copy the token there ({secret}, mode 0600), then
  grpo worker --role rollout --address {options.ray_address}
end all:
  grpo down{_option(options)}
"""


def _option(options: "SetOptions") -> str:
    return "" if options.folder == Path(".grpo").absolute() else f" --folder {options.folder}"


def _detach(options: "SetOptions") -> None:
    """Starts the same command in a session of its own, and waits until all is up."""
    from flows.cli.console import console
    from grpo_lib.errors import ServiceError
    from grpo_lib.services.checks import make_token
    from grpo_lib.services.state import held, read_state

    log = options.folder / "logs" / "up.log"
    with held(options.folder):  # else the log is another's
        log.parent.mkdir(parents=True, exist_ok=True)
    words = [each for each in sys.argv[1:] if each != "--detach"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli.main", *words],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    until = time.monotonic() + DETACH_SECONDS
    with console.status("starting"):
        while process.poll() is None and time.monotonic() < until:
            state = read_state(options.folder)
            if state is not None and state.supervisor.pid == process.pid and state.ready:
                console.print(usage(options, make_token()), soft_wrap=True, markup=False)
                return
            time.sleep(LOOK_SECONDS)
    if process.poll() is None:
        process.terminate()
        raise ServiceError(f"not everything was up within {DETACH_SECONDS:g} s; see {log}")
    typer.echo(log.read_text(errors="replace").strip(), err=True)
    raise typer.Exit(process.returncode or 1)


def down(folder: Folder = Path(".grpo")) -> None:
    """End the services of `grpo up`, and what a killed one has left."""
    from grpo_lib.errors import ServiceError
    from grpo_lib.services.local_set import clear
    from grpo_lib.services.state import held, read_state

    folder = folder.absolute()
    state = read_state(folder)
    if state is None:
        say(f"nothing runs in {folder}")
        return
    if state.running():
        os.kill(state.supervisor.pid, signal.SIGTERM)
        until = time.monotonic() + DOWN_SECONDS
        while state.supervisor.alive():
            if time.monotonic() > until:
                raise ServiceError(
                    f"process {state.supervisor.pid} of `grpo up` did not end within {DOWN_SECONDS:g} s; kill it, then "
                    "use `grpo down` again"
                )
            time.sleep(LOOK_SECONDS)
    with held(folder):
        ended = clear(folder)
    say(f"ended {ended} processes that a killed `grpo up` had left" if ended else "ended: no process is left")


def worker(
    role: Annotated[Literal["rollout", "train", "score"], typer.Option(help="What this machine offers to do.")],
    address: HeadAddress,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs to offer; default: all.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="CPU cores to offer; default: all.")] = None,
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Workers of that role that may run here.")] = 1,
    folder: Folder = Path(".grpo"),
) -> None:
    """Offer this machine to a cluster, until Ctrl-C. Runs that ask for such a worker start it."""
    from grpo_lib.services.checks import check_ray_installed, check_token
    from grpo_lib.services.ray_nodes import node, nodes
    from grpo_lib.services.supervisor import Member, Supervisor

    check_ray_installed()
    check_token()
    known = {each.id for each in nodes(address) if each.alive}  # refuses what can't be joined
    log = folder.absolute() / "logs" / f"worker-{role}-{os.getpid()}.log"
    service = node(address, {role: workers}, log, mark=str(folder.absolute()), gpus=gpus, cpus=cpus)

    def changed(member: Member, line: str) -> None:
        say(line)
        if member.phase == "up":
            for each in nodes(address):
                if each.alive and each.id not in known and each.resources.get(role.upper()):
                    say(f"offers {_offer(each.resources)} to the cluster as {each.host}; Ctrl-C takes it back")

    _keep_up(Supervisor([service], changed))


def head(port: Port = 6379, folder: Folder = Path(".grpo")) -> None:
    """Start the head of a Ray cluster alone, until Ctrl-C. Machines join it with `grpo worker` and `grpo join`."""
    from grpo_lib.services.checks import check_port, check_ray_installed, check_token, own_address
    from grpo_lib.services.ray_nodes import forget
    from grpo_lib.services.ray_nodes import head as head_service
    from grpo_lib.services.state import held
    from grpo_lib.services.supervisor import Supervisor

    check_ray_installed()
    check_token()
    check_port("--port", "0.0.0.0", port)
    folder, address = folder.absolute(), f"{own_address()}:{port}"
    with held(folder):
        _keep_up(Supervisor([head_service(folder, port, address, None)], lambda _, line: say(line)))
        forget(folder, address)


def join(
    command: Annotated[list[str], typer.Argument(help="After `--`: what to run, e.g. a Prefect worker.")],
    address: HeadAddress,
    folder: Folder = Path(".grpo"),
) -> None:
    """Run a command on a machine that has no places for workers: its flows reach the cluster's workers from here.

    Ends with the command, and with its code.
    """
    from grpo_lib.services.checks import check_ray_installed, check_token
    from grpo_lib.services.ray_nodes import node, nodes
    from grpo_lib.services.supervisor import Supervisor

    check_ray_installed()
    check_token()
    nodes(address)  # refuses what can't be joined
    folder = folder.absolute()
    service = node(address, {}, folder / "logs" / f"join-{os.getpid()}.log", mark=str(folder), gpus=0, cpus=0)
    supervisor = Supervisor([service], lambda _, line: say(line))
    process: subprocess.Popen[bytes] | None = None
    with signals() as stop:
        try:
            while not stop.asked.is_set() and (process is None or process.poll() is None):
                supervisor.step()
                if process is None and supervisor.all_up:
                    process = subprocess.Popen(command)
                stop.asked.wait(LOOK_SECONDS)
        finally:
            if process is not None:
                _end_command(process, stop)
            supervisor.stop(lambda: stop.hurry)
    code = 1 if process is None else process.returncode
    raise typer.Exit(code if code >= 0 else 128 - code)  # as a shell says that a signal ended it


def _end_command(process: "subprocess.Popen[bytes]", stop: "Stop") -> None:
    """Asks it to end, and waits as long as it takes, or until there is no time for that."""
    if process.poll() is None:
        process.terminate()
    while process.poll() is None:
        if stop.hurry:
            process.kill()
        time.sleep(LOOK_SECONDS)


def _keep_up(supervisor: "Supervisor") -> None:
    """Until the user wants an end."""
    with signals() as stop:
        try:
            while not stop.asked.is_set():
                supervisor.step()
                stop.asked.wait(LOOK_SECONDS)
        finally:
            supervisor.stop(lambda: stop.hurry)


def _offer(resources: dict[str, float]) -> str:
    names = {"CPU": "CPU cores", "GPU": "GPUs", "ROLLOUT": "rollout", "TRAIN": "train", "SCORE": "score"}
    return ", ".join(f"{resources[key]:g} {name}" for key, name in names.items() if resources.get(key))


class Stop:
    """Whether the user wants an end, and how soon."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.hurry = False


@contextmanager
def signals() -> Iterator[Stop]:
    """Ctrl-C, SIGTERM and a closed terminal ask for an end; the second time, for a quick one."""
    stop = Stop()

    def ask(number: int, frame: object) -> None:
        stop.hurry = stop.asked.is_set()
        stop.asked.set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, ask) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def say(line: str) -> None:
    from flows.cli.console import console

    try:
        console.print(f"{time.strftime('%H:%M:%S')} {line}", markup=False, soft_wrap=True)
    except OSError:
        pass  # nobody reads any more, which is no reason to leave services behind
