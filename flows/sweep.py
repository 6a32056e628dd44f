"""Sweeps: a training run for each of several settings, side by side under one flow run, and which one is best.

A run is a process of its own (two can't share one: they would share workers and threads) and a sub-flow in Prefect.
How a run ended is written to the store, so that a sweep that is started again goes on with what is missing.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, Literal
from uuid import UUID

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.runtime import task_run
from prefect.settings import get_current_settings
from prefect.states import Cancelled, Crashed
from pydantic import BaseModel
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from flows.report import artifact_key
from flows.train import train
from grpo_lib.config import RunConfig
from grpo_lib.config_files import make_config
from grpo_lib.errors import ConfigError, RunError
from grpo_lib.parent import end_with_parent
from grpo_lib.preflight import check_surroundings
from grpo_lib.progress import progress
from grpo_lib.run import Run, differences, stored_json
from grpo_lib.storage.lease import Held, holding
from grpo_lib.storage.objects import ObjectStore
from grpo_lib.storage.paths import sweep_file, trial_file
from grpo_lib.sweeps import Curve, SweepConfig, Trial, is_hopeless, preflight_of, shown, trials
from grpo_lib.tracking.chart import charts, data_uri
from grpo_lib.tracking.compare import WINDOW, results_of
from grpo_lib.tracking.mlflow import tracker_for
from grpo_lib.tracking.pages import code, plain
from grpo_lib.tracking.reports import curve
from grpo_lib.tracking.sweeps import SweepTracker

LOOK_SECONDS = 2.0
"""Between looks at a run that works."""
STOP_SECONDS = 60.0
"""A run that is stopped has so long for its end."""
CURVES = {
    "sampled_accuracy": ("evaluate", "sampled_accuracy"),
    "greedy_accuracy": ("evaluate", "greedy_accuracy"),
    "reward": ("reward", "mean"),
}

_ended: ContextVar[threading.Event] = ContextVar("_ended")
"""Set when the sweep of this context is cancelled or interrupted: its runs are stopped."""

KNOWN = Retrying(
    retry=retry_if_exception_type(ObjectNotFound), stop=stop_after_delay(120), wait=wait_fixed(0.2), reraise=True
)
"""Until Prefect's server knows a task run: it is told of them by events, which may come late."""

Outcome = Literal["done", "stopped", "failed"]


class TrialReport(BaseModel):
    """How a run of a sweep ended."""

    run: str
    settings: dict[str, Any]
    outcome: Outcome
    iterations: int
    value: float | None
    """Of the sweep's metric: the last evaluation, or the mean reward of the last ten iterations."""
    error: float | None
    """Its standard error."""
    message: str = ""


class SweepReport(BaseModel):
    """How a sweep ended."""

    sweep: str
    metric: str
    store: str
    mlflow_uri: str
    runs: list[TrialReport]
    """The best first; stopped and failed ones last."""
    best: str | None


def flow_run_name() -> str:
    from prefect.runtime import flow_run

    return f"sweep {flow_run.get_parameters()['sweep'].name}"


@flow(name="sweep", flow_run_name=flow_run_name)
def sweep(config: RunConfig, sweep: SweepConfig) -> SweepReport:
    """Trains with each of several settings. Started again, it goes on with what is missing.

    Args:
        config: What all runs have in common.
        sweep: What they differ in, and what is best.
    """
    asked = trials(config, sweep)
    for each in preflight_of(asked):
        check_surroundings(each)
    objects = Run(asked[0].config).objects
    _open(config, sweep, asked)
    tracker = SweepTracker(config, sweep, objects.uri)
    with holding(Held(objects=objects, name=f"sweep:{sweep.name}")):
        return _made(asked, sweep, objects, tracker)


