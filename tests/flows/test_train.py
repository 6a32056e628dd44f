"""The training flow as a whole: what is reused, what is noticed, what people can read."""

import json
import shutil
import time
import urllib.request
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow.dataset
import pytest
import torch

from grpo_lib.config import RunConfig
from grpo_lib.errors import ConfigError, CorruptError, ParityError, RewardError
from grpo_lib.run import Run
from grpo_lib.storage.stages import Manifest
from grpo_lib.tracking.metrics import is_described
from tests.flows.runs import Tiny, fresh_process, of, train

pytestmark = pytest.mark.usefixtures("prefect_here")


def test_a_changed_reward_reuses_prompts_and_rollouts_of_iteration_0_and_computes_the_rest(tiny: Tiny) -> None:
    first = train(tiny("name=first"))
    second = train(tiny("name=second", "reward.correct=2", "reward.format_only=0.5"))
    for stage in ("dataset", "warm_start"):
        assert [each.adopted_from is not None for each in of(second, stage)] == [True], stage
    for stage in ("prompts", "rollout", "old_logprobs", "ref_logprobs"):
        assert all(each.adopted_from is not None for each in of(second, stage, 0)), stage
    assert not any(each.adopted_from for each in of(second, "reward") + of(second, "update"))
    assert [each.digest for each in of(first, "rollout", 0)] == [each.digest for each in of(second, "rollout", 0)]
    assert [each.digest for each in of(first, "reward", 0)] != [each.digest for each in of(second, "reward", 0)]


def test_a_changed_learning_rate_keeps_everything_up_to_the_first_update(tiny: Tiny) -> None:
    train(tiny("name=first", "iterations=1"))
    second = train(tiny("name=second", "iterations=1", "trainer.optimizer.lr=2e-3"))
    assert all(each.adopted_from for each in of(second, "advantage", 0) + of(second, "reward", 0))
    assert [each.adopted_from for each in of(second, "update")] == [None]


def test_the_same_run_again_computes_nothing(tiny: Tiny) -> None:
    first = train(tiny())
    again = train(tiny())
    assert [each.manifest_sha256 for each in first] == [each.manifest_sha256 for each in again]


def test_two_equal_runs_in_separate_stores_end_with_the_same_weights(tiny: Tiny, tmp_path: Path) -> None:
    digests = []
    for store in ("a", "b"):
        fresh_process()
        updates = of(train(tiny(f"store.uri={tmp_path / store}")), "update")
        digests.append([each.summary["policy_digest"] for each in updates])
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 2, "every update changes the weights"


def test_shards_and_micro_batches_do_not_change_what_is_sampled(tiny: Tiny) -> None:
    """One shard or four: the same prompts get the same seeds, so the same responses in iteration 0."""
    one = train(tiny("name=one", "rollout.shards=1", "iterations=1"))
    four = train(tiny("name=four", "rollout.shards=4", "iterations=1"))
    stages = Run(tiny("name=one")).stages
    texts = [
        stages.table([each.to_ref(reused=True) for each in of(run, "rollout", 0)]).column("text").to_pylist()
        for run in (one, sorted(four, key=lambda each: each.shard))
    ]
    assert texts[0] == texts[1]


def test_more_iterations_go_on_from_the_last_policy(tiny: Tiny) -> None:
    short = train(tiny("iterations=1"))
    fresh_process()
    long = train(tiny("iterations=3"))
    assert of(short, "update", 0)[0].manifest_sha256 == of(long, "update", 0)[0].manifest_sha256
    assert len(of(long, "update")) == 3


def test_a_run_of_the_same_name_with_other_settings_is_refused(tiny: Tiny) -> None:
    train(tiny("iterations=1"))
    with pytest.raises(ConfigError, match=r"tiny.*rollout.temperature: 1.0 -> 0.5.*name=tiny-2"):
        train(tiny("rollout.temperature=0.5", "iterations=1"))


