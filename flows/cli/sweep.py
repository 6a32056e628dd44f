"""`grpo sweep`: a training run for each of several settings."""

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.training import Config, Json, Overrides, prefect_session, run_name

if TYPE_CHECKING:
    from flows.sweep import SweepReport

Grid = Annotated[
    list[str] | None,
    typer.Option("--grid", metavar="KEY=[A,B]", help="A setting with its values; every combination is a run."),
]
Random = Annotated[
    list[str] | None,
    typer.Option(
        "--random", metavar="KEY=LOW..HIGH", help="A setting drawn from a range; LOW..HIGH:log, :int; or from [A,B]."
    ),
]


def sweep(
    config: Config,
    overrides: Overrides = None,
    name: Annotated[
        str, typer.Option(help="Of the sweep; its runs are NAME-00 and so on.", callback=run_name)
    ] = "sweep",
    grid: Grid = None,
    random: Random = None,
    draws: Annotated[int, typer.Option(help="Of random settings, for each combination of the grid.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    metric: Annotated[str, typer.Option(help="sampled_accuracy, greedy_accuracy or reward.")] = "sampled_accuracy",
    parallel: Annotated[int, typer.Option(help="Runs at a time.")] = 1,
    hopeless_after: Annotated[
        int | None, typer.Option(metavar="K", help="Stop runs that are below the median from iteration K on.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train with each of several settings, and say which is best. The same command again goes on with what is missing.

    For example --grid rollout.samples=[4,8] --random trainer.optimizer.lr=1e-5..1e-3:log --draws 4
    """
    from flows.cli.doctor import check_prefect
    from grpo_lib.config_files import load_config, validated
    from grpo_lib.patience import impatient
    from grpo_lib.preflight import check_surroundings
    from grpo_lib.sweeps import SweepConfig, preflight_of, trials

    asked = {
        "name": name, "grid": dict(_pair("--grid", each) for each in grid or []),
        "random": dict(_pair("--random", each) for each in random or []),
        "draws": draws, "seed": seed, "metric": metric, "parallel": parallel, "hopeless_after": hopeless_after,
    }  # fmt: skip
    base, plan = load_config(config, overrides or []), validated(SweepConfig, asked, "sweep")
    with impatient():
        for each in preflight_of(trials(base, plan)):
            check_surroundings(each)
        check_prefect()
    with prefect_session(as_json) as wait_for_server:
        from flows.sweep import sweep as sweep_flow

        wait_for_server()
        result = sweep_flow(base, plan)
    if as_json:
        typer.echo(result.model_dump_json())
        return
    _print(result)


def _pair(option: str, text: str) -> tuple[str, Any]:
    """A setting and its values.

    >>> _pair("--random", "trainer.optimizer.lr=1e-5..1e-3:log")
    ('trainer.optimizer.lr', {'low': 1e-05, 'high': 0.001, 'log': True, 'integer': False})
    """
    import yaml

    from grpo_lib.errors import ConfigError

    key, _, values = text.partition("=")
    span = re.fullmatch(r"([-+.\deE]+?)\.\.([-+.\deE]+)((?::log|:int)*)", values)
    try:
        if span and option == "--random":
            kinds = span[3].split(":")
            return key, {
                "low": float(span[1]), "high": float(span[2]), "log": "log" in kinds, "integer": "int" in kinds,
            }  # fmt: skip
        found = yaml.safe_load(values)
    except (ValueError, yaml.YAMLError):
        found = None
    if not key or not isinstance(found, list):
        example = "LOW..HIGH, LOW..HIGH:log or [A,B]" if option == "--random" else "[A,B]"
        raise ConfigError(f"{option} {text}: give a setting and its values, KEY={example}")
    return key, [_number(each) for each in found]


def _number(value: Any) -> Any:
    """YAML reads 1e-4 as a string."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", value):
        return float(value)
    return value


def _print(result: "SweepReport") -> None:
    from rich.table import Table

    from flows.cli.console import console

    keys = list(dict.fromkeys(key for each in result.runs for key in each.settings))
    headings = ("run", *_headings(keys), result.metric, "iterations", "")
    table = Table(*headings, title=f"sweep {result.sweep}", title_justify="left")
    for each in result.runs:
        value = "" if each.value is None else f"{each.value:.3f} ± {each.error or 0.0:.3f}"
        settings = [f"{each.settings[key]:.4g}" if isinstance(each.settings[key], float) else str(each.settings[key])
                    for key in keys]  # fmt: skip
        table.add_row(each.run, *settings, value, str(each.iterations), each.outcome)
    console.print(table)
    if result.best is not None:
        console.print(f"best:   {result.best}")
    console.print(f"MLflow: {result.mlflow_uri}", soft_wrap=True)
    shown = " ".join(each.run for each in result.runs[:4])
    console.print(f"next:   grpo compare {shown} --store {result.store}", soft_wrap=True)


def _headings(keys: list[str]) -> list[str]:
    """The last parts of settings' names, where they are different.

    >>> _headings(["rollout.samples", "trainer.optimizer.lr"])
    ['samples', 'lr']
    """
    last = [key.rpartition(".")[2] for key in keys]
    return last if len(set(last)) == len(last) else keys
