"""`grpo score`: a reward over responses in a file, while it is being written."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.training import Json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grpo_lib.rewards.judges import Reward
    from grpo_lib.rewards.runner import Scores
    from grpo_lib.types import Sample

SHOWN = 5

File = Annotated[Path, typer.Argument(help="Responses: .jsonl, .parquet or .arrow.", show_default=False)]
RewardName = Annotated[
    str, typer.Option("--reward", metavar="NAME", help="Built in (gsm8k, math, ...), or my_reward.py:function.")
]
Options = Annotated[list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="Of the function.")]
Columns = Annotated[list[str] | None, typer.Option("--column", metavar="NAME=COLUMN", help="E.g. response=completion.")]
Output = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Value, reason and parts of each: .parquet or .arrow.")
]


def score(
    file: File, reward: RewardName, option: Options = None, column: Columns = None, processes: int = 1,
    timeout_seconds: float = 10.0, concurrency: int = 64, output: Output = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Score responses in a file with a reward function and say what came out. No model and no run is needed.

    Columns prompt, response (or completion, text, output), reference (or answer, solution) and data_source are found
    by name; all others are the sample's metadata.
    """
    from grpo_lib.config_reward import RewardConfig
    from grpo_lib.errors import ConfigError
    from grpo_lib.rewards.files import read_table, samples_in
    from grpo_lib.rewards.judges import Reward, make_judges

    if output is not None and (output.suffix not in (".parquet", ".arrow") or not output.parent.is_dir()):
        raise ConfigError(f"--output {output}: name a file in a folder that exists, ending in .parquet or .arrow")
    place, _, name = reward.rpartition(":")
    function = {"name": name, "path": place or None, "kwargs": _pairs(option, "--option", parse=True)}
    runner = {"processes": processes, "concurrency": concurrency}
    values = {"functions": [function], "timeout_seconds": timeout_seconds, "max_failed": 1.0, "runner": runner}
    settings = RewardConfig.model_validate(values)
    judges = make_judges(settings.functions, [])
    table = read_table(file)
    samples = samples_in(table, _pairs(column, "--column", parse=False))
    scores = _scored(samples, Reward(judges=judges, settings=settings), as_json)
    if output is not None:
        _write(samples, scores, output)
    summary = _summary(samples, scores)
    typer.echo(json.dumps(summary)) if as_json else _show(file, reward, samples, scores, summary)


def _pairs(texts: list[str] | None, option: str, parse: bool) -> dict[str, Any]:
    """``key=value``; values as in YAML."""
    import yaml

    found: dict[str, Any] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{option} {text}: give key=value")
        found[key] = yaml.safe_load(value) if parse else value
    return found


def _scored(samples: "Sequence[Sample]", reward: "Reward", quiet: bool) -> "Scores":
    from rich.progress import Progress

    from flows.cli.console import console
    from grpo_lib.rewards.runner import score as score_all

    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as bars:
        bar = bars.add_task("scoring", total=len(samples))
        return score_all(samples, reward, lambda done: bars.update(bar, completed=done))


def _summary(samples: "Sequence[Sample]", scores: "Scores") -> dict[str, Any]:
    from collections import Counter

    from grpo_lib.rewards.scoring import reward_summary

    known = [value for value in scores.values if value is not None]
    sources: dict[str, list[float]] = {}
    for sample, value in zip(samples, scores.values, strict=True):
        if value is not None:
            sources.setdefault(sample.data_source, []).append(value)
    values = Counter(round(value, 6) for value in known)
    return {
        "samples": len(samples),
        "scored": len(known),
        **reward_summary(scores),
        "data_source": {name: {"scored": len(each), "mean": sum(each) / len(each)} for name, each in sources.items()},
        "values": {f"{value:g}": count for value, count in sorted(values.items())} if len(values) <= 20 else None,
        "reasons": dict(Counter(each for each in scores.reasons if each is not None).most_common()),
    }


def _show(file: Path, reward: str, samples: "Sequence[Sample]", scores: "Scores", summary: dict[str, Any]) -> None:
    from rich.table import Table

    from flows.cli.console import console

    table = Table(title=f"{file}: {reward}", title_justify="left")
    for heading in ("", "scored", "mean"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    if summary["scored"]:
        table.add_row("all", f"{summary['scored']:,} of {summary['samples']:,}", f"{summary['mean']:.4f}")
    for name, each in summary["data_source"].items() if len(summary["data_source"]) > 1 else ():
        table.add_row(name, f"{each['scored']:,}", f"{each['mean']:.4f}")
    for name in scores.components:
        if f"{name}_mean" in summary:
            table.add_row(f"  {name}", "", f"{summary[f'{name}_mean']:.4f}")
    console.print(table)
    if summary["values"]:
        most = max(summary["values"].values())
        for value, count in summary["values"].items():
            console.print(f"{value:>8}  {'█' * -(-30 * count // most):30}  {count:,}", markup=False)
    for reason, count in list(summary["reasons"].items())[:SHOWN]:
        first = scores.reasons.index(reason)
        console.print(f"{count:,} x {reason}", style="yellow", markup=False)
        console.print(f"    first: {samples[first].prompt_id}: {samples[first].response[:160]!r}", markup=False)


def _write(samples: "Sequence[Sample]", scores: "Scores", path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    (verdicts,) = scores.verdicts.values()
    columns = {
        "prompt_id": [each.prompt_id for each in samples],
        "value": scores.values,
        "reason": scores.reasons,
        "answer": scores.answers,
        "text": [None if each is None or each[0] is None else each[0].text for each in verdicts],
        **scores.components,
    }
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, compression="zstd")
        return
    with pa.OSFile(str(path), "wb") as target, pa.ipc.new_file(target, table.schema) as writer:
        writer.write_table(table)
