"""Another reward over the rollouts that a run has, with the change on Prefect's page: the flow that a form starts."""

from dataclasses import asdict
from typing import Annotated, Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from pydantic import Field

from flows.report import artifact_key
from grpo_lib.config import StoreConfig
from grpo_lib.config_base import RunName
from grpo_lib.errors import ConfigError
from grpo_lib.plugins import load_function
from grpo_lib.rewards.change import Change, change, histogram, reasons
from grpo_lib.rewards.judges import own_reward
from grpo_lib.rewards.rescore import parts, stored_rollouts
from grpo_lib.rewards.rescore import rescore as score_again
from grpo_lib.run import load_run
from grpo_lib.tracking.chart import charts, data_uri
from grpo_lib.tracking.pages import code, plain


def flow_run_name() -> str:
    from prefect.runtime import flow_run

    values = flow_run.get_parameters()
    return f"rescore {values['run']} {values['reward']}"


@flow(name="rescore", flow_run_name=flow_run_name)
def rescore(
    run: RunName,
    reward: str,
    first: Annotated[int, Field(ge=0)] = 0,
    last: Annotated[int, Field(ge=0)] | None = None,
    store: StoreConfig = StoreConfig(),
) -> dict[str, Any]:
    """Scores stored rollouts with another reward function. The run stays as it is, and no model is loaded.

    Args:
        run: Name of the run.
        reward: The function, as module:function or path/to/file.py:function, where the worker can read it.
        first: First iteration.
        last: Last iteration; left out, the last that there is.
        store: The store that holds the run.
    """
    if last is not None and last < first:
        raise ConfigError(f"last={last} is before first={first}")
    loaded = load_run(store, run)
    table = score_again(loaded, stored_rollouts(loaded, first, last), own_reward(load_function(reward, "reward")))
    changes = [(kind, name, change(rows)) for kind, name, rows in parts(table)]
    create_table_artifact(
        key=artifact_key(run, "rescore"), table=[_row(*each) for each in changes], description=f"{run}: {reward}"
    )
    create_markdown_artifact(
        key=artifact_key(run, "rescore-curves"),
        markdown=_page(f"{run}: {reward}", changes, reasons(table, "new")),
        description=f"{run}: {reward}",
    )
    bins = histogram(table)
    return {"run": run, "reward": reward, "all": asdict(changes[0][2]), "histogram": asdict(bins)}


def _row(kind: str, name: str, each: Change) -> dict[str, Any]:
    """Of the table: everything, a data source or an iteration."""
    return {
        "rollouts of": name if kind == "all" else f"{kind} {name}",
        "count": each.rollouts,
        "old mean": each.old.mean,
        "new mean": each.new.mean,
        "without a new value": each.new.null,
        "equal": each.equal_fraction,
        "correlation": each.correlation,
        "groups with signal": f"{each.old.groups_with_signal} → {each.new.groups_with_signal} of {each.groups}",
        "right by the old only": each.only_old_right,
        "right by the new only": each.only_new_right,
    }


def _page(title: str, changes: list[tuple[str, str, Change]], nulls: dict[str, int]) -> str:
    """Means over iterations as a picture, and why rollouts have no new value."""
    iterations = [(int(name), each) for kind, name, each in changes if kind == "iteration"]
    lines = {
        which: [(float(k), mean) for k, each in iterations if (mean := getattr(each, which).mean) is not None]
        for which in ("old", "new")
    }
    text = [f"# {plain(title)}", f"![mean reward by iteration]({data_uri(charts({'Mean reward': lines}))})"]
    if nulls:
        text.append("Without a new value:")
        text.append("\n".join(f"- {count:,} x {code(reason)}" for reason, count in nulls.items()))
    return "\n\n".join(text)
