"""Commands that compute: `run`, `resume`, `evaluate`, `warm-start`, `export`."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from grpo_lib.config import RunConfig
    from grpo_lib.run import Run

Config = Annotated[Path, typer.Argument(help="YAML configuration.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="`key=value` settings, e.g. rollout.samples=16 name=first.", show_default=False),
]


def run_name(value: str | None) -> str | None:
    """Refuses what can't be the name of a run."""
    from grpo_lib.config_base import RUN_NAME

    if value is not None and not re.fullmatch(RUN_NAME, value):
        raise typer.BadParameter(f"{value!r} is no name of a run: letters, digits and . _ -, first a letter or digit")
    return value


RunName = Annotated[str, typer.Argument(help="Name of the run.", show_default=False, metavar="RUN", callback=run_name)]
Store = Annotated[str, typer.Option("--store", envvar="GRPO_STORE", help="Folder or s3://bucket/prefix.")]
Endpoint = Annotated[str | None, typer.Option("--endpoint-url", help="S3 endpoint, for services other than AWS.")]
Version = Annotated[
    int | None, typer.Option("-k", "--version", min=0, help="Policy after so many updates; default: the last.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, nothing else.")]


def run(config: Config, overrides: Overrides = None, as_json: Json = False) -> None:
    """Train. Settings are checked before anything is loaded; a run that was interrupted goes on."""
    from grpo_lib.config_files import load_config

    _train(load_config(config, overrides or []), as_json)


def resume(
    run: RunName, overrides: Overrides = None, store: Store = "grpo-store", endpoint_url: Endpoint = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Go on with a run from what it has committed; nothing is generated twice."""
    _train(_load_run(run, overrides, store, endpoint_url).config, as_json)


def evaluate(
    run: RunName,
    overrides: Overrides = None,
    version: Version = None,
    store: Store = "grpo-store",
    endpoint_url: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Evaluate a policy of a run on held-out prompts, e.g. with evaluation.samples=8 evaluation.pass_k=[1,8]."""
    loaded = _load_run(run, overrides, store, endpoint_url)
    if version:
        _check_version(loaded, version)
    _check(loaded.config)
    summary = _in_prefect("evaluate", run, version, overrides, loaded.config.store, quiet=as_json)
    if as_json:
        typer.echo(json.dumps(summary))
        return
    from flows.cli.console import print_numbers

    print_numbers(f"{run}, policy version {summary['policy_version']}", summary)


def warm_start(config: Config, overrides: Overrides = None, as_json: Json = False) -> None:
    """Make the small model and fine-tune it on demonstrations; `run` then finds it done."""
    from grpo_lib.config_files import load_config
    from grpo_lib.errors import ConfigError

    settings = load_config(config, overrides or [])
    if settings.warm_start is None:
        raise ConfigError(f"{config} has no warm_start section: the run starts from model.path={settings.model.path!r}")
    _check_training(settings)
    result = _in_prefect("warm_start", settings, quiet=as_json)
    if as_json:
        typer.echo(json.dumps(result))
        return
    from flows.cli.console import print_numbers

    print_numbers(f"warm start in {result.pop('folder')}", result)


def export(
    run: RunName,
    folder: Annotated[Path, typer.Argument(help="Folder to make.", show_default=False)],
    overrides: Overrides = None,
    version: Version = None,
    store: Store = "grpo-store",
    endpoint_url: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Write a policy as a Hugging Face model folder (Transformers, vLLM, model.path=...); adapters are merged."""
    loaded = _load_run(run, overrides, store, endpoint_url)
    from flows.cli.console import live_progress
    from flows.export import export as export_policy

    with nullcontext() if as_json else live_progress():
        result = export_policy(loaded, version, folder)
    if as_json:
        typer.echo(json.dumps(result))
        return
    from flows.cli.console import print_numbers

    print_numbers(f"exported to {result.pop('folder')}", result)


def _load_run(name: str, overrides: list[str] | None, store: str, endpoint_url: str | None) -> "Run":
    from grpo_lib.config_files import make_store_config
    from grpo_lib.run import load_run

    return load_run(make_store_config(store, endpoint_url), name, overrides or [])


def _check_version(run: "Run", version: int) -> None:
    from grpo_lib.errors import NotFoundError

    made = {each.summary["policy_version"] for each in run.stages.manifests() if each.stage == "update"}
    if version not in made:
        raise NotFoundError(f"run {run.name!r} has policies 0..{len(made)}, there is no version {version}")


def _train(config: "RunConfig", as_json: bool) -> None:
    _check_training(config)
    result = _in_prefect("train", config, quiet=as_json)
    if as_json:
        typer.echo(result.model_dump_json())
        return
    from flows.cli.console import print_report

    print_report(result, config)


def _check(config: "RunConfig") -> None:
    from flows.cli.doctor import check_prefect
    from grpo_lib.patience import impatient
    from grpo_lib.preflight import check_surroundings

    with impatient():  # somebody waits for the answer
        check_surroundings(config)
        check_prefect()


def _check_training(config: "RunConfig") -> None:
    from grpo_lib.patience import impatient
    from grpo_lib.preflight import check_continuation
    from grpo_lib.run import Run
    from grpo_lib.storage.lease import refuse_if_held

    with impatient():
        refuse_if_held(Run(config))
    _check(config)
    check_continuation(config)


def _in_prefect(module: str, *arguments: Any, quiet: bool) -> Any:
    """Calls the flow of ``flows.<module>`` with an embedded Prefect server, or the one that PREFECT_API_URL names."""
    import importlib

    with prefect_session(quiet) as wait_for_server:
        flow = getattr(importlib.import_module(f"flows.{module}"), module)  # seconds, while the server starts
        wait_for_server()
        return flow(*arguments)


@contextmanager
def prefect_session(quiet: bool) -> Iterator[Callable[[], None]]:
    """Flows work inside, with progress unless ``quiet``. To be opened before Prefect is imported, and the function that
    it gives to be called before the first flow.
    """
    from flows.cli.console import live_progress
    from flows.cli.server import prefect_home, start_prefect

    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    # Errors are printed once, at the end; the server's log holds everything.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    prefect_home().mkdir(parents=True, exist_ok=True)
    wait_for_server = start_prefect()
    with nullcontext() if quiet else live_progress():
        yield wait_for_server
