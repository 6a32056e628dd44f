"""`grpo show RUN --branch`: a run and its branches side by side."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from grpo_lib.run import Run

ROWS = 8
"""Of a curve."""


def show_branches(run: "Run", as_json: bool) -> None:
    """Where each branched off, what differs, what is shared, and the curves where all have them."""
    from grpo_lib.tracking.branches import CURVES, common, side_by_side

    sides = side_by_side(run)
    places = {name: common(sides, name) for name in CURVES}
    if as_json:
        typer.echo(json.dumps({"runs": [asdict(each) for each in sides], "common_iterations": places}))
        return
    from rich.table import Table

    from flows.cli.console import console

    for number, side in enumerate(sides, start=1):
        fork = "" if side.base is None else f": {side.base} from {side.stage} of iteration {side.iteration} on"
        console.print(f"[bold]{number} {side.run}[/]{fork}")
        for each in side.settings:
            console.print(f"    {each}", markup=False)
        console.print(f"    {side.iterations} iterations; artifacts: {_share(side)}", style="dim")
    table = Table("", *(str(number) for number in range(1, len(sides) + 1)), collapse_padding=True)
    for name, iterations in places.items():
        table.add_section()
        for k in _some(iterations):
            values = (each.curves[name].get(k) for each in sides)
            table.add_row(f"{name}, {k}", *("" if each is None else f"{each:.3f}" for each in values))
    console.print(table)
    if len(sides) == 1:
        console.print(f"{run.name} has no branch; `grpo rerun {run.name} --iteration K --from STAGE` makes one")


def _share(side: Any) -> str:
    if side.base is None:
        return f"{side.own} of its own"
    equal = f", {side.equal} came out equal" if side.equal else ""
    return f"{side.shared} shared{equal}, {side.own} of its own"


def _some(iterations: list[int]) -> list[int]:
    """At most ``ROWS``, evenly, with the last.

    >>> _some(list(range(20)))
    [0, 3, 5, 8, 11, 14, 16, 19]
    """
    if len(iterations) <= ROWS:
        return iterations
    return [iterations[round(place * (len(iterations) - 1) / (ROWS - 1))] for place in range(ROWS)]
