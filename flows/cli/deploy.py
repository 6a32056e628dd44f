"""`grpo deploy` and `grpo serve`: what can be started from Prefect's pages, and a worker that carries it out."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.training import Json

if TYPE_CHECKING:
    from flows.cli.forms import Form

WITH_CONFIG = ("train", "sweep")
"""Deployments whose form has a field ``config``."""
WITH_STORE = ("evaluate", "rerun-stage", "rescore")
"""Deployments that look for runs in a store."""
RETRAIN = "retrain"
POLL_SECONDS = "2"
"""Between a served worker's looks for new runs; Prefect's own 10 are for many workers."""

Config = Annotated[
    str | None, typer.Argument(help="YAML configuration that fills the forms of train and sweep.", show_default=False)
]
"""No Path: it may be a setting, and a Path takes a slash out of its URL."""
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
    made = put(config, overrides or [], retrain, pool, kind, directory, file)
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
    from flows.cli.forms import limit_pool

    made = put(config, overrides or [], retrain, pool, "process", None, file)
    limit_pool(pool, limit)
    names = ", ".join(each["name"].partition("/")[2] for each in made)
    typer.echo(f"serving {names} at {_server()}; Ctrl-C ends it")
    sys.stdout.flush()
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process"]
    os.environ.setdefault("PREFECT_WORKER_QUERY_SECONDS", POLL_SECONDS)
    os.execv(command[0], [*command, "--install-policy", "never"])


def put(
    config: str | None,
    overrides: list[str],
    retrain: Path | None,
    pool: str,
    kind: str,
    directory: str | None,
    file: Path | None,
) -> list[dict[str, str]]:
    """Makes or updates the deployments, and returns their names and pages.

    What is not given stays as it is on the server: values of forms, schedules, whether events start a retraining.

    Args:
        config: settings that fill the forms of training; None: those that they have, in new ones the demo's.
        overrides: settings over it.
        retrain: settings that fill the form of retraining; None: those that it has, and events don't start a new one.

    Raises:
        ConfigError: no server, or Prefect refuses; the message is Prefect's.
    """
    from flows.cli.forms import fill_form, has_pool, read_forms
    from grpo_lib.errors import ConfigError

    server = _server()
    own = Path(str(files("deployments") / "prefect.yaml"))
    plan = _plan(file or own)
    names = [each["name"] for each in plan["deployments"]]
    there = read_forms(names, pool)
    _fill(plan, there, config, overrides, _retraining(retrain))
    if file is None:
        _keep(plan, there, listen=retrain is not None)
    with tempfile.TemporaryDirectory() as folder:
        filled = Path(folder) / "prefect.yaml"
        filled.write_text(json.dumps(plan), encoding="utf-8")  # JSON is YAML
        environment = os.environ | {
            "GRPO_WORK_POOL": pool,
            "GRPO_VERSION": code_version(),
            "GRPO_DIRECTORY": directory or str(Path.cwd()),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        }
        if not has_pool(pool):
            _prefect(["work-pool", "create", pool, "--type", kind], environment, may_fail="already exists")
        _prefect(["--no-prompt", "deploy", "--all", "--prefect-file", str(filled)], environment)
    made = read_forms(names, pool)
    if missing := [name for name in names if name not in made]:
        raise ConfigError(f"{file or own}: Prefect did not make {', '.join(missing)}; `prefect deploy` says why")
    for each in plan["deployments"]:
        if each["parameters"] != made[each["name"]].parameters:
            fill_form(made[each["name"]], each["parameters"])
    return [{"name": made[name].label, "url": f"{server}/deployments/deployment/{made[name].id}"} for name in names]


def code_version() -> str:
    """The git commit of the code, with + if files differ from it; of an image without one and of a package its version.

    An image is told by GRPO_COMMIT what it was built from.
    """
    from importlib.metadata import version

    if told := os.environ.get("GRPO_COMMIT"):
        return told

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


def _values(
    kept: dict[str, Any] | None, config: str | None, overrides: list[str], *, form: str = "train"
) -> dict[str, Any]:
    """Settings of a training: those of a file, else those that the form has, else the demo's; and what is set over."""
    from grpo_lib.config_files import load_config, make_config
    from grpo_lib.errors import ConfigError

    if config is not None and not _is_setting(config):
        return _given(load_config(Path(config), overrides))
    settings = overrides if config is None else [config, *overrides]
    if kept is None:
        return _given(make_config(_demo(), settings))
    try:
        make_config(kept)
    except ConfigError as error:  # of an earlier version, or half filled in: it is a person's, and it stops nobody
        typer.echo(f"the form of {form} stays as it is, and can't be used: {error}", err=True)
        return kept
    return _given(make_config(kept, settings, origin=f"the form of {form}"))


def _is_setting(config: str) -> bool:
    """No file, but the first of the settings."""
    return "=" in config and not Path(config).exists()


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


def _fill(
    plan: dict[str, Any],
    there: dict[str, "Form"],
    config: str | None,
    overrides: list[str],
    retraining: dict[str, Any] | None,
) -> None:
    """Puts settings into the forms that have none of their own in prefect.yaml."""
    kept = {name: form.parameters for name, form in there.items()}
    before = {name: kept.get(name, {}).get("config") for name in WITH_CONFIG}
    values = {name: _values(before[name], config, overrides, form=name) for name in WITH_CONFIG}
    trained, store = before["train"], values["train"].get("store")
    moved = trained is None or store != trained.get("store")
    for each in plan["deployments"]:
        name, parameters = each["name"], kept.get(each["name"], {})
        if name in WITH_CONFIG:
            parameters = parameters | {"config": values[name]}
        elif name in WITH_STORE and (moved or "store" not in parameters):
            others = {key: value for key, value in parameters.items() if key != "store"}
            parameters = others if store is None else others | {"store": store}
        elif name == RETRAIN and retraining is not None:
            parameters = parameters | {"config": retraining}
        each["parameters"] = parameters | (each.get("parameters") or {})
        if name == RETRAIN:
            _listen(each, each["parameters"].get("config"))


def _keep(plan: dict[str, Any], there: dict[str, "Form"], *, listen: bool) -> None:
    """What people have set on the server's pages stays: schedules, and whether events start a retraining."""
    for each in plan["deployments"]:
        form = there.get(each["name"])
        if form is None:
            continue
        each["schedules"] = form.schedules
        if each.get("triggers") and not listen:
            each["triggers"] = [one | {"enabled": form.enabled} for one in each["triggers"] if form.enabled is not None]


def _listen(deployment: dict[str, Any], retraining: dict[str, Any] | None) -> None:
    """To the arrivals of its own model; without one to none."""
    triggers = deployment.pop("triggers", None)
    model = None if retraining is None else retraining.get("model")
    if model is not None and triggers:
        from grpo_lib.retraining.records import ARRIVED

        mine = {"match": {"prefect.resource.id": f"grpo.retraining.{model}"}}
        deployment["triggers"] = [each | mine if each.get("expect") == [ARRIVED] else each for each in triggers]


def _prefect(words: list[str], environment: dict[str, str], may_fail: str | None = None) -> None:
    from grpo_lib.errors import ConfigError

    done = subprocess.run(
        [sys.executable, "-m", "prefect", *words], env=environment, capture_output=True, text=True, check=False
    )
    said = " ".join(f"{done.stdout} {done.stderr}".split())
    if done.returncode and (may_fail is None or may_fail not in said):
        raise ConfigError(f"`prefect {' '.join(words[:3])}` failed: {said[-1000:]}")
