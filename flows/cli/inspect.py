"""Commands that look: `show` and `rollouts`."""

import json
from typing import Annotated, Any

import typer

from flows.cli.training import Endpoint, Json, RunName, Store, run_name


def show(
    run: Annotated[
        str | None,
        typer.Argument(
            help="Name of the run; `algorithms`: what `algorithm` can name; nothing: all runs.",
            show_default=False,
            callback=run_name,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Argument(help="With `algorithms`: a kind or a name, e.g. loss or rloo.", show_default=False)
    ] = None,
    iteration: Annotated[int | None, typer.Option("-k", "--iteration", min=0, help="Only this iteration.")] = None,
    branch: Annotated[bool, typer.Option("--branch", help="The run and its branches side by side.")] = False,
    plugin: Annotated[
        list[str] | None, typer.Option(help="With `algorithms`: a module of your own that registers more.")
    ] = None,
    store: Store = "grpo-store",
    endpoint_url: Endpoint = None,
    as_json: Json = False,
) -> None:
    """A run's stages, seconds, what was taken from other runs, and accuracy; or the known algorithms."""
    if run == "algorithms":
        _show_algorithms(name, plugin or [], as_json)
        return
    if name is not None or plugin:
        raise typer.BadParameter("a second name and --plugin go with `grpo show algorithms`")
    from grpo_lib.config_files import make_store_config
    from grpo_lib.run import load_run, run_names
    from grpo_lib.storage.objects import open_store

    config = make_store_config(store, endpoint_url)
    if run is None:
        names = run_names(open_store(config))
        typer.echo(json.dumps(names) if as_json else "\n".join(names) or f"no runs in {store} yet")
        return
    loaded = load_run(config, run)
    if branch:
        from flows.cli.family import show_branches

        show_branches(loaded, as_json)
        return
    if iteration is not None:
        _show_iteration(loaded, iteration, as_json)
        return
    _show_run(loaded, as_json)


def _show_algorithms(name: str | None, plugins: list[str], as_json: bool) -> None:
    from dataclasses import asdict

    from grpo_lib.algorithms.registry import nearest
    from grpo_lib.catalogue import listings
    from grpo_lib.errors import ConfigError
    from grpo_lib.plugins import load_plugins

    load_plugins(plugins)
    known = list(listings())
    chosen = [each for each in known if name in (None, each.name, each.setting.split(".")[1], *each.aliases)]
    if not chosen:
        names = [label for each in known for label in (each.name, each.setting.split(".")[1])]
        raise ConfigError(f"nothing is called {name!r}; {nearest(str(name), dict.fromkeys(names))}")
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in chosen]))
        return
    from rich.markup import escape

    from flows.cli.console import console

    setting = None
    for each in chosen:
        if each.setting != setting:
            setting = each.setting
            console.print(f"\n[bold underline]{setting}[/]" + (" (each also with +)" if "kl" in setting else ""))
        also = f" (also {', '.join(each.aliases)})" if each.aliases else ""
        console.print(f"[bold cyan]{each.name}[/]{also}  {escape(each.formula)}")
        console.print(f"    {escape(each.use)}", style="dim")
        if each.paper:
            console.print(f"    {escape(each.paper)}", style="dim italic", highlight=False)
        if each.aggregation is not None:
            console.print(f"    aggregation: {each.aggregation} unless another is named")
        for option in each.options:
            console.print(f"    {option.name} = {option.default}  [dim]{escape(f'{option.type}: {option.meaning}')}[/]")


