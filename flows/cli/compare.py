"""`grpo compare`: runs side by side."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.training import Endpoint, Json, Store, run_name

if TYPE_CHECKING:
    from grpo_lib.tracking.compare import Comparison


def run_names(values: list[str]) -> list[str]:
    """Refuses what can't be names of runs."""
    for value in values:
        run_name(value)
    return values


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(help="Names of runs.", show_default=False, metavar="RUN RUN...", callback=run_names),
    ],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also a page with tables and curves.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Also the curves as a picture.")] = None,
    store: Store = "grpo-store",
    endpoint_url: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Runs side by side: settings that differ, accuracy with standard errors, reward, lengths, speed, seconds."""
    from dataclasses import asdict

    from grpo_lib.config_files import make_store_config
    from grpo_lib.errors import ConfigError
    from grpo_lib.run import load_run
    from grpo_lib.tracking.compare import compare as compare_runs

    for path in (html, png):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.absolute().parent}; name a file in one that exists")
    place = make_store_config(store, endpoint_url)
    comparison = compare_runs([load_run(place, name) for name in dict.fromkeys(runs)])
    if png is not None:
        from grpo_lib.tracking.compare_report import picture

        png.write_bytes(picture(comparison))
    if html is not None:
        from grpo_lib.tracking.compare_report import page

        html.write_text(page(comparison), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(asdict(comparison)))
        return
    _print(comparison)
    for path in (html, png):
        if path is not None:
            typer.echo(f"written: {path}")


def _print(comparison: "Comparison") -> None:
    from rich.markup import escape
    from rich.table import Table

    from flows.cli.console import console
    from grpo_lib.tracking.compare_report import table_of

    table = Table("", *(escape(each.run) for each in comparison.runs), collapse_padding=True)
    for section, rows in table_of(comparison).items():
        if not rows:
            continue
        table.add_section()
        table.add_row(f"[bold]{section}[/]")
        for name, texts in rows.items():
            table.add_row(f"  {name}", *(escape(text) for text in texts))
    console.print(table)
