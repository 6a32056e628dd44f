"""Branches of runs: what a rerun would do and why, and making one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flows.train import every_stage
from grpo_lib.branches import branch_config, check_point, check_structure
from grpo_lib.config import StoreConfig
from grpo_lib.errors import ConfigError, CorruptError, NotFoundError
from grpo_lib.plugins import load_plugins
from grpo_lib.preflight import data_digests
from grpo_lib.progress import Silent, progress, show_progress_on
from grpo_lib.recipe import check_algorithm
from grpo_lib.run import Run, differences, load_run
from grpo_lib.storage.paths import run_file
from grpo_lib.storage.stages import Manifest
from tasks.dataset import dataset
from tasks.plan import Call, Plan, PlanEndError, is_planned
from tasks.planner import planned_by

COPIES = ("checkpoint", "weights")
"""Stages that can be made again from others at any time."""


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """A branch that could be made, and what it would do in its first iteration."""

    base: Run
    branch: Run
    calls: list[Call]
    """Of the stages of that iteration from the fork on, as the flow makes them."""


def plan_rerun(
    store: StoreConfig,
    run: str,
    iteration: int,
    stage: str,
    overrides: list[str],
    name: str | None = None,
    *,
    anew: bool = True,
) -> Rerun:
    """Checks everything that can be checked of a branch before it is made.

    Args:
        anew: its first stage runs in any case; False: only if something differs, to find out whether it does.

    Raises:
        NotFoundError: no such run, iteration or data before the fork.
        ConfigError: a stage or setting that can't be, or a name that is taken.
    """
    base = load_run(store, run)
    check_point(base, iteration, stage)
    config = branch_config(base, iteration, stage, overrides, name)
    branch = Run(config)
    check_name(branch)
    for each in branch.lineage:
        load_plugins(each.config.algorithm.plugins)
    check_algorithm(config)
    check_structure(base, branch)
    plan = planned(branch, iteration, anew=anew)
    for call in plan.calls:
        shared = branch.shares(call.stage, call.iteration, call.shard)
        if shared and call.committed is None and call.stage not in COPIES:
            raise NotFoundError(_not_there(call, base))
    return Rerun(base=base, branch=branch, calls=[call for call in plan.calls if _is_of(call, branch, iteration)])


def planned(run: Run, iteration: int | None, *, anew: bool = True) -> Plan:
    """What the flow would call, up to the end of an iteration."""
    plan, sink = Plan(run, iteration, anew=anew), progress()
    show_progress_on(Silent())  # nothing is done
    try:
        with planned_by(plan.called):
            every_stage(run, dataset(run, None, external=data_digests(run.config)))
    except PlanEndError:
        pass
    except NotFoundError as error:
        if not is_planned(error):
            raise
    finally:
        show_progress_on(sink)
    return plan


def check_name(branch: Run) -> None:
    """A branch of that name is another one, or goes on."""
    if not branch.objects.exists(run_file(branch.name)):
        return
    different = differences(load_run(branch.config.store, branch.name).config, branch.config)
    if different:
        raise ConfigError(
            f"the name {branch.name!r} is taken by a run with other settings ({'; '.join(different)}); choose another "
            "with --name"
        )


def verdicts(rerun: Rerun) -> Iterator[dict[str, Any]]:
    """For each stage of the iteration from the fork on: whether it would run, and why."""
    for call in rerun.calls:
        damage = call.damage or damage_of(rerun.branch, call.committed or call.before)
        reasons = [str(each) for each in call.differences]
        if call.uncertain:
            reasons.append(f"made from {', '.join(call.uncertain)}, which may come out differently")
        if damage is not None:
            reasons.append(f"what is committed is damaged: {damage}")
        if call.before is None and call.damage is None:
            reasons.append("the run has none")
        yield {
            "stage": call.stage,
            "iteration": call.iteration,
            "shard": call.shard,
            "verdict": "runs" if call.committed is None or damage else "depends" if call.uncertain else "reused",
            "reasons": reasons,
            "differences": [vars(each) for each in call.differences],
            "key": call.key,
            "committed": None if call.committed is None else call.committed.path,
        }


def damage_of(run: Run, manifest: Manifest | None) -> str | None:
    """What is wrong with the stored parts of an artifact."""
    if manifest is None:
        return None
    try:
        run.stages.verify(manifest.to_ref(reused=True))
    except CorruptError as error:
        return str(error)
    return None


def _is_of(call: Call, branch: Run, iteration: int) -> bool:
    own = not branch.shares(call.stage, call.iteration, call.shard)
    return own and call.stage != "publish" and call.iteration in (iteration, iteration + (call.stage == "evaluate"))


def _not_there(call: Call, base: Run) -> str:
    place = "" if call.iteration is None else f" of iteration {call.iteration}"
    if call.damage is not None:
        return f"{call.stage}{place} of run {base.name!r} is damaged: {call.damage}; `grpo resume {base.name}`"
    if call.before is None:
        made = f"run {base.name!r} has no {call.stage}{place} yet, which comes before the fork"
        return f"{made}; `grpo resume {base.name}` goes on with it, or branch off earlier"
    why = "; ".join(str(each) for each in call.differences)
    return (
        f"{call.stage}{place} can't be shared with run {base.name!r}, because it would come out differently today: "
        f"{why}. Bring back what it was made with, or start a new run"
    )
