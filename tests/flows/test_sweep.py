"""Sweeps: runs side by side, a hopeless one is stopped, a killed one is made again, and MLflow has them as a family."""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

import flows.sweep
from flows.sweep import sweep
from grpo_lib.config_files import make_config
from grpo_lib.errors import ConfigError, LeaseHeldError, RunError
from grpo_lib.run import run_names
from grpo_lib.storage.objects import open_store
from grpo_lib.sweeps import SweepConfig
from tests.flows.tiny import TINY

pytestmark = pytest.mark.usefixtures("prefect_here")
REWARD = """
def reward(sample):
    return sum(each.isdigit() for each in sample.response) / 10
"""


def kill_once(run: Path) -> threading.Thread:
    """Kills the process of a run of a sweep when it has done its first update."""

    def watch() -> None:
        deadline = time.monotonic() + 200
        while not list(run.glob("iterations/000000/update/*/manifest.json")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for process in psutil.Process().children(recursive=True):
            words = process.cmdline()
            if "flows.trial" in words and states(words[-1]) == f"train {run.name}":
                os.kill(process.pid, signal.SIGKILL)

    thread = threading.Thread(target=copy_context().run, args=(watch,))  # Prefect's settings are the context's
    thread.start()
    return thread


def states(flow_run: str) -> str:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run).name  # type: ignore[arg-type]


def started(name: str) -> list[str]:
    """States of the flow runs of a training run, oldest first."""
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[f"train {name}"])))
    return [each.state_name or "" for each in sorted(found, key=lambda each: each.created or 0)]  # type: ignore


def test_a_sweep_stops_the_hopeless_makes_the_killed_again_and_names_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows.sweep, "LOOK_SECONDS", 0.2)
    (tmp_path / "digits.py").write_text(REWARD)
    base = make_config(
        TINY | {"store": {"uri": str(tmp_path / "store")}},
        ["iterations=40", "reward.functions=[{path: " + str(tmp_path / "digits.py") + ", name: reward}]",
         "evaluation.every=40", "checkpoint.every=40", "tracking.system_seconds=null"],
    )  # fmt: skip
    plan = SweepConfig(
        name="lengths",
        grid={"rollout.max_new_tokens": [12, 11, 10, 9, 1]},
        metric="reward",
        parallel=2,
        hopeless_after=3,
    )
    killer = kill_once(tmp_path / "store" / "runs" / "lengths-01")
    with pytest.raises(
        RunError,
        match=r"the first, lengths-01, with: its process was killed by signal 9",
    ):
        sweep(base, plan)
    killer.join()
    objects = open_store(base.store)
    assert [info.path for info in objects.list("sweeps/lengths")] == [
        f"sweeps/lengths/{name}.json" for name in ("lengths-00", "lengths-02", "lengths-03", "lengths-04", "sweep")
    ]

    result = sweep(base, plan)
    outcomes = {each.run: each for each in result.runs}
    assert {name: each.outcome for name, each in outcomes.items()} == {
        "lengths-00": "done", "lengths-01": "done", "lengths-02": "done", "lengths-03": "done", "lengths-04": "stopped",
    }  # fmt: skip
    hopeless = outcomes["lengths-04"]
    assert 3 <= hopeless.iterations < 40 and "below the others'" in hopeless.message
    assert hopeless.value is not None and hopeless.value <= 0.1
    done = [each for each in result.runs if each.outcome == "done"]
    assert result.best == done[0].run == max(done, key=lambda each: each.value or 0.0).run
    assert started("lengths-00") == ["Completed"] and started("lengths-04") == ["Cancelled"]
    assert started("lengths-01") == ["Crashed", "Completed"]

    client = MlflowClient(result.mlflow_uri)
    experiment = client.get_experiment_by_name("grpo")
    assert experiment is not None
    runs = {each.info.run_name: each for each in client.search_runs([experiment.experiment_id])}
    parent = runs.pop("lengths")
    assert runs.keys() == set(run_names(objects)) == outcomes.keys()
    assert {each.data.tags["mlflow.parentRunId"] for each in runs.values()} == {parent.info.run_id}
    assert {name: each.data.params["rollout.max_new_tokens"] for name, each in runs.items()} == {
        "lengths-00": "12", "lengths-01": "11", "lengths-02": "10", "lengths-03": "9", "lengths-04": "1",
    }  # fmt: skip
    assert runs["lengths-04"].info.status == "KILLED" and "grpo.stopped" in runs["lengths-04"].data.tags
    assert parent.data.tags["grpo.best"] == result.best and parent.info.status == "FINISHED"
    assert parent.data.metrics["best/reward"] == done[0].value
    assert json.loads(parent.data.params["sweep.grid.rollout.max_new_tokens"]) == [12, 11, 10, 9, 1]

    with pytest.raises(ConfigError, match=r"sweep 'lengths' exists with other settings .runs: "):
        sweep(base, plan.model_copy(update={"grid": {"rollout.max_new_tokens": [12, 8]}}))
    with pytest.raises(ConfigError, match=r"exists with other settings .trainer.epochs: 1 -> 2"):
        sweep(make_config(base.model_dump(mode="json"), ["trainer.epochs=2"]), plan)
    with pytest.raises(ConfigError, match=r"exists with other settings .metric: reward -> greedy_accuracy"):
        sweep(base, plan.model_copy(update={"metric": "greedy_accuracy"}))


def trials_now() -> list[int]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "flows.trial" in process.cmdline():
                found.append(process.pid)
    return found


def test_an_interrupted_sweep_ends_its_runs_and_nobody_else_may_work_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows.sweep, "LOOK_SECONDS", 0.2)
    base = make_config(TINY | {"store": {"uri": str(tmp_path / "store")}}, ["iterations=2000"])
    plan = SweepConfig(name="long", grid={"rollout.max_new_tokens": [12, 11, 10]}, metric="reward", parallel=2)
    seen: list[object] = []

    def interrupt() -> None:
        deadline = time.monotonic() + 200
        while len(trials_now()) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        seen.append(len(trials_now()))
        try:
            sweep(base, plan)
        except BaseException as error:
            seen.append(error)
        os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=copy_context().run, args=(interrupt,))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let a background job ignore it
    try:
        other.start()
        with pytest.raises(KeyboardInterrupt):
            sweep(base, plan)
    finally:
        signal.signal(signal.SIGINT, before)
    other.join()
    assert seen[0] == 2
    assert isinstance(seen[1], LeaseHeldError) and "sweep 'long' is held" in str(seen[1]), seen[1]
    assert trials_now() == []
    assert started("long-02") == [], "it was started after the end"
    assert not list(open_store(base.store).list("sweeps/long/long-"))
