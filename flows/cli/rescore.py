"""`grpo rescore`: another reward over the rollouts that a run has."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.training import Endpoint, Json, RunName, Store

if TYPE_CHECKING:
    import pyarrow as pa

    from grpo_lib.rewards.change import Change, Histogram
    from grpo_lib.run import Run

WIDTH = 30
"""Characters of the longest bar."""
SHOWN_REASONS = 5
SHOWN_ITERATIONS = 12

Reward = Annotated[
    str, typer.Option(metavar="MODULE:NAME", help="module:function or path/to/file.py:function.", show_default=False)
]
Iterations = Annotated[str | None, typer.Option(metavar="A-B", help="Only these, e.g. 10-20, 10- or 7.")]
Output = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Old and new reward of each rollout: .parquet or .arrow.")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Distributions and means as a picture: .png.")]


def rescore(
    run: RunName, reward: Reward, iterations: Iterations = None, output: Output = None, plot: Plot = None,
    store: Store = "grpo-store", endpoint_url: Endpoint = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Score all stored rollouts with another reward function and report the change; the run is not touched.

    The function takes a `Sample` (prompt, response, reference, data_source, ...) and returns a number, None or a
    `RewardResult`, as in training. No model is loaded.
    """
    from grpo_lib.config_files import make_store_config
    from grpo_lib.errors import ConfigError
    from grpo_lib.plugins import load_function
    from grpo_lib.rewards.judges import own_reward
    from grpo_lib.rewards.rescore import stored_rollouts
    from grpo_lib.run import load_run

    for option, path, endings in (("--output", output, (".parquet", ".arrow")), ("--plot", plot, (".png",))):
        if path is not None and (path.suffix not in endings or not path.parent.is_dir()):
            raise ConfigError(f"{option} {path}: name a file in a folder that exists, ending in {' or '.join(endings)}")
    chosen = _range(iterations)
    loaded = load_run(make_store_config(store, endpoint_url), run)
    function = own_reward(load_function(reward, "--reward"))
    table = _scored(loaded, stored_rollouts(loaded, *chosen), function, as_json)
    _report(table, f"{run}: {reward}", plot, as_json)
    if output is not None:
        _write(table, output)


def _range(text: str | None) -> tuple[int, int | None]:
    from grpo_lib.errors import ConfigError

    found = re.fullmatch(r"(\d+)(-(\d*))?", text or "0-")
    if found is None:
        raise ConfigError(f"--iterations {text}: give A-B, A- or A, e.g. 10-20")
    first, several, last = int(found[1]), found[2], found[3]
    end = first if several is None else int(last) if last else None
    if end is not None and end < first:
        raise ConfigError(f"--iterations {text}: the last is before the first")
    return first, end


def _scored(run: "Run", stored: Any, function: Any, quiet: bool) -> "pa.Table":
    from rich.progress import Progress

    from flows.cli.console import console
    from grpo_lib.rewards.rescore import rescore as score_again

    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as bars:
        task = bars.add_task("rollouts", total=sum(each.rows for each in stored))
        return score_again(run, stored, function, lambda done: bars.update(task, completed=done))


def _report(table: "pa.Table", title: str, plot: Path | None, as_json: bool) -> None:
    from grpo_lib.rewards.change import change, histogram, reasons
    from grpo_lib.rewards.rescore import parts

    changes = [(kind, name, change(rows)) for kind, name, rows in parts(table)]
    bins, nulls = histogram(table), {which: reasons(table, which) for which in ("old", "new")}
    if plot is not None:
        from grpo_lib.rewards.plot import plot_change

        plot_change(bins, [(int(name), each) for kind, name, each in changes if kind == "iteration"], title, plot)
    if as_json:
        values: dict[str, Any] = {"all": asdict(changes[0][2])}
        for kind in ("iteration", "data_source"):
            values[kind] = {name: asdict(each) for found, name, each in changes if found == kind}
        typer.echo(json.dumps(values | {"histogram": asdict(bins), "null_reasons": nulls}))
        return
    _print_changes(title, changes)
    _print_histogram(bins)
    for which, found in nulls.items():
        _print_reasons(which, found)


def _print_changes(title: str, changes: list[tuple[str, str, "Change"]]) -> None:
    from rich.table import Table

    from flows.cli.console import console

    everything = changes[0][2]
    table = Table(title=title, title_justify="left", padding=(0, 1), collapse_padding=True)
    for heading in ("", "rows", "old", "new", "change", "equal", "corr.", "signal"):
        table.add_column(heading, justify="left" if heading == "" else "right", no_wrap=True)
    for name, each in _rows(changes):
        table.add_row(
            name,
            f"{each.rollouts:,}",
            *(f"{_number(part.mean)}±{_number(part.std)}" for part in (each.old, each.new)),
            _number(each.mean_change, "+"),
            "-" if each.equal_fraction is None else f"{each.equal_fraction:.0%}",
            _number(each.correlation),
            f"{each.old.groups_with_signal}→{each.new.groups_with_signal}/{each.groups}",
        )
    console.print(table)
    console.print(
        "mean±std of the reward; signal: groups whose rewards are not all equal, which is what is learned from",
        style="dim",
    )
    console.print(
        f"right by both {everything.both_right:,}, by the old only {everything.only_old_right:,}, by the new only "
        f"{everything.only_new_right:,}, by neither {everything.neither_right:,}"
    )


def _rows(changes: list[tuple[str, str, "Change"]]) -> list[tuple[str, "Change"]]:
    """All; data sources if there are several; iterations, evenly where there are many."""
    by_kind = {kind: [each for each in changes if each[0] == kind] for kind in ("all", "data_source", "iteration")}
    sources, iterations = by_kind["data_source"], by_kind["iteration"]
    if len(iterations) > SHOWN_ITERATIONS:
        step = (len(iterations) - 1) / (SHOWN_ITERATIONS - 1)
        iterations = [iterations[round(place * step)] for place in range(SHOWN_ITERATIONS)]
    shown = [*by_kind["all"], *(sources if len(sources) > 1 else []), *iterations]
    return [(f"k={name}" if kind == "iteration" else name, each) for kind, name, each in shown]


def _print_histogram(bins: "Histogram") -> None:
    from rich.table import Table

    from flows.cli.console import console

    most = max([1, *bins.old, *bins.new])
    table = Table("reward", "old", "", "new", "", box=None, padding=(0, 1))
    for label, old, new in zip(bins.labels, bins.old, bins.new, strict=True):
        bars = [("█" * -(-WIDTH * count // most), f"{count:,}") for count in (old, new)]
        table.add_row(label, f"[blue]{bars[0][0]}[/]", bars[0][1], f"[yellow]{bars[1][0]}[/]", bars[1][1])
    console.print(table)


def _print_reasons(which: str, found: Mapping[str, int]) -> None:
    from flows.cli.console import console

    if not found:
        return
    console.print(f"{sum(found.values()):,} without a {which} reward:", style="yellow")
    for reason, count in list(found.items())[:SHOWN_REASONS]:
        console.print(f"  {count:,} x {reason}", markup=False)


def _number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3f}"


def _write(table: "pa.Table", path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, compression="zstd")
        return
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
