"""Commands of registered models: `retrain`, `rollback`, `models`, `watch`."""

import json
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.training import Config, Endpoint, Json, Overrides, Store

if TYPE_CHECKING:
    from flows.retrain import RetrainReport
    from grpo_lib.config import StoreConfig, TrackingConfig
    from grpo_lib.retraining.ledger import Ledger
    from grpo_lib.retraining.records import Comparison, Decision
    from grpo_lib.tracking.registry import Registry


def model_name(value: str) -> str:
    """Refuses what can't be the name of a model that is retrained."""
    from grpo_lib.config_retrain import MODEL_NAME

    if not re.fullmatch(MODEL_NAME, value):
        raise typer.BadParameter(f"{value!r} is no name of a model: letters, digits and . _ -, at most 80")
    return value


Model = Annotated[
    str, typer.Argument(help="Registered model.", show_default=False, metavar="MODEL", callback=model_name)
]
Reason = Annotated[str, typer.Option(help="Goes into the record.")]
TrackingUri = Annotated[
    str | None, typer.Option(help="MLflow; default: that of the last retraining, else SQLite beside the store.")
]


def retrain(
    config: Config,
    overrides: Overrides = None,
    yes: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Promote this version, which waits for approval.")
    ] = None,
    no: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Refuse this version, which waits for approval.")
    ] = None,
    reason: Reason = "",
    abandon: Annotated[
        str | None, typer.Option(help="End the open round for this reason; its prompts are new again.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train the champion on new prompts; promote what comes out if it is better. Overrides: train.iterations=40."""
    from grpo_lib.config_files import load_retrain_config
    from grpo_lib.patience import impatient
    from grpo_lib.retraining.ledger import Ledger
    from grpo_lib.retraining.promotion import abandon as end_round
    from grpo_lib.storage.lease import holding, refuse_if_held
    from grpo_lib.tracking.registry import Registry

    if sum(each is not None for each in (yes, no, abandon)) > 1:
        raise typer.BadParameter("--yes, --no and --abandon exclude each other; give one")
    settings = load_retrain_config(config, overrides or [])
    ledger = Ledger(settings.train.store, settings.model)
    if abandon is not None:
        with holding(ledger.retraining):
            _say(end_round(ledger, Registry(settings.train), abandon), as_json)
        return
    if settings.when_busy == "refuse":
        with impatient():
            refuse_if_held(ledger.retraining)
    report = _retrained(settings, yes, no, reason, as_json)
    if report.status == "waiting" and not as_json and typer.get_text_stream("stdin").isatty():
        _print_report(report)
        promote = typer.confirm(f"make version {report.version} the champion of {report.model}?")
        yes, no = (report.version, None) if promote else (None, report.version)
        reason = reason or typer.prompt("reason", default="", show_default=False)
        report = _retrained(settings, yes, no, reason, False)
    if as_json:
        typer.echo(report.model_dump_json())
        return
    _print_report(report)
    if report.status == "waiting":
        typer.echo(f"decide: grpo retrain {config} --yes {report.version} (or --no {report.version})")


def _retrained(settings: Any, yes: str | None, no: str | None, reason: str, quiet: bool) -> "RetrainReport":
    from flows.cli.training import prefect_session

    with prefect_session(quiet) as wait_for_server:
        from flows.retrain import Answer
        from flows.retrain import retrain as flow

        wait_for_server()
        version = no if yes is None else yes
        answer = None if version is None else Answer(version=version, promote=yes is not None, reason=reason)
        found: Any = flow(settings, answer)
    report: RetrainReport = found
    return report


def rollback(
    model: Model,
    to: Annotated[
        str | None, typer.Option(help="Version that becomes the champion; default: the one before.", metavar="VERSION")
    ] = None,
    reason: Reason = "",
    store: Store = "grpo-store",
    endpoint_url: Endpoint = None,
    tracking_uri: TrackingUri = None,
    as_json: Json = False,
) -> None:
    """Make an earlier version the champion again, at once; a retraining that goes on is then superseded."""
    from grpo_lib.patience import impatient
    from grpo_lib.retraining.promotion import roll_back

    with impatient():
        ledger, registry = _places(model, store, endpoint_url, tracking_uri)
        decision = roll_back(ledger, registry, to, reason)
    _say(decision, as_json)


def models(
    model: Model,
    store: Store = "grpo-store",
    endpoint_url: Endpoint = None,
    tracking_uri: TrackingUri = None,
    as_json: Json = False,
) -> None:
    """A registered model's versions, aliases, comparisons and decisions."""
    from grpo_lib.errors import NotFoundError
    from grpo_lib.patience import impatient

    with impatient():
        ledger, registry = _places(model, store, endpoint_url, tracking_uri)
        listed = _versions(ledger, registry)
        opened = ledger.open()
    if not listed and opened is None:
        raise NotFoundError(f"no model {model!r} in {registry.uri}; `grpo retrain` makes one")
    state = None if opened is None else ("waits for a decision" if opened.judged else "is trained")
    if as_json:
        typer.echo(json.dumps({"model": model, "open_round": opened and opened.number, "versions": listed}))
        return
    from flows.cli.console import console

    for each in listed:
        alias = f" [bold green]{', '.join(each['aliases'])}[/]" if each["aliases"] else ""
        console.print(f"[bold]version {each['version']}[/]{alias}: policy {each['policy']} of run {each['run']}")
        if each["comparison"] is not None:
            row = each["comparison"]["all"]
            console.print(
                f"  accuracy {row['challenger']:.3f}, before {row['champion']:.3f}: gain {row['gain']:+.3f} "
                f"({row['low']:+.3f} .. {row['high']:+.3f}), p={row['p_better']:.4f}"
            )
        if each["decision"]:
            why = f": {'; '.join(each['reasons'])}" if each["reasons"] else ""
            console.print(f"  {each['decision']} by {each['by']}, {each['at']}{why}", markup=False, soft_wrap=True)
    if opened is not None:
        console.print(f"round {opened.number} {state}")


def _versions(ledger: "Ledger", registry: "Registry") -> list[dict[str, Any]]:
    """Newest first; each with the last decision about it."""
    aliases = registry.aliases(ledger.model)
    found = []
    rounds = ledger.rounds()
    for version, tags in registry.tags(ledger.model).items():
        judged = next((each.judged for each in rounds if each.judged and each.judged.version == version), None)
        decisions = [each.decision for each in rounds if each.decision is not None]
        about = [
            each for each in decisions if version == (each.before if each.outcome == "rolled back" else each.version)
        ]
        last = about[-1] if about else None
        found.append(
            {
                "version": version,
                "aliases": sorted(name for name, each in aliases.items() if each == version),
                "run": tags.get("grpo.run", ""),
                "policy": tags.get("grpo.policy_version", ""),
                "comparison": None if judged is None else judged.comparison.model_dump(mode="json"),
                "decision": "" if last is None else last.outcome,
                "at": "" if last is None else last.at,
                "by": "" if last is None else last.by,
                "reasons": [] if last is None else last.reasons,
            }
        )
    return found


def watch(
    config: Config,
    overrides: Overrides = None,
    every: Annotated[float, typer.Option(min=1, help="Seconds between two looks.")] = 30.0,
    again: Annotated[
        float, typer.Option(min=0.01, help="Hours after which files are told of again that no round has taken.")
    ] = 6.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
) -> None:
    """Tell Prefect when new prompt files arrive (event `grpo.prompts.arrived`), until Ctrl-C."""
    import os

    from grpo_lib.config_files import load_retrain_config
    from grpo_lib.errors import ConfigError, RunError, StoreUnreachableError
    from grpo_lib.retraining.arrivals import Watch
    from grpo_lib.retraining.ledger import Ledger

    settings = load_retrain_config(config, overrides or [])
    if not os.environ.get("PREFECT_API_URL"):
        raise ConfigError("PREFECT_API_URL is not set: start a server (`grpo up` or `prefect server start`) and set it")
    from flows.arrivals import announce_arrivals

    ledger, seen = Ledger(settings.train.store, settings.model), Watch(settings.data)
    while True:
        try:
            new = seen.new(ledger.taken())
            number = int(time.time() / (3600 * again))
            store, decided = settings.train.store.uri, ledger.last_decided()
            if new and announce_arrivals(settings.model, store, new, decided, number):
                typer.echo(f"{len(new)} new files: told Prefect")
            elif once:
                typer.echo("no new files" if not new else f"{len(new)} new files: Prefect knows")
        except (RunError, StoreUnreachableError) as error:
            if once:
                raise
            typer.echo(f"{error}; looking again in {every:g} s", err=True)
        if once:
            return
        time.sleep(every)


@dataclass(frozen=True, kw_only=True)
class _Where:
    store: "StoreConfig"
    tracking: "TrackingConfig"


def _places(model: str, store: str, endpoint_url: str | None, tracking_uri: str | None) -> tuple["Ledger", "Registry"]:
    """What is recorded, and MLflow."""
    from grpo_lib.config import TrackingConfig
    from grpo_lib.config_files import make_store_config
    from grpo_lib.retraining.ledger import Ledger
    from grpo_lib.tracking.registry import Registry

    place = make_store_config(store, endpoint_url)
    ledger = Ledger(place, model)
    uri = tracking_uri if tracking_uri is not None else ledger.tracking_uri()
    return ledger, Registry(_Where(store=place, tracking=TrackingConfig(uri=uri)))


def _say(decision: "Decision", as_json: bool) -> None:
    if as_json:
        typer.echo(decision.model_dump_json())
        return
    what = {
        "rolled back": f"version {decision.version} is the champion; it was {decision.before}",
        "abandoned": "its prompts are new again",
    }
    typer.echo(f"{decision.model}, round {decision.round}: {decision.outcome}, {what[decision.outcome]}")


def _print_report(report: "RetrainReport") -> None:
    from flows.cli.console import console

    place = report.model if report.round is None else f"{report.model}, round {report.round}"
    console.print(f"[bold]{place}: {report.status}[/]")
    for reason in report.reasons:
        console.print(f"  {reason}", markup=False)
    if report.comparison is not None:
        console.print(_table(report.comparison))
        console.print(f"challenger: version {report.version} (run {report.run}); champion before: {report.before}")
        console.print(f"MLflow:     {report.mlflow}", soft_wrap=True)
    if report.record is not None:
        console.print(f"record:     {report.record}", soft_wrap=True)


def _table(comparison: "Comparison") -> Any:
    from rich.table import Table

    table = Table(title=f"{comparison.mode} accuracy", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in ("", "n", "champion", "challenger", "gain", "interval", "p better", "p worse"):
        table.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
    for name, row in {"all": comparison.all, **comparison.sources}.items():
        table.add_row(
            name, str(row.prompts), f"{row.champion:.3f}", f"{row.challenger:.3f}", f"{row.gain:+.3f}",
            f"{row.low:+.3f}..{row.high:+.3f}", f"{row.p_better:.4f}", f"{row.p_worse:.4f}",
        )  # fmt: skip
    return table
