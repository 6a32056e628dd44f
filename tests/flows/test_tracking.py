"""What people see of a run in Prefect and MLflow, and that running it again doubles none of it."""

import base64
import json
import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterName,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.sorting import FlowRunSort

from flows import live
from flows.live import RunPage
from grpo_lib.config import RunConfig
from grpo_lib.run import Run
from grpo_lib.tracking.mlflow import tracker_for
from grpo_lib.tracking.registry import CHALLENGER, CHAMPION, Registry
from tasks.logs import stage_line
from tests.flows.runs import Tiny, of, train

pytestmark = pytest.mark.usefixtures("prefect_here")


def flow_runs(name: str) -> list[UUID]:
    """Of a training run, newest first."""
    with get_client(sync_client=True) as client:
        wanted = FlowRunFilter(name=FlowRunFilterName(any_=[f"train {name}"]))
        found = client.read_flow_runs(flow_run_filter=wanted, sort=FlowRunSort.START_TIME_DESC)
    return [each.id for each in found]


def artifacts(flow_run: UUID) -> dict[str, Any]:
    """By key, those that people see on the page of a flow run."""
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]))
        )
    shown = [each for each in found if each.type != "result"]
    assert len({each.key for each in shown}) == len(shown), "each is made once a flow run"
    return {each.key: each for each in shown}


def log_lines(flow_run: UUID, what: str, count: int) -> list[str]:
    """Those of a flow run's page with that text in them, when so many are there: logs are sent in the background."""
    wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run]))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found: list[str] = []
        with get_client(sync_client=True) as client:
            while page := client.read_logs(wanted, limit=200, offset=len(found)):
                found += [each.message for each in page]
        lines = [line for line in found if what in line]
        if len(lines) >= count:
            return lines
        time.sleep(0.5)
    raise AssertionError(f"{len(lines)} of {count} lines with {what!r}: {lines}")


def test_a_flow_run_s_page_shows_progress_iterations_curves_rollouts_and_links(tiny: Tiny) -> None:
    config = tiny("name=Seen", "iterations=3")
    train(config)
    (flow_run,) = flow_runs("Seen")
    shown = artifacts(flow_run)
    assert set(shown) == {f"seen-{name}" for name in ("progress", "iterations", "curves", "rollouts", "report")}
    assert float(shown["seen-progress"].data) == 100.0
    assert "Seen: 3 of 3 iterations, held-out accuracy " in shown["seen-progress"].description
    rows = json.loads(shown["seen-iterations"].data)
    assert [row["iteration"] for row in rows] == [2, 1, 0]
    assert {"reward", "entropy", "KL", "length", "tokens/s", "rollout s", "update s", "advantage s"} <= set(rows[0])
    assert rows[0]["accuracy"] is not None and rows[1]["accuracy"] is not None and rows[2]["accuracy"] is None
    assert rows[1]["update s"] == pytest.approx(of(Run(config).manifests(), "update", 1)[0].seconds, abs=1e-3)
    curves = shown["seen-curves"].data
    picture = base64.b64decode(curves.partition("base64,")[2].partition(")")[0]).decode()
    assert picture.startswith("<svg") and picture.count("<polyline") == 5 and "Mean reward" in picture
    assert f"- store: `{Run(config).place}`" in curves and "- MLflow: `mlflow ui --backend-store-uri sqlite" in curves
    rollouts = shown["seen-rollouts"].data
    assert rollouts.startswith("# Rollouts of iteration 2")
    assert [line[:9] for line in rollouts.splitlines() if line.startswith("## ")] == [
        "## best: ",
        "## median",
        "## worst:",
    ]
    assert "advantage" in rollouts and "```text\n<nums>" in rollouts


def test_the_logs_say_in_one_line_what_each_stage_did_and_what_was_reused(tiny: Tiny) -> None:
    config = tiny("name=logged", "iterations=1")
    manifests = train(config)
    train(config)
    again, first = flow_runs("logged")
    lines = log_lines(first, ": computed in ", len(manifests))
    made = of(manifests, "rollout", 0)[1]
    (told,) = (line for line in lines if line.startswith("rollout.1 of iteration 0: computed in "))
    assert f", 4 rows, {made.tokens} tokens (" in told
    every = Counter(stage_line(each.to_ref(reused=False)).partition(":")[0] for each in manifests)
    assert Counter(line.partition(":")[0] for line in lines) == every
    reused = log_lines(again, ": reused, ", len(manifests))
    assert Counter(line.partition(":")[0] for line in reused) == every


def test_running_the_flow_again_makes_a_page_of_its_own_with_the_same_content(tiny: Tiny) -> None:
    config = tiny("name=twice")
    train(config)
    train(config)
    again, first = (artifacts(each) for each in flow_runs("twice"))
    assert set(again) == set(first)
    assert json.loads(again["twice-iterations"].data) == json.loads(first["twice-iterations"].data)
    assert again["twice-rollouts"].data == first["twice-rollouts"].data
    assert again["twice-progress"].data == first["twice-progress"].data