def test_a_policy_between_checkpoints_is_replayed_from_committed_data(tiny: Tiny) -> None:
    config = tiny("iterations=3", "checkpoint.every=3", "evaluation.every=3")
    updates = of(train(config), "update")
    fresh_process()
    from grpo_lib.placement.local import workers

    run = Run(config)
    ref = updates[1].to_ref(reused=True)
    with workers(run, ref).trainer_at(ref) as trainer:
        assert trainer.digests() == (updates[1].summary["policy_digest"], None)
        assert trainer.trainer.optimizer_step == 2


READ_AGAIN = {
    # victim: what is taken away, so that the run has to read the victim
    "rollout": ("update", 1),  # policy 1 is replayed from iteration 0
    "advantage": ("update", 1),
    "reward": ("advantage", 0),
    "dataset": ("prompts", 1),
    "update": None,  # its manifest is looked at anyway
}


@pytest.mark.parametrize("victim", READ_AGAIN)
def test_a_flipped_byte_is_reported_with_its_path_when_read(tiny: Tiny, victim: str) -> None:
    config = tiny()
    manifests = train(config)
    damaged = of(manifests, victim)[0]
    path = damaged.path if victim == "update" else damaged.parts[0].path
    flip_a_byte(Path(config.store.uri) / path)
    if READ_AGAIN[victim] is not None:
        stage, iteration = READ_AGAIN[victim]
        lose(config, of(manifests, stage, iteration)[0])
    fresh_process()
    with pytest.raises(CorruptError) as caught:
        train(config)
    assert path in str(caught.value)


def test_a_flipped_byte_in_a_checkpoint_is_reported_when_the_run_goes_on_from_it(tiny: Tiny) -> None:
    checkpoint = of(train(tiny()), "checkpoint")[-1]
    path = next(part.path for part in checkpoint.parts if part.name == "model.safetensors")
    flip_a_byte(Path(tiny().store.uri) / path)
    fresh_process()
    with pytest.raises(CorruptError) as caught:
        train(tiny("iterations=3"))
    assert path in str(caught.value)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lose(config: RunConfig, artifact: Manifest) -> None:
    """As if the stage had never run."""
    shutil.rmtree((Path(config.store.uri) / artifact.path).parent)


