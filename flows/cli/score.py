"""`grpo score`: a reward over responses in a file, while it is being written."""

import json
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.training import Json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from grpo_lib.rewards.judges import Reward
    from grpo_lib.rewards.runner import Scores
    from grpo_lib.types import Sample

SHOWN = 5
ENDINGS = (".parquet", ".arrow")

File = Annotated[Path, typer.Argument(help="Responses: .jsonl, .parquet or .arrow.", show_default=False)]
RewardName = Annotated[
    str,
    typer.Option(
        "--reward",
        metavar="NAME",
        help="A function of yours, as my_reward.py:function; or built in: gsm8k, math, countdown, exact_match, regex, "
        "multiple_choice, format, length, overlong, code, judge, model (`grpo show algorithms` has their options).",
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="An option of the function, as in YAML; again for another."),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column", metavar="NAME=COLUMN", help="What a column is taken for, e.g. response=answer; again for another."
    ),
]
Processes = Annotated[int, typer.Option(min=1, max=1024, help="In which a function of yours runs side by side.")]
Timeout = Annotated[float, typer.Option(help="For one response; then its value is null.")]
Concurrency = Annotated[int, typer.Option(min=1, max=65536, help="Responses that an async function has at a time.")]
Output = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Value, reason, answer and parts of each: .parquet or .arrow.")
]


def score(
    file: File, reward: RewardName, option: Options = None, column: Columns = None, processes: Processes = 1,
    timeout_seconds: Timeout = 10.0, concurrency: Concurrency = 64, output: Output = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Score responses in a file with a reward function and say what came out. No model and no run is needed.

    Columns are found by their names: prompt (or question, problem, instruction), response (completion, text, output),
    reference (answer, solution, target, ground_truth), data_source (source), response_tokens (tokens; words where
    there is none), finish_reason and prompt_id (id). All others are the sample's metadata.
    """
    from grpo_lib.errors import ConfigError
    from grpo_lib.rewards.files import chosen_columns, rows_of, samples_in

    if output is not None and (output.suffix not in ENDINGS or not output.parent.is_dir()):
        raise ConfigError(f"--output {output}: name a file in a folder that exists, ending in .parquet or .arrow")
    if output is not None and output.resolve() == file.resolve():
        raise ConfigError(f"--output {output} is the file that is read; name another")
    runner = {"processes": processes, "concurrency": concurrency}
    judging = _reward(reward, _options(option), {"timeout_seconds": timeout_seconds, "runner": runner})
    rows = rows_of(file)
    chosen = chosen_columns(rows, dict(_pair(each, "--column", "NAME=COLUMN") for each in column or []))
    samples = samples_in(rows, chosen)
    scores = _scored(samples, judging, as_json)
    if output is not None:
        _write(samples, scores, output)
    summary = {"columns": chosen} | _summary(samples, scores)
    typer.echo(json.dumps(summary)) if as_json else _show(file, reward, samples, scores, summary)


def _reward(reward: str, options: dict[str, Any], values: dict[str, Any]) -> "Reward":
    """The function as the reward of a run, with messages that speak of the command's options."""
    from pydantic import ValidationError

    from grpo_lib.config_reward import RewardConfig
    from grpo_lib.errors import ConfigError, GrpoError
    from grpo_lib.rewards.judges import Reward, check_machine, make_judges

    place, _, name = reward.rpartition(":")
    if name.endswith(".py") or not name or reward.startswith(":"):
        raise ConfigError(f"--reward {reward}: name a function, as my_reward.py:function, or one that is built in")
    function = {"name": name, "path": place or None, "kwargs": options}
    try:
        settings = RewardConfig.model_validate({"functions": [function], "max_failed": 1.0} | values)
        judging = Reward(judges=make_judges(settings.functions, []), settings=settings)
        check_machine(judging)
    except ValidationError as error:
        problems = [(each["loc"], each["input"], each["msg"]) for each in error.errors()]
        raise ConfigError(
            "; ".join(f"--{_option_at(loc)} {value!r}: {text}" for loc, value, text in problems)
        ) from None
    except GrpoError as error:
        text = str(error).replace("reward.functions[0].kwargs.", "--option ").replace("reward.functions[0]", "--reward")
        raise type(error)(text) from None
    return judging


def _option_at(place: tuple[int | str, ...]) -> str:
    """Of the command, for a setting: ``option bonus`` is ``functions[0].kwargs.bonus``."""
    if "kwargs" in place:
        return f"option {place[place.index('kwargs') + 1]}"
    return str(place[-1]).replace("_", "-")


def _options(texts: list[str] | None) -> dict[str, Any]:
    """Values as in YAML, but that 1e-6 is a number and # begins no comment."""
    import yaml

    found: dict[str, Any] = {}
    for text in texts or []:
        key, value = _pair(text, "--option", "KEY=VALUE")
        if "#" in value and value[0] not in "'\"[{":
            found[key] = value
            continue
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise typer.BadParameter(
                f"--option {text}: the value is no YAML ({' '.join(str(error).split())})"
            ) from None
        if isinstance(found[key], str) and re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]+", value):
            found[key] = float(value)
    return found


