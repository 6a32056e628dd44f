"""Commands that do something again: `rerun` and `debug`."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.training import Endpoint, Json, Overrides, RunName, Store, prefect_session, run_name

if TYPE_CHECKING:
    from flows.branches import Rerun
    from flows.debug import Debugged


def rerun(
    run: RunName,
    overrides: Overrides = None,
    iteration: Annotated[
        int, typer.Option("-k", "--iteration", min=0, help="Of the first stage that is made anew.", show_default=False)
    ] = ...,  # type: ignore[assignment]
    from_stage: Annotated[
        str | None, typer.Option("--from", metavar="STAGE", help="Make a branch that trains to the end from here on.")
    ] = None,
    stage: Annotated[
        str | None, typer.Option(metavar="STAGE", help="Run only this stage, in a branch, and compare its result.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Of the branch; default: from run, iteration, stage and settings.", callback=run_name),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would run and which part of its key differs.")
    ] = False,
    store: Store = "grpo-store",
    endpoint_url: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Again from a stage of an iteration, in a branch: data before it is shared, the run is not touched.

    Example: `grpo rerun demo -k 7 --from advantage algorithm.advantage=rloo`
    """
    from grpo_lib.branches import branch_config, check_point
    from grpo_lib.config_files import make_store_config
    from grpo_lib.errors import ConfigError
    from grpo_lib.run import load_run

    chosen = from_stage or stage
    if chosen is None or (from_stage and stage):
        raise ConfigError("say --from STAGE for a branch that trains to the end, or --stage STAGE for that stage alone")
    place, settings = make_store_config(store, endpoint_url), overrides or []
    base = load_run(place, run)
    check_point(base, iteration, chosen)  # what can be refused at once
    branch_config(base, iteration, chosen, settings, name)
    asked: dict[str, Any] = {"store": place, "run": run, "iteration": iteration, "stage": chosen}
    asked |= {"overrides": settings, "name": name}
    if dry_run:
        from flows.branches import plan_rerun

        _print_plan(plan_rerun(**asked, anew=from_stage is not None), as_json)
    elif from_stage:
        _train_branch(asked, as_json)
    else:
        _rerun_stage(asked, as_json)