def test_a_page_that_can_not_be_written_is_said_once_and_costs_no_run(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def away(*args: object, **kwargs: object) -> None:
        tried.append(1)
        raise ConnectionError("Prefect is away")

    for name in ("create_progress_artifact", "create_markdown_artifact", "create_table_artifact"):
        monkeypatch.setattr(live, name, away)
    monkeypatch.setattr(live, "SHARE", 0)
    config = tiny("name=unseen", "tracking.page_seconds=1", "iterations=20", "evaluation.every=20")
    with caplog.at_level(logging.WARNING):
        assert len(of(train(config), "update")) == 20
    told = [each.getMessage() for each in caplog.records if "page can't be brought up to date" in each.getMessage()]
    assert len(told) == 1 and told[0].endswith("the run goes on: Prefect is away")
    assert len(tried) >= 2


def test_while_a_run_goes_on_its_page_is_written_no_more_often_than_asked(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = []
    update = RunPage.update
    monkeypatch.setattr(RunPage, "update", lambda self: (updates.append(1), update(self)))
    train(tiny("name=seldom", "tracking.page_seconds=3600", "iterations=3"))
    assert len(updates) == 2, "at the beginning and at the end"


def everything_in_mlflow(config: RunConfig) -> dict[str, Any]:
    """What MLflow holds of a run, but for what its machine did meanwhile, and the link to the last flow run."""
    tracker = tracker_for(Run(config))
    client = MlflowClient(tracking_uri=tracker.uri, registry_uri=tracker.uri)
    run = client.get_run(tracker.run_id)
    names = [name for name in run.data.metrics if not name.startswith("system/")]
    models = sorted(client.search_logged_models([tracker.experiment_id]), key=lambda each: each.name)
    return {
        "runs": len(client.search_runs([tracker.experiment_id])),
        "params": run.data.params,
        "tags": {name: text for name, text in run.data.tags.items() if not name.startswith("grpo.prefect")},
        "points": {
            name: [(each.step, each.timestamp, each.value) for each in client.get_metric_history(tracker.run_id, name)]
            for name in names
        },
        "inputs": sorted(
            (each.dataset.name, each.dataset.digest, each.dataset.source, each.dataset.profile, each.tags[0].value)
            for each in run.inputs.dataset_inputs
        ),
        "models": [
            (each.name, each.status.name, each.tags["grpo.checkpoint"], sorted((m.key, m.value) for m in each.metrics))
            for each in models
        ],
        "outputs": sorted(each.step for each in run.outputs.model_outputs),
        "files": sorted(
            each.path
            for folder in ("", "evaluation", "curves")
            for each in client.list_artifacts(tracker.run_id, folder)
        ),
        "tables": {
            table["path"]: json.loads(Path(client.download_artifacts(tracker.run_id, table["path"])).read_text())
            for table in json.loads(run.data.tags["mlflow.loggedArtifacts"])
        },
        "versions": sorted(
            (each.name, int(each.version), each.source, each.tags["grpo.checkpoint"])
            for each in client.search_model_versions()
        ),
    }


NOBODY = "params.`rollout.samples` = '3'"


def searched(config: RunConfig, query: str) -> list[Any]:
    tracker = tracker_for(Run(config))
    return MlflowClient(tracking_uri=tracker.uri).search_runs([tracker.experiment_id], query)


def test_mlflow_holds_all_of_a_run_once_however_often_it_runs(tiny: Tiny) -> None:
    config = tiny("name=kept", "iterations=4", "tracking.registered_model=digits")
    manifests, run = train(config), Run(config)
    found = everything_in_mlflow(config)
    assert found["runs"] == 1
    assert found["params"]["rollout.samples"] == "2" and found["params"]["trainer.optimizer.lr"] == "0.001"
    assert found["runs"] == len(searched(config, "params.`rollout.samples` = '2'")) > len(searched(config, NOBODY))
    assert not [name for name, points in found["points"].items() if len(set(points)) != len(points)]
    steps = [step for step, _, _ in found["points"]["seconds/rollout"]]
    assert sorted(steps) == [0, 1, 2, 3]
    seconds = sum(each.seconds for each in of(manifests, "rollout", 2))
    assert [value for step, _, value in found["points"]["seconds/rollout"] if step == 2] == [pytest.approx(seconds)]

    (data,) = of(manifests, "dataset")
    folder = run.stages.folder(data.to_ref(reused=True))
    source, digest = json.dumps({"uri": folder}), data.digest[:36]
    assert found["inputs"] == [
        ("countdown/heldout", digest, source, json.dumps({"num_rows": 8}), "evaluation"),
        ("countdown/train", digest, source, json.dumps({"num_rows": 200}), "training"),
    ]

    checkpoints = {each.summary["policy_version"]: each for each in of(manifests, "checkpoint")}
    places = {version: run.stages.folder(each.to_ref(reused=True)) for version, each in checkpoints.items()}
    assert [(name, status, place) for name, status, place, _ in found["models"]] == [
        (f"kept-v{version}", "READY", places[version]) for version in (2, 4)
    ]
    (judged,) = of(manifests, "evaluate", 4)
    numbers = {f"evaluate/{name}": value for name, value in judged.summary.items()}
    assert dict(found["models"][1][3]) == pytest.approx(numbers)
    assert found["outputs"] == [2, 4]
    assert [version for _, version, _, _ in found["versions"]] == [1, 2]
    assert {(source, place) for _, _, source, place in found["versions"]} == {(each, each) for each in places.values()}

    assert found["files"] == [
        "config.yaml", "curves", "curves/curve.png", "evaluation", "evaluation/000000.json", "evaluation/000002.json",
        "evaluation/000004.json",
    ]  # fmt: skip
    table = found["tables"]["evaluation/000004.json"]
    assert table["columns"] == ["prompt", "response", "reference", "reward", "correct", "ended by"]
    assert len(table["data"]) == 8, "4 prompts, 2 samples each"
    note = found["tags"]["mlflow.note.content"]
    for command in (
        "grpo resume kept --store ",
        "grpo rerun kept -k 0 --from reward",
        "grpo run config.yaml store.uri=",
    ):
        assert command in note

    train(config)
    assert everything_in_mlflow(config) == found


def test_the_configuration_in_mlflow_makes_the_same_run_again(tiny: Tiny, tmp_path: Path) -> None:
    from grpo_lib.config_files import load_config

    config = tiny("iterations=1")
    train(config)
    tracker = tracker_for(Run(config))
    client = MlflowClient(tracking_uri=tracker.uri)
    file = Path(client.download_artifacts(tracker.run_id, "config.yaml", str(tmp_path)))
    again = load_config(file, [f"store.uri={tmp_path / 'other'}"])
    assert again.model_dump(exclude={"store"}) == config.model_dump(exclude={"store"})
    assert yaml.safe_load(file.read_text())["name"] == "tiny"


def test_an_alias_moves_from_version_to_version_and_back(tiny: Tiny) -> None:
    config = tiny("iterations=4", "tracking.registered_model=digits")
    checkpoints = of(train(config), "checkpoint")
    registry = Registry(config)
    places = [Run(config).stages.folder(each.to_ref(reused=True)) for each in checkpoints]
    assert registry.at("digits", CHAMPION) is None and registry.at("nobody", CHAMPION) is None
    versions = registry.versions("digits")
    assert list(versions) == ["2", "1"] and {each.place for each in versions.values()} == set(places)
    one, two = versions["1"], versions["2"]
    digests = {each.summary["policy_version"]: each.summary["policy_digest"] for each in checkpoints}
    assert all(each.policy_digest == digests[each.policy_version] for each in (one, two))
    registry.set_alias("digits", CHAMPION, "1")
    registry.set_alias("digits", CHALLENGER, "2")
    assert (registry.at("digits", CHAMPION), registry.at("digits", CHALLENGER)) == (one, two)
    assert registry.register("digits", one) == "1", "it is there"
    registry.set_alias("digits", CHAMPION, "2")
    registry.remove_alias("digits", CHALLENGER)
    assert (registry.at("digits", CHAMPION), registry.at("digits", CHALLENGER)) == (two, None)
    registry.set_alias("digits", CHAMPION, "1")
    assert registry.at("digits", CHAMPION) == one


def test_what_the_machine_does_is_in_mlflow_and_goes_on_counting(tiny: Tiny) -> None:
    config = tiny("tracking.system_seconds=1", "iterations=30", "evaluation.every=30", "checkpoint.every=30")
    train(config)
    tracker = tracker_for(Run(config))
    client = MlflowClient(tracking_uri=tracker.uri)
    points = client.get_metric_history(tracker.run_id, "system/cpu_utilization_percentage")
    assert [each.step for each in points] == list(range(len(points))) and points
    assert "system/system_memory_usage_megabytes" in client.get_run(tracker.run_id).data.metrics


def test_without_a_number_of_seconds_no_system_metric_is_logged(tiny: Tiny) -> None:
    config = tiny("tracking.system_seconds=null", "iterations=1")
    train(config)
    tracker = tracker_for(Run(config))
    names = MlflowClient(tracking_uri=tracker.uri).get_run(tracker.run_id).data.metrics
    assert [name for name in names if name.startswith("system/")] == []