def _pair(text: str, option: str, form: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise typer.BadParameter(f"{option} {text}: give {form}")
    return key, value


def _scored(samples: "Sequence[Sample]", reward: "Reward", quiet: bool) -> "Scores":
    from rich.progress import Progress

    from flows.cli.console import console
    from grpo_lib.rewards.runner import score as score_all

    with (
        _shown_on_stderr(),
        Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as bars,
    ):
        bar = bars.add_task("scoring", total=len(samples))
        return score_all(samples, reward, lambda done: bars.update(bar, completed=done))


@contextmanager
def _shown_on_stderr() -> "Iterator[None]":
    """What functions print; a run has it in its log."""
    import logging

    log, handler = logging.getLogger("grpo_lib.rewards"), logging.StreamHandler()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


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
    mean = f"{summary['mean']:.4f}" if summary["scored"] else "-"
    table.add_row("all", f"{summary['scored']:,} of {summary['samples']:,}", mean)
    for name, each in summary["data_source"].items() if len(summary["data_source"]) > 1 else ():
        table.add_row(name, f"{each['scored']:,}", f"{each['mean']:.4f}")
    for name in scores.components:
        if f"{name}_mean" in summary:
            table.add_row(f"  {name}", "", f"{summary[f'{name}_mean']:.4f}")
    console.print(table)
    taken = [name if name == column else f"{name} from {column}" for name, column in summary["columns"].items()]
    console.print(f"columns: {', '.join(taken)}", style="dim", markup=False, soft_wrap=True)
    if summary["values"]:
        most = max(summary["values"].values())
        for value, count in summary["values"].items():
            console.print(f"{value:>8}  {'█' * -(-30 * count // most):30}  {count:,}", markup=False)
    for reason, count in list(summary["reasons"].items())[:SHOWN]:
        first = scores.reasons.index(reason)
        console.print(f"{count:,} x {reason}", style="yellow", markup=False)
        named = "" if samples[first].prompt_id == str(first) else f", {samples[first].prompt_id}"
        console.print(f"    row {first} (from 0){named}: {samples[first].response[:160]!r}", markup=False)
    if len(summary["reasons"]) > SHOWN:
        console.print(f"and {len(summary['reasons']) - SHOWN} more reasons", style="yellow")


def _write(samples: "Sequence[Sample]", scores: "Scores", path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    from grpo_lib.errors import ConfigError

    (verdicts,) = scores.verdicts.values()
    columns = {
        "prompt_id": pa.array([each.prompt_id for each in samples], pa.string()),
        "value": pa.array(scores.values, pa.float64()),
        "reason": pa.array(scores.reasons, pa.string()),
        "answer": pa.array(scores.answers, pa.string()),
        "text": pa.array([getattr(each, "text", None) for each in verdicts], pa.string()),
    }
    for name, values in scores.components.items():
        columns[f"component_{name}" if name in columns else name] = pa.array(values, pa.float64())
    table = pa.table(columns)
    try:
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(table, path, compression="zstd")
        else:
            with pa.OSFile(str(path), "wb") as target, pa.ipc.new_file(target, table.schema) as writer:
                writer.write_table(table)
    except OSError as error:
        raise ConfigError(f"--output {path}: can't write it: {error}") from error
