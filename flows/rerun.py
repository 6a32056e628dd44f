"""A stage of a run again, in a branch: the flow that a form starts, and `grpo rerun`."""

from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.branches import Rerun, plan_rerun, planned
from flows.fork import go_on_from_base
from flows.train import train
from grpo_lib.config import StoreConfig
from grpo_lib.config_branch import Fork
from grpo_lib.errors import ConfigError
from grpo_lib.mending import mended
from grpo_lib.placement.clusters import attach, stop_clusters
from grpo_lib.placement.devices import use_threads
from grpo_lib.placement.local import end_processes
from grpo_lib.preflight import check_surroundings
from grpo_lib.run import Run, open_run
from grpo_lib.storage.lease import holding
from grpo_lib.storage.stages import ArtifactRef
from tasks.plan import Call


def flow_run_name() -> str:
    from prefect.runtime import flow_run

    values = flow_run.get_parameters()
    return f"rerun {values['run']} {values['iteration']} {values['stage']}"


@flow(name="rerun-stage", flow_run_name=flow_run_name)
def rerun(
    run: str,
    iteration: Annotated[int, Field(ge=0)],
    stage: Fork,
    settings: list[str] | None = None,
    name: str | None = None,
    only_this_stage: bool = False,
    store: StoreConfig = StoreConfig(),
) -> dict[str, Any]:
    """Makes a branch of a run: everything before a stage of an iteration is shared, from there on it is made anew.

    Args:
        run: Name of the run to branch off; it is not touched.
        iteration: Iteration of the first stage that is made anew.
        stage: First stage that is made anew.
        settings: Settings that differ from there on, as key=value, e.g. algorithm.advantage=rloo.
        name: Name of the branch; left out, it is made from run, iteration, stage and settings.
        only_this_stage: Run this stage alone and compare its result; training can go on later with `grpo resume`.
        store: The store that holds the run.
    """
    asked = plan_rerun(store, run, iteration, stage, settings or [], name)
    if only_this_stage:
        return {"branch": asked.branch.name, "stages": rerun_stage(asked, changed=bool(settings))}
    report = train(asked.branch.config)
    return {"branch": asked.branch.name} | report.model_dump(mode="json")


def rerun_stage(asked: Rerun, *, changed: bool) -> list[dict[str, Any]]:
    """Runs the first stage of a branch, all its shards, and says what came out.

    What the run has not made yet is made in the run itself, if no setting is changed: that is no rerun.
    """
    point = asked.branch.config.branch
    assert point is not None
    calls = [call for call in asked.calls if call.stage == point.stage]
    run = asked.branch
    if not changed and all(call.before is None and call.damage is None for call in calls):
        run = asked.base
        calls = [call for call in planned(run, point.iteration).calls if call.stage == point.stage]
        calls = [call for call in calls if call.iteration == point.iteration and not call.uncertain]
    if not calls or any(call.uncertain for call in calls):
        raise ConfigError(
            f"{point.stage} of iteration {point.iteration} of run {asked.base.name!r} needs data that is not there "
            f"yet; `grpo resume {asked.base.name}` makes it"
        )
    try:
        made = _made(run, calls)
    except BaseException as error:
        if not isinstance(error, Exception):
            stop_clusters()
        raise
    finally:
        end_processes()
    return [
        _outcome(ref, None if call.before is None else call.before.digest)
        for ref, call in zip(made, calls, strict=True)
    ]


def _made(run: Run, calls: list[Call]) -> list[ArtifactRef]:
    config = run.config
    check_surroundings(config)
    use_threads(config.placement.threads)
    with holding(run) as lease, mended(run):
        attach(config, lease.epoch)
        open_run(config)
        go_on_from_base(run)
        return [
            call.task(run, call.iteration, *call.inputs, shard=call.shard, external=call.external) for call in calls
        ]


def _outcome(ref: ArtifactRef, before: str | None) -> dict[str, Any]:
    return {
        "run": ref.run,
        "stage": ref.stage,
        "iteration": ref.iteration,
        "shard": ref.shard,
        "seconds": ref.seconds,
        "digest": ref.digest,
        "committed_before": before,
        "same": None if before is None else ref.digest == before,
    }
