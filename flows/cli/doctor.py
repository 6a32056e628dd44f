"""`grpo doctor`: what is there, what is wrong, and how to mend it."""

import json
import os
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

MARKS = {"ok": "[green]ok[/]     ", "warning": "[yellow]warning[/]", "wrong": "[red]wrong[/]  "}
ANSWER_SECONDS = 5

Check = tuple[str, Callable[[], str]]


def doctor(
    store: Annotated[str, typer.Option(envvar="GRPO_STORE", help="Folder or s3://bucket/prefix.")] = "grpo-store",
    endpoint_url: Annotated[str | None, typer.Option(help="S3 endpoint, for services other than AWS.")] = None,
    mlflow: Annotated[
        str | None, typer.Option(help="As tracking.uri; default: SQLite beside the store.", show_default=False)
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT of a Ray head; default: that of this machine.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Also load this model: folder, hub name, or a run's YAML.", show_default=False)
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Also train a tiny model, end to end, in a temporary store.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Check versions, device, disk, store, MLflow, Prefect and Ray's workers; say what is wrong and how to mend it.

    Ends with code 1 if something is wrong. A warning works, but not as it should.
    """
    from flows.cli import doctor_checks as checks
    from grpo_lib.config_files import make_store_config

    config = make_store_config(store, endpoint_url)
    asked: list[Check] = [
        ("python", checks.python),
        ("packages", checks.packages),
        ("extras", checks.extras),
        ("device", checks.device),
        ("disk", lambda: checks.disk(config)),
        ("store", lambda: checks.store(config)),
        ("mlflow", lambda: checks.mlflow(mlflow, config)),
        ("prefect", checks.prefect),
        ("ray", lambda: checks.ray(address)),
    ]
    if model is not None:
        asked.append(("model", lambda: checks.model(model)))
    found = [examine(*each) for each in asked]
    if run:
        broken = [each["check"] for each in found if each["state"] == "wrong" and each["check"] in checks.RUN_NEEDS]
        found.append(examine("run", lambda: checks.run(broken)))
    if as_json:
        typer.echo(json.dumps(found))
    else:
        show(found)
    if any(each["state"] == "wrong" for each in found):
        raise typer.Exit(1)


def examine(name: str, check: Callable[[], str]) -> dict[str, Any]:
    """What a check found: ``check``, ``state`` (ok, warning, wrong), ``found``, ``seconds``."""
    from flows.cli.doctor_checks import Doubt
    from grpo_lib.errors import GrpoError
    from grpo_lib.patience import impatient
    from grpo_lib.tracking.address import safe

    began = time.perf_counter()
    try:
        with impatient():
            state, text = "ok", check()
    except Doubt as doubt:
        state, text = "warning", str(doubt)
    except GrpoError as error:
        state, text = "wrong", str(error)
    except Exception as error:  # of whatever library: one check must not end the others
        state, text = "wrong", f"{type(error).__name__}: {safe(str(error))[:500]}"
    return {"check": name, "state": state, "found": text, "seconds": round(time.perf_counter() - began, 2)}


def show(found: list[dict[str, Any]]) -> None:
    from flows.cli.console import console

    for each in found:
        console.print(MARKS[each["state"]], f"{each['check']:<9}", end=" ")
        console.print(each["found"], markup=False, soft_wrap=True)


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

    from grpo_lib.errors import ConfigError

    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=ANSWER_SECONDS):
            return url
    except urllib.error.HTTPError:
        return url  # it answers; whether it lets us in, Prefect's client finds out
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConfigError(
            f"no Prefect server answers at PREFECT_API_URL={url} ({error}); start it with `prefect server start`, "
            "or unset PREFECT_API_URL to run with an embedded one"
        ) from None
