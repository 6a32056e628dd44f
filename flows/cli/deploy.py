"""`grpo deploy` and `grpo serve`: what can be started from Prefect's pages, and a worker that carries it out."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.training import Json

WITH_CONFIG = ("train", "sweep")
"""Deployments whose form has a field ``config``."""
WITH_STORE = ("evaluate", "rerun-stage", "rescore")
"""Deployments that look for runs in a store."""
RETRAIN = "retrain"
POLL_SECONDS = "2"
"""Between a served worker's looks for new runs; Prefect's own 10 are for many workers."""

Config = Annotated[
    Path | None, typer.Argument(help="YAML configuration that fills the forms of train and sweep.", show_default=False)
]
Overrides = Annotated[list[str] | None, typer.Argument(help="`key=value` settings over it.", show_default=False)]
Retrain = Annotated[
    Path | None, typer.Option(metavar="FILE", help="YAML of a retraining: fills its form, and events start it.")
]
Pool = Annotated[str, typer.Option(help="Prefect's work pool whose workers carry runs out; made if there is none.")]
File = Annotated[Path | None, typer.Option("--file", help="Another prefect.yaml; default: the package's own.")]


def deploy(
    config: Config = None,
    overrides: Overrides = None,
    pool: Pool = "grpo",
    kind: Annotated[str, typer.Option("--type", help="Type of the pool if it is made: process, kubernetes, ...")] = (
        "process"
    ),
    retrain: Retrain = None,
    directory: Annotated[
        str | None, typer.Option(help="Where runs start on the workers; default: this folder.", show_default=False)
    ] = None,
    file: File = None,
    as_json: Json = False,
) -> None:
    """Put the deployments on Prefect's server: training, evaluation, retraining, reruns, rescoring, sweeps as forms.

    A worker of the pool carries them out: `prefect worker start --pool grpo`, or `grpo serve`, which does both.
    """
    made = put(_values(config, overrides), _retraining(retrain), pool, kind, directory, file)
    if as_json:
        typer.echo(json.dumps(made))
        return
    for each in made:
        typer.echo(f"{each['name']:<24} {each['url']}")
    typer.echo(f"carried out by: prefect worker start --pool {pool} --type {kind}")


def serve(
    config: Config = None,
    overrides: Overrides = None,
    pool: Pool = "grpo",
    limit: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 2,
    retrain: Retrain = None,
    file: File = None,
) -> None:
    """Put the deployments on Prefect's server and carry out here what is started there, until Ctrl-C.

    What was started on Prefect's pages is cancelled there too: its stages stop, on workers as well.
    """
    made = put(_values(config, overrides), _retraining(retrain), pool, "process", None, file)
    _limit(pool, limit)
    names = ", ".join(each["name"].partition("/")[2] for each in made)
    typer.echo(f"serving {names} at {_server()}; Ctrl-C ends it")
    sys.stdout.flush()
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process"]
    os.environ.setdefault("PREFECT_WORKER_QUERY_SECONDS", POLL_SECONDS)
    os.execv(command[0], [*command, "--install-policy", "never"])


def put(
    values: dict[str, Any] | None,
    retraining: dict[str, Any] | None,
    pool: str,
    kind: str,
    directory: str | None,
    file: Path | None,
) -> list[dict[str, str]]:
    """Makes or updates the deployments, and returns their names and pages.

    Args:
        values: settings that fill the forms of training; None: those of the demo.
        retraining: settings that fill the form of retraining; None: it stays empty, and events don't start it.

    Raises:
        ConfigError: no server, or Prefect refuses; the message is Prefect's.
    """
    from grpo_lib.errors import ConfigError

    server = _server()
    own = Path(str(files("deployments") / "prefect.yaml"))
    plan = _plan(file or own)
    names = _fill(plan, values or _demo(), retraining)
    with tempfile.TemporaryDirectory() as folder:
        filled = Path(folder) / "prefect.yaml"
        filled.write_text(json.dumps(plan), encoding="utf-8")  # JSON is YAML
        environment = os.environ | {
            "GRPO_WORK_POOL": pool,
            "GRPO_VERSION": code_version(),
            "GRPO_DIRECTORY": directory or str(Path.cwd()),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        }
        if not _has_pool(pool):
            _prefect(["work-pool", "create", pool, "--type", kind], environment, may_fail="already exists")
        _prefect(["--no-prompt", "deploy", "--all", "--prefect-file", str(filled)], environment)
    missing = [name for name in names if name not in (found := _deployed(names, pool))]
    if missing:
        raise ConfigError(f"{file or own}: Prefect did not make {', '.join(missing)}; `prefect deploy` says why")
    return [{"name": found[name][0], "url": f"{server}/deployments/deployment/{found[name][1]}"} for name in names]


def code_version() -> str:
    """The git commit of the code, with + if files differ from it; of an installed package its version."""
    from importlib.metadata import version

    def git(*words: str) -> str:
        folder = Path(__file__).parents[2]
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short=12", "HEAD") if git("ls-files", "flows/train.py") else ""
    except FileNotFoundError:  # there is no git
        commit = ""
    return commit + ("+" if git("status", "--porcelain") else "") if commit else version("grpo-pipeline")


def _server() -> str:
    """Address of Prefect's pages.

    Raises:
        ConfigError: none is set, or nobody answers.
    """
    from flows.cli.doctor import check_prefect
    from grpo_lib.errors import ConfigError

    address = os.environ.get("PREFECT_API_URL")
    if not address:
        raise ConfigError("PREFECT_API_URL is not set: start a server (`grpo up` or `prefect server start`) and set it")
    check_prefect()
    return address.rstrip("/").removesuffix("/api")


def _values(config: Path | None, overrides: list[str] | None) -> dict[str, Any] | None:
    from grpo_lib.config_files import load_config, make_config

    if config is None:
        return None
    if "=" in str(config) and not config.exists():  # no file, but a first override of the demo's settings
        return _given(make_config(_demo(), [str(config), *(overrides or [])]))
    return _given(load_config(config, overrides or []))


def _retraining(file: Path | None) -> dict[str, Any] | None:
    from grpo_lib.config_files import load_retrain_config

    return None if file is None else load_retrain_config(file).model_dump(mode="json", exclude_unset=True)


def _demo() -> dict[str, Any]:
    from grpo_lib.config_files import load_config

    return _given(load_config(str(files("deployments") / "configs" / "demo.yaml")))


def _given(config: Any) -> dict[str, Any]:
    """The settings that were given: a form shows the others with their defaults.

    Those of the problem are all there: a form takes the problem with which a value has the most settings in common,
    and the first one when there are several.
    """
    given = config.model_dump(mode="json", exclude_unset=True)
    return given | {"data": config.data.model_dump(mode="json")}


def _plan(file: Path) -> dict[str, Any]:
    import yaml

    from grpo_lib.errors import ConfigError

    try:
        plan = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"can't read {file}: {error}; name a prefect.yaml") from None
    if not isinstance(plan, dict) or not plan.get("deployments"):
        raise ConfigError(f"{file} has no `deployments:`; see deployments/prefect.yaml of the project")
    return plan


def _fill(plan: dict[str, Any], values: dict[str, Any], retraining: dict[str, Any] | None) -> list[str]:
    """Puts settings into the forms that have none of their own; returns the names of the deployments."""
    for each in plan["deployments"]:
        parameters = each.get("parameters") or {}
        if each["name"] in WITH_CONFIG:
            parameters = {"config": values} | parameters
        elif each["name"] in WITH_STORE and "store" in values:
            parameters = {"store": values["store"]} | parameters
        elif each["name"] == RETRAIN and retraining is not None:
            parameters = {"config": retraining} | parameters
        elif each["name"] == RETRAIN and "config" not in parameters:
            each.pop("triggers", None)
        each["parameters"] = parameters
    return [each["name"] for each in plan["deployments"]]


def _prefect(words: list[str], environment: dict[str, str], may_fail: str | None = None) -> None:
    from grpo_lib.errors import ConfigError

    done = subprocess.run(
        [sys.executable, "-m", "prefect", *words], env=environment, capture_output=True, text=True, check=False
    )
    said = " ".join(f"{done.stdout} {done.stderr}".split())
    if done.returncode and (may_fail is None or may_fail not in said):
        raise ConfigError(f"`prefect {' '.join(words[:3])}` failed: {said[-1000:]}")


def _has_pool(name: str) -> bool:
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(name)
        except ObjectNotFound:
            return False
    return True


def _limit(pool: str, runs: int) -> None:
    """By the server: a worker with a limit of its own dies of a run that is retried before its process has ended."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolUpdate

    with get_client(sync_client=True) as client:
        client.update_work_pool(pool, WorkPoolUpdate(concurrency_limit=runs))


def _deployed(names: list[str], pool: str) -> dict[str, tuple[str, str]]:
    """Of deployments by name: FLOW/NAME and id."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName

    with get_client(sync_client=True) as client:
        wanted = DeploymentFilter(name=DeploymentFilterName(any_=names))
        found = client.read_deployments(deployment_filter=wanted)
        found = [each for each in found if each.work_pool_name == pool]  # others may have such names
        flows = {each.flow_id: client.read_flow(each.flow_id).name for each in found}
    return {each.name: (f"{flows[each.flow_id]}/{each.name}", str(each.id)) for each in found}