def _show_run(run: Any, as_json: bool) -> None:
    from dataclasses import asdict

    from grpo_lib.tracking.reports import curve, seconds_between_stages, stage_totals

    manifests = run.manifests()
    totals = stage_totals(manifests)
    updates, _ = curve(manifests, "update", "policy_version")
    curves = {mode: curve(manifests, "evaluate", f"{mode}_accuracy") for mode in ("sampled", "greedy")}
    accuracy = {mode: dict(zip(*points, strict=True)) for mode, points in curves.items()}
    between = seconds_between_stages(manifests)
    if as_json:
        result = {
            "run": run.name,
            "iterations_done": len(updates),
            "iterations": run.config.iterations,
            "stages": [asdict(each) for each in totals],
            "accuracy": accuracy,
            "seconds_between_stages": between,
            "place": run.place,
        }
        typer.echo(json.dumps(result))
        return
    from rich.table import Table

    from flows.cli.console import console

    console.print(f"[bold]{run.name}[/]: {len(updates)} of {run.config.iterations} iterations, {run.place}")
    table = Table()
    for name in ("stage", "computed", "adopted", "rows", "tokens", "seconds", "rows/s"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for each in totals:
        rate = f"{each.rows / each.seconds:,.0f}" if each.seconds > 0 and each.rows else ""
        table.add_row(
            each.stage, str(each.artifacts - each.adopted), str(each.adopted), f"{each.rows:,}", f"{each.tokens:,}",
            f"{each.seconds:.1f}", rate,
        )  # fmt: skip
    console.print(table)
    for mode, points in accuracy.items():
        if points:
            console.print(f"{mode} accuracy: " + "  ".join(f"{k}: {value:.3f}" for k, value in points.items()))
    if between is not None:
        console.print(f"outside stage bodies (Prefect, commits, MLflow): {1000 * between:.0f} ms an iteration (median)")


def _show_iteration(run: Any, iteration: int, as_json: bool) -> None:
    from grpo_lib.errors import NotFoundError

    found = [each for each in run.stages.manifests() if (each.iteration or 0) == iteration]
    if not found:
        raise NotFoundError(f"run {run.name!r} has no iteration {iteration}; `grpo show {run.name}` says how far it is")
    rows = [
        {
            "stage": each.stage,
            "shard": each.shard,
            "rows": each.rows,
            "tokens": each.tokens,
            "seconds": each.seconds,
            "adopted_from": each.adopted_from,
            "folder": run.objects.location(each.parts[0].path.rpartition("/")[0]) if each.parts else None,
            "key": each.key,
            "summary": each.summary,
        }
        for each in found
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    from flows.cli.console import console

    for row in rows:
        kind = "adopted" if row["adopted_from"] else "computed"
        console.print(
            f"[bold]{row['stage']}[/] {kind}, {row['rows']:,} rows, {row['tokens']:,} tokens, {row['seconds']:.3f} s"
        )
        console.print(f"  {row['folder'] or '(summary only)'}", soft_wrap=True)


def rollouts(
    run: RunName,
    iteration: Annotated[int, typer.Option("-k", "--iteration", min=0, help="Which iteration.")] = 0,
    where: Annotated[
        str | None, typer.Option(help="SQL condition, e.g. \"value < 1 and tokens > 40 and prompt like '%17%'\".")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 10,
    store: Store = "grpo-store",
    endpoint_url: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Rollouts of an iteration with reward and advantage; SQL over the stored Arrow data.

    Columns: rollout_id, prompt, text, reference, data_source, value, correct, reason, advantage, tokens, surprise,
    finish_reason, policy_version.
    """
    from grpo_lib.config_files import make_store_config
    from grpo_lib.data.queries import select_rollouts
    from grpo_lib.run import load_run

    loaded = load_run(make_store_config(store, endpoint_url), run)
    rows = select_rollouts(loaded.stages, iteration, where=where, limit=limit)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    from flows.cli.console import console, print_response

    for row in rows:
        value = "none" if row["value"] is None else f"{row['value']:.3f}"
        advantage = "-" if row["advantage"] is None else f"{row['advantage']:+.3f}"
        length = f"{row['tokens']} tokens, {row['finish_reason']}"
        print_response(f"{row['rollout_id']}  reward {value}  advantage {advantage}  {length}", row)
        if row["reason"]:
            console.print(f"  {row['reason']}", style="yellow")
    console.print(f"{len(rows)} rollouts of iteration {iteration}", style="dim")