def _made(asked: list[Trial], sweep: SweepConfig, objects: ObjectStore, tracker: SweepTracker) -> SweepReport:
    """Carries it out; who calls it holds the sweep.

    Raises:
        RunError: runs failed.
    """
    tracker.begin()
    try:
        reports = _every(asked, sweep)
    except BaseException:
        tracker.end([], None, None, "FAILED")
        raise
    reports = sorted(reports, key=lambda each: (each.outcome != "done", each.value is None, -(each.value or 0.0)))
    best = next((each for each in reports if each.outcome == "done" and each.value is not None), None)
    result = SweepReport(
        sweep=sweep.name, metric=sweep.metric, store=objects.uri, mlflow_uri=tracker.uri, runs=reports,
        best=None if best is None else best.run,
    )  # fmt: skip
    failed = [each for each in reports if each.outcome == "failed"]
    rows = [_row(each, sweep.metric) for each in reports]
    tracker.end(rows, result.best, None if best is None else best.value, "FAILED" if failed else "FINISHED")
    create_table_artifact(key=artifact_key(sweep.name, "runs"), table=rows, description=f"Sweep {sweep.name}")
    page = _page(result, [Run(each.config) for each in asked])
    create_markdown_artifact(key=artifact_key(sweep.name, "sweep"), markdown=page, description=f"Sweep {sweep.name}")
    if failed:
        raise RunError(
            f"{len(failed)} of {len(reports)} runs of sweep {sweep.name!r} failed, the first, {failed[0].run}, with: "
            f"{failed[0].message}. The same command again goes on with those that failed"
        )
    return result


def _open(config: RunConfig, sweep: SweepConfig, asked: list[Trial]) -> None:
    """Writes down what was asked for.

    Raises:
        ConfigError: a sweep of that name is another one.
    """
    objects = Run(asked[0].config).objects
    runs = json.loads(json.dumps({each.name: each.settings for each in asked}))
    plan = {"runs": runs, "metric": sweep.metric, "iterations": config.iterations}
    names = list(plan)
    plan["config"] = config.model_dump(mode="json")
    path = sweep_file(sweep.name)
    if objects.create(path, json.dumps(plan, indent=1).encode()):
        return
    there = stored_json(objects, path)
    different = differences(make_config(there["config"]), config)
    different += [f"{name}: {there[name]} -> {plan[name]}" for name in names if there[name] != plan[name]]
    if different:
        raise ConfigError(
            f"sweep {sweep.name!r} exists with other settings ({'; '.join(different)[:1000]}); give this one another "
            "name"
        )


def _every(asked: list[Trial], sweep: SweepConfig) -> list[TrialReport]:
    """Runs all, so many at a time, in the order given."""
    names, done = [each.name for each in asked], 0
    ended = threading.Event()
    _ended.set(ended)
    with ThreadPoolExecutor(sweep.parallel, thread_name_prefix="trial") as pool:
        reports = []
        try:
            futures = [
                pool.submit(copy_context().run, trial.with_options(task_run_name=each.name), each, sweep, names)
                for each in asked
            ]
            for future in futures:
                reports.append(future.result())
                done += 1
                progress().stage_advanced("runs", None, done, len(asked), 0)
        except BaseException:  # cancelled or interrupted: runs that go on are stopped, and can be resumed
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return reports


@task(name="trial")
def trial(asked: Trial, sweep: SweepConfig, names: list[str]) -> TrialReport:
    """One run, unless it has ended in an earlier attempt."""
    run = Run(asked.config)
    path = trial_file(sweep.name, asked.name)
    if run.objects.exists(path):
        return TrialReport.model_validate(stored_json(run.objects, path))
    progress().note(f"{asked.name}: {shown(asked.settings)}")
    outcome, message = _train(asked, sweep, names)
    report = _report(run, asked, sweep, outcome, message)
    if outcome != "failed":
        run.objects.create(path, report.model_dump_json(indent=1).encode())
    return report


def _train(asked: Trial, sweep: SweepConfig, names: list[str]) -> tuple[Outcome, str]:
    """In a process of its own, as a sub-flow of this task's flow."""
    parent = UUID(str(task_run.get_id()))
    with get_client(sync_client=True) as client:
        for attempt in KNOWN:
            with attempt:
                client.read_task_run(parent)
        made = client.create_flow_run(
            train,
            name=f"train {asked.name}",
            parameters={"config": asked.config.model_dump(mode="json")},
            parent_task_run_id=parent,
            tags=["grpo", "sweep", sweep.name],
        )
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.trial", str(made.id)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,  # Prefect has its log
        env=os.environ | get_current_settings().to_environment_variables(exclude_unset=True),
        preexec_fn=partial(end_with_parent, signal.SIGTERM),
    )  # fmt: skip
    try:
        reason = _watch(process, asked, sweep, names)
    except BaseException:
        _stop(process)
        raise
    if reason is not None:
        _stop(process)
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(made.id, Cancelled(message=reason), force=True)
        tracker = tracker_for(Run(asked.config))
        tracker.set_tag("grpo.stopped", reason)
        tracker.finish("KILLED")
        return "stopped", reason
    if process.returncode:
        return "failed", _cause(made.id, process.returncode)
    return "done", ""


