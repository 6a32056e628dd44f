"""Commands that keep a store in order: `verify` and `gc`."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.training import Endpoint, Json, Store, run_name

if TYPE_CHECKING:
    from grpo_lib.mending import Verdict
    from grpo_lib.run import Run
    from grpo_lib.storage.gc import Garbage
    from grpo_lib.storage.verify import Survey

DAMAGED = 2
"""Exit code."""


def verify(
    run: Annotated[
        str | None, typer.Argument(help="Name of the run.", show_default=False, callback=run_name, metavar="RUN")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All runs of the store.")] = False,
    store: Store = "grpo-store",
    endpoint_url: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Read all that a run committed, check every digest, and say what can be made again. Damage ends with code 2."""
    from grpo_lib.config_files import make_store_config
    from grpo_lib.mending import note_damage, verdicts
    from grpo_lib.run import load_run, run_names
    from grpo_lib.storage.objects import open_store
    from grpo_lib.storage.paths import damage_file

    if (run is None) != everything:
        raise typer.BadParameter("give a run, or --all")
    config = make_store_config(store, endpoint_url)
    found = []
    for name in run_names(open_store(config)) if run is None else [run]:
        loaded = load_run(config, name)
        survey = _survey(loaded, quiet=as_json)
        judged = verdicts(loaded, survey)
        if any(each.again for each in judged):
            note_damage(loaded.objects, name, f"{judged[0].damage.path} {judged[0].damage.problem}")
        elif not judged:
            loaded.objects.delete([damage_file(name)])
        found.append(_as_values(survey, judged))
        if not as_json:
            _print_survey(survey, judged)
    if as_json:
        typer.echo(json.dumps(found if everything else found[0]))
    if any(each["damages"] for each in found):
        raise typer.Exit(DAMAGED)


def gc(
    runs: Annotated[
        list[str] | None, typer.Argument(help="Names of runs; nothing: the whole store.", show_default=False)
    ] = None,
    older_than: Annotated[
        float, typer.Option("--older-than", min=0, metavar="DAYS", help="0: nothing else may work with the store now.")
    ] = 1.0,
    keep_weights: Annotated[
        int, typer.Option(min=1, help="The last policies of each run whose weights for engines stay.")
    ] = 3,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    store: Store = "grpo-store",
    endpoint_url: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Remove what nobody needs: attempts without a manifest, weights for engines, writes that were cut off.

    What a manifest, a checkpoint or MLflow refers to stays, and so does everything that can't be made again.
    """
    from grpo_lib.config_files import make_store_config
    from grpo_lib.housekeeping import find_garbage, remove_garbage

    names = [str(run_name(each)) for each in runs or []]
    if as_json and not (dry_run or yes):
        raise typer.BadParameter("--json goes with --dry-run or --yes: nobody can be asked")
    config = make_store_config(store, endpoint_url)
    things = find_garbage(config, names, older_than_days=older_than, keep_weights=keep_weights)
    if not as_json:
        _print_garbage(things)
    go = bool(things) and not dry_run and (yes or typer.confirm("remove all this?"))
    gone: list[Garbage] = []
    left = remove_garbage(config, things, gone.append) if go else []
    if as_json:
        found = [
            {"kind": each.kind, "run": each.run, "path": each.path, "files": len(each.files), "bytes": each.bytes}
            | {"why": each.why, "removed": each in gone}
            for each in things
        ]
        typer.echo(json.dumps({"garbage": found, "left": left}))
        return
    for line in left:
        typer.echo(f"left alone: {line}", err=True)
    if go:
        typer.echo(f"removed {sum(len(each.files) or 1 for each in gone)} files, {_size(sum(e.bytes for e in gone))}")


def _print_garbage(things: "list[Garbage]") -> None:
    """A line for each kind of each run."""
    from rich.table import Table

    from flows.cli.console import console

    if not things:
        console.print("nothing to remove", style="green")
        return
    groups: dict[tuple[str, str, str], list[Garbage]] = {}
    for each in things:
        groups.setdefault((each.run or "", each.kind, each.why), []).append(each)
    table = Table()
    for name in ("run", "what", "how many", "files", "size", "why"):
        table.add_column(name, justify="right" if name in ("how many", "files", "size") else "left")
    for (run, kind, why), group in sorted(groups.items()):
        files, size = sum(len(each.files) or 1 for each in group), sum(each.bytes for each in group)
        table.add_row(run, kind, f"{len(group):,}", f"{files:,}", _size(size), why)
    console.print(table)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def _survey(run: "Run", quiet: bool) -> "Survey":
    from rich.progress import Progress

    from flows.cli.console import console
    from grpo_lib.storage.verify import verify_run

    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as bars:
        bar = bars.add_task(f"reading {run.name}", total=None)
        return verify_run(run.objects, run.name, lambda done, total: bars.update(bar, completed=done, total=total))


def _as_values(survey: "Survey", judged: "list[Verdict]") -> dict[str, Any]:
    damages = []
    for each in judged:
        stage, iteration = each.damage.place
        damages.append(asdict(each.damage) | {"stage": stage, "iteration": iteration} | _judgement(each))
    return {"run": survey.run, "files": survey.files, "bytes": survey.bytes, "damages": damages}


def _judgement(verdict: "Verdict") -> dict[str, Any]:
    return {"again": verdict.again, "remedy": verdict.remedy}


def _print_survey(survey: "Survey", judged: "list[Verdict]") -> None:
    from flows.cli.console import console

    for each in judged:
        stage, iteration = each.damage.place
        place = stage if iteration is None else f"{stage} of iteration {iteration}"
        console.print(each.damage.path, style="bold red", markup=False, soft_wrap=True)
        console.print(f"  {place}: {each.damage.problem}", markup=False, soft_wrap=True)
        console.print(f"  {each.remedy}", style="yellow", markup=False, soft_wrap=True)
    size = f"{survey.files:,} files, {survey.bytes / 2**20:,.1f} MiB"
    if not judged:
        console.print(f"{survey.run}: {size} read, all as they were committed", style="green")
        return
    again = sum(each.again for each in judged)
    console.print(f"{survey.run}: {size} read, {len(judged)} damaged, {again} of them can be made again", style="red")