def debug(
    run: RunName,
    iteration: Annotated[
        str, typer.Argument(metavar="ITERATION", help="Number, or `setup`: before the first.", show_default=False)
    ],
    stage: Annotated[str, typer.Argument(metavar="STAGE", help="E.g. update.", show_default=False)],
    shard: Annotated[int, typer.Option(min=0, help="Of stages with several.")] = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="With what is committed, bit for bit; code 1 if it differs.")
    ] = False,
    store: Store = "grpo-store",
    endpoint_url: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Run one stage here, in this process, on its exact inputs; breakpoints work, and nothing is committed."""
    from grpo_lib.config_files import make_store_config
    from grpo_lib.errors import ConfigError
    from grpo_lib.run import load_run

    if iteration != "setup" and not iteration.isdecimal():
        raise ConfigError(f"iteration {iteration!r}: give a number from 0, or `setup` for what comes before the first")
    loaded = load_run(make_store_config(store, endpoint_url), run)
    from flows.debug import debug as run_stage

    done = run_stage(loaded, None if iteration == "setup" else int(iteration), stage, shard, compare=compare)
    _print_debugged(done, compare, as_json)
    if compare and not done.equal:
        raise typer.Exit(1)


def _train_branch(asked: dict[str, Any], as_json: bool) -> None:
    with prefect_session(as_json) as wait_for_server:
        from flows.branches import plan_rerun
        from flows.cli.training import _check_training
        from flows.train import train

        planned = plan_rerun(**asked)
        config = planned.branch.config
        if not as_json:
            _say(planned)
        wait_for_server()
        _check_training(config)
        report = train(config)
    if as_json:
        typer.echo(json.dumps({"branch": planned.branch.name} | report.model_dump(mode="json")))
        return
    from flows.cli.console import console, print_report

    print_report(report, config)
    console.print(f"  grpo show {planned.base.name} --branch {planned.branch.store_option}", soft_wrap=True)


def _rerun_stage(asked: dict[str, Any], as_json: bool) -> None:
    with prefect_session(as_json) as wait_for_server:
        from flows.rerun import rerun as flow

        wait_for_server()
        values = {**asked, "settings": asked["overrides"], "only_this_stage": True}
        del values["overrides"]
        result = flow(**values)
    if as_json:
        typer.echo(json.dumps(result))
        return
    from flows.cli.console import console

    for each in result["stages"]:
        place = f"{each['stage']} of iteration {each['iteration']}" + (
            f", shard {each['shard']}" if each["shard"] else ""
        )
        verdict = {
            True: "[green]the same as committed[/]",
            False: "[yellow]another result[/]",
            None: "made for the first time",
        }
        console.print(f"{place}: {verdict[each['same']]}, {each['seconds']:.2f} s, in run {each['run']}")


def _say(planned: "Rerun") -> None:
    from flows.cli.console import console
    from grpo_lib.branches import branch_differences

    point = planned.branch.config.branch
    assert point is not None
    console.print(
        f"branch [bold]{planned.branch.name}[/] of {point.run} from {point.stage} of iteration {point.iteration}"
    )
    for each in branch_differences(planned.base.config, planned.branch.config):
        console.print(f"  {each}", markup=False)


def _print_plan(planned: "Rerun", as_json: bool) -> None:
    from flows.branches import verdicts

    point, rows = planned.branch.config.branch, list(verdicts(planned))
    assert point is not None
    if as_json:
        typer.echo(json.dumps({"run": point.run, "iteration": point.iteration, "stages": rows}))
        return
    from rich.markup import escape
    from rich.table import Table

    from flows.cli.console import console

    table = Table(title=f"iteration {point.iteration} of {point.run}, from {point.stage} on", title_justify="left")
    for heading in ("stage", "", "why"):
        table.add_column(heading)
    colors = {"runs": "[yellow]runs[/]", "depends": "[cyan]depends[/]", "reused": "[green]reused[/]"}
    for row in rows:
        stage = row["stage"] + (f".{row['shard']}" if row["shard"] else "")
        why = "\n".join(row["reasons"]) or "nothing that its key holds differs"
        table.add_row(stage, colors[row["verdict"]], escape(why))
    console.print(table)
    if any(row["verdict"] == "depends" for row in rows):
        console.print("depends: runs unless what it is made from comes out as it was", style="dim")


def _print_debugged(done: "Debugged", compare: bool, as_json: bool) -> None:
    made = done.made
    if as_json:
        shown = ("stage", "iteration", "shard", "rows", "tokens", "seconds", "digest", "summary")
        values = {name: getattr(made, name) for name in shown}
        values |= {"committed": None if done.committed is None else done.committed.path, "notes": done.notes}
        if compare:
            values |= {"equal": done.equal, "comparisons": [vars(each) for each in done.comparisons]}
        typer.echo(json.dumps(values))
        return
    from rich.table import Table

    from flows.cli.console import console, print_numbers

    numbers = {name: value for name, value in made.summary.items() if isinstance(value, int | float)}
    print_numbers(f"{made.stage}: {made.rows:,} rows, {made.tokens:,} tokens, {made.seconds:.3f} s", numbers)
    for note in done.notes:
        console.print(f"not quite what was committed: {note}", style="yellow", markup=False)
    if not compare:
        return
    differing = [each for each in done.comparisons if not each.equal]
    if not differing:
        console.print(f"[green]equal bit for bit[/]: {len(done.comparisons)} columns, files and numbers")
        return
    table = Table(title=f"{len(differing)} of {len(done.comparisons)} differ", title_justify="left")
    for heading in ("what", "largest difference", ""):
        table.add_column(heading)
    for each in differing:
        table.add_row(each.place, "" if each.max_difference is None else f"{each.max_difference:.3g}", each.note)
    console.print(table)