def _cause(flow_run: UUID, code: int) -> str:
    """Why a run failed. Of one whose process was killed Prefect has no end: it gets one."""
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run).state
        if state is not None and state.is_final():
            return (state.message or state.name or "").removeprefix("Flow run encountered an exception: ")
        how = f"its process was killed by signal {-code}" if code < 0 else f"its process ended with code {code}"
        client.set_flow_run_state(flow_run, Crashed(message=how), force=True)
    return how


def _watch(process: "subprocess.Popen[bytes]", asked: Trial, sweep: SweepConfig, names: list[str]) -> str | None:
    """Waits for the end of a run, or until it is hopeless: then why."""
    run = Run(asked.config)
    while True:
        try:
            process.wait(LOOK_SECONDS)
            return None
        except subprocess.TimeoutExpired:
            pass
        if _ended.get().is_set():
            raise RunError(f"the sweep was ended; {asked.name} goes on when it is started again")
        if sweep.hopeless_after is None:
            continue
        own = _curve(run, sweep)
        others = [_curve(_sibling(run, name), sweep) for name in names if name != asked.name]
        if is_hopeless(own, others, sweep.hopeless_after):
            best = max(value for _, value in own)
            return f"stopped after {own[-1][0]} iterations: its best {sweep.metric} was {best:.3f}, below the others'"


def _sibling(run: Run, name: str) -> Run:
    return Run(run.config.model_copy(update={"name": name}))


def _curve(run: Run, sweep: SweepConfig) -> Curve:
    iterations, values = curve(run.stages.manifests(), *CURVES[sweep.metric])
    add = int(sweep.metric == "reward")  # of iteration k: k + 1 are done
    return [(iteration + add, value) for iteration, value in zip(iterations, values, strict=True)]


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if process.poll() is None:
        process.kill()
        process.wait()


def _report(run: Run, asked: Trial, sweep: SweepConfig, outcome: Outcome, message: str) -> TrialReport:
    results = results_of(run)
    mode = sweep.metric.removesuffix("_accuracy")
    measured = results.reward if sweep.metric == "reward" else results.final.get(mode)
    return TrialReport(
        run=asked.name,
        settings=asked.settings,
        outcome=outcome,
        iterations=results.iterations,
        value=None if measured is None else measured.value,
        error=None if measured is None else measured.error,
        message=message,
    )


def _row(report: TrialReport, metric: str) -> dict[str, Any]:
    """Of the table: what the run has, what it reached."""
    reached = {metric: report.value, "standard error": report.error, "iterations": report.iterations}
    return {"run": report.run} | report.settings | reached | {"outcome": report.outcome, "why": report.message}


def _page(result: SweepReport, runs: list[Run]) -> str:
    """The best run, and the curves of all that there is room for."""
    by_name = {run.name: run for run in runs}
    best = [each for each in result.runs if each.value is not None][:4]
    lines = {}
    for each in best:
        iterations, values = curve(by_name[each.run].manifests(), *CURVES[result.metric])
        lines[each.run] = [(float(k), value) for k, value in zip(iterations, values, strict=True)]
    text = [f"# Sweep {plain(result.sweep)}"]
    if result.best is not None:
        first = next(each for each in result.runs if each.run == result.best)
        text.append(
            f"Best: {code(first.run)} with {first.value:.4f} ± {first.error or 0.0:.4f} {plain(result.metric)}: "
            + code(shown(first.settings))
        )
    text.append(f"![curves of the best runs]({data_uri(charts({result.metric: lines}))})")
    if result.metric == "reward":
        text.append(f"The reward is the mean of the last {WINDOW} iterations.")
    names = " ".join(each.run for each in result.runs[:8])
    text.append(f"- {code(f'grpo compare {names} --store {result.store}')}\n- MLflow: {code(result.mlflow_uri)}")
    return "\n\n".join(text)