def test_stale_weights_in_the_engine_close_the_parity_gate(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_lib.generation.local import LocalEngine
    from grpo_lib.placement import local

    # An engine that claims to have loaded what it was given, and kept its old weights.
    monkeypatch.setattr(LocalEngine, "load", lambda self, state: None)
    monkeypatch.setattr(local.Workers, "_check_loaded", lambda self, engine, weights, policy: None)
    fresh_process()
    with pytest.raises(ParityError, match=r"differ by .* on average .*parity.max_mean=1e-05.*engine holds weights"):
        train(tiny("parity.max_mean=1e-5", "trainer.optimizer.lr=0.05"))


def test_an_engine_that_did_not_load_is_noticed_by_its_digest(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_lib.generation.local import LocalEngine

    load = LocalEngine.load

    def forgetful(self: LocalEngine, state: dict[str, torch.Tensor]) -> None:
        load(self, {name: tensor * 1.001 for name, tensor in state.items()})

    monkeypatch.setattr(LocalEngine, "load", forgetful)
    fresh_process()
    with pytest.raises(ParityError, match="was given the weights of"):
        train(tiny())


def test_a_reward_that_fails_too_often_stops_the_run_with_the_reasons(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tasks.reward

    class Broken:
        make_reward = staticmethod(lambda options, settings: lambda sample: 1 / 0)

    monkeypatch.setattr(tasks.reward, "get_problem", lambda name: Broken)
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        train(tiny())


def test_the_run_appears_on_the_prefect_server_with_named_tasks(tiny: Tiny, prefect_here: str) -> None:
    train(tiny("name=visible", "iterations=1"))
    runs = ask(prefect_here, "task_runs/filter", {"limit": 200, "sort": "END_TIME_DESC"})
    names = {each["name"] for each in runs}
    assert {"visible/000000/rollout", "visible/000000/rollout.1", "visible/setup/warm_start"} <= names
    assert {each["state_type"] for each in runs if each["name"].startswith("visible/")} == {"COMPLETED"}


def test_the_graph_on_prefects_page_has_the_arrows_that_the_manifests_have(tiny: Tiny, prefect_here: str) -> None:
    report = train(tiny("name=arrows", "iterations=2"))
    wanted = {"limit": 200, "task_runs": {"name": {"like_": "arrows/"}}}
    deadline = time.monotonic() + 60
    names: dict[str, str] = {}
    while "arrows/000001/update" not in names.values() and time.monotonic() < deadline:  # Prefect is told by events
        time.sleep(0.5)
        runs = ask(prefect_here, "task_runs/filter", wanted)
        names = {each["id"]: each["name"] for each in runs}
    drawn = {}
    for each in runs:
        inputs = [one["id"] for several in each["task_inputs"].values() for one in several if "id" in one]
        drawn[each["name"]] = {names[one].rpartition("/")[2].partition(".")[0] for one in inputs}
    for stage in ("rollout", "reward", "advantage", "update"):
        made_from = {each.stage for each in of(report, stage, 1)[0].inputs}
        assert drawn[f"arrows/000001/{stage}"] == made_from, stage


def test_a_repeated_run_shows_as_cached_and_a_lost_dataset_is_made_again_whatever_prefect_remembers(
    tiny: Tiny, prefect_here: str
) -> None:
    config = tiny("name=cached", "iterations=1")
    first = train(config)
    train(config)
    runs = ask(prefect_here, "task_runs/filter", {"limit": 100, "sort": "END_TIME_DESC"})
    states = {each["state_name"] for each in runs if each["name"] == "cached/000000/advantage"}
    assert "Cached" in states
    lost = of(first, "advantage", 0)[0]
    lose(config, lost)
    again = of(train(config), "advantage", 0)[0]
    assert again.digest == lost.digest and again.created_ms > lost.created_ms


def ask(api: str, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    request = urllib.request.Request(
        f"{api}/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def test_a_stage_folder_opens_with_plain_pyarrow_duckdb_and_polars(tiny: Tiny) -> None:
    config = tiny("iterations=1", "rollout.shards=1")
    reward = of(train(config), "reward", 0)[0]
    folder = Run(config).stages.folder(reward.to_ref(reused=True))
    rewards = pyarrow.dataset.dataset(folder, format="ipc")
    expected = sum(rewards.to_table().column("value").to_pylist()) / rewards.count_rows()
    assert duckdb.sql("select avg(value), count(*) from rewards").fetchone() == (pytest.approx(expected), 8)
    assert polars.read_ipc(f"{folder}/*.arrow")["value"].mean() == pytest.approx(expected)


def test_every_published_metric_has_a_description(tiny: Tiny) -> None:
    config = tiny("algorithm.entropy_coef=0.01")
    names = set()
    stages = Run(config).stages
    for each in of(train(config), "publish"):
        names |= set(stages.table(each.to_ref(reused=True)).column("name").to_pylist())
    assert len(names) > 40
    assert {name for name in names if not is_described(name)} == set()


def test_one_logged_model_a_checkpoint_and_the_configuration_as_parameters(tiny: Tiny) -> None:
    from mlflow import MlflowClient

    from grpo_lib.tracking.mlflow import tracker_for

    config = tiny("iterations=4", "name=tracked")
    checkpoints = of(train(config), "checkpoint")
    tracker = tracker_for(Run(config))
    client = MlflowClient(tracking_uri=tracker.uri)
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["rollout.samples"] == "2"
    assert "evaluate/sampled_accuracy" in run.data.metrics
    models = client.search_logged_models([tracker.experiment_id])
    assert sorted(each.params["policy_version"] for each in models) == ["2", "4"]
    by_digest = {each.tags["grpo.policy_digest"] for each in models}
    assert by_digest == {each.summary["policy_digest"] for each in checkpoints}
    assert len(run.inputs.dataset_inputs) == 2, "both splits"


def test_the_whole_flow_runs_on_s3(tiny: Tiny, s3_endpoint: str, tmp_path: Path) -> None:
    import boto3

    boto3.client("s3", endpoint_url=s3_endpoint).create_bucket(Bucket="training")
    config = tiny(
        "iterations=1",
        "store.uri=s3://training/grpo",
        f"store.endpoint_url={s3_endpoint}",
        "store.region=us-east-1",
        f"tracking.uri=sqlite:///{tmp_path}/mlflow.db",
    )
    digests = [each.summary["policy_digest"] for each in of(train(config), "update")]
    fresh_process()
    local = [each.summary["policy_digest"] for each in of(train(tiny("iterations=1")), "update")]
    assert digests == local


def test_bfloat16_rollouts_pass_the_parity_gate_and_train(tiny: Tiny) -> None:
    manifests = train(tiny("model.dtype=bfloat16", "iterations=2"))
    assert len({each.summary["policy_digest"] for each in of(manifests, "update")}) == 2
    assert max(float(str(each.summary["parity_mean"])) for each in of(manifests, "rollout")) > 1e-4, "really bfloat16"


def test_an_evaluation_with_other_settings_leaves_the_report_of_the_run_alone(tiny: Tiny) -> None:
    from flows.evaluate import evaluate
    from flows.report import report

    config = tiny()
    train(config)
    before = report(Run(config)).accuracy
    other = ["evaluation.samples=4", "evaluation.pass_k=[1,4]"]
    assert "pass_at_4" in evaluate("tiny", None, other, config.store)
    assert report(Run(config)).accuracy == before


def test_a_continued_run_remembers_what_it_was_continued_with(tiny: Tiny) -> None:
    from grpo_lib.run import load_run

    train(tiny("iterations=1"))
    train(tiny("iterations=2"))
    assert load_run(tiny().store, "tiny").config.iterations == 2


def test_a_run_that_starts_from_a_checkpoint_folder_starts_with_a_fresh_optimizer(tiny: Tiny, tmp_path: Path) -> None:
    from grpo_lib.placement.local import workers

    saved = of(train(tiny()), "checkpoint")[-1]
    Run(tiny()).stages.download(saved.to_ref(reused=True), tmp_path / "model")
    settings = ("name=second", f"model.path={tmp_path / 'model'}", "warm_start=null", "checkpoint.every=9")
    fresh_process()
    second = train(tiny(*settings))
    fresh_process()
    run, first = Run(tiny(*settings)), of(second, "update", 0)[0].to_ref(reused=True)
    pool = workers(run, first)
    with pool.trainer_at(first):
        pass
    pool.forget()
    with pool.trainer_at(first) as trainer:
        assert trainer.trainer.optimizer_step == 1


def test_a_store_that_fails_once_at_a_commit_is_tried_again_and_changes_nothing(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed update has moved the trainer on: the second attempt must start from the policy before it."""
    from grpo_lib.errors import StoreUnreachableError
    from grpo_lib.storage.attempts import Attempt

    expected = [each.summary["policy_digest"] for each in of(train(tiny()), "update")]
    commit, failures = Attempt.commit, []

    def failing(self: Attempt, **kwargs: Any) -> Any:
        if self._spec.name == "update" and self._iteration == 1 and not failures:
            failures.append(1)
            raise StoreUnreachableError("the disk is full, for a moment")
        return commit(self, **kwargs)

    monkeypatch.setattr(Attempt, "commit", failing)
    fresh_process()
    again = of(train(tiny(f"store.uri={tmp_path / 'other'}")), "update")
    assert failures == [1]
    assert [each.summary["policy_digest"] for each in again] == expected
