"""`grpo debug`: any stage again on its exact inputs, and nothing of it stays."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from flows.debug import debug
from grpo_lib.errors import ConfigError, NotFoundError
from grpo_lib.run import Run
from tests.flows.runs import Tiny, fresh_process, train

pytestmark = pytest.mark.usefixtures("prefect_here")

SETTINGS = (
    "critic={}",
    "algorithm.advantage=gae",
    "reference.every=1",
    "reference.decay=0.5",
    "algorithm.filters=[{name: dynamic_sampling}]",
    "rollout.max_gen_batches=8",
)


def test_every_stage_of_a_run_comes_out_bit_for_bit_as_it_was_committed(tiny: Tiny) -> None:
    config = tiny(*SETTINGS)
    run = Run(config)
    manifests = train(config)
    fresh_process()
    places = [(each.stage, each.iteration, each.shard) for each in manifests if each.stage != "publish"]
    assert {stage for stage, _, _ in places} >= {
        "dataset", "warm_start", "prompts", "rollout", "reward", "filter", "old_logprobs", "ref_logprobs", "values",
        "advantage", "update", "reference", "checkpoint", "evaluate",
    }  # fmt: skip
    for stage, iteration, shard in places:
        done = debug(run, iteration, stage, shard, compare=True)
        assert done.comparisons and done.notes == []
        assert [each for each in done.comparisons if not each.equal] == [], (stage, iteration, shard)
        assert done.committed is not None and done.made.digest == done.committed.digest
    assert [each.manifest_sha256 for each in run.stages.manifests()] == [each.manifest_sha256 for each in manifests]


def test_another_result_is_found_with_its_largest_difference(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("iterations=1")
    train(config)
    fresh_process()
    import tasks.reward

    class Generous:
        @staticmethod
        def make_reward(options: Any, settings: Any) -> Any:
            return lambda sample: 0.25 + sum(character.isdigit() for character in sample.response)

    monkeypatch.setattr(tasks.reward, "get_problem", lambda name: Generous)
    done = debug(Run(config), 0, "reward", 1, compare=True)
    found = {each.place: each for each in done.comparisons}
    assert not done.equal and found["rollout_id"].equal
    assert (found["value"].max_difference, found["value"].note) == (0.25, "4 of 4 differ")
    assert found["summary/mean"].max_difference == pytest.approx(0.25)
    assert found["components"].note == "4 of 4 rows have other lengths"


def test_what_comes_next_runs_too_and_has_nothing_to_compare_with(tiny: Tiny) -> None:
    config = tiny("iterations=2")
    run = Run(config)
    for each in train(config):
        if each.stage in ("update", "evaluate", "checkpoint") and (each.iteration or 0) > 0:
            shutil.rmtree((Path(config.store.uri) / each.path).parent)
    for path in Path(config.store.uri).glob("index/**/*.json"):
        path.unlink()
    fresh_process()
    done = debug(run, 1, "update")
    assert done.committed is None and done.made.summary["policy_version"] == 2
    with pytest.raises(NotFoundError, match="nothing to compare with"):
        debug(run, 1, "update", compare=True)
    with pytest.raises(NotFoundError, match=r"checkpoint of iteration 1 needs update, which run 'tiny' has not made"):
        debug(run, 1, "checkpoint")


def test_what_is_not_there_is_named_with_what_is(tiny: Tiny) -> None:
    config = tiny("iterations=1", "algorithm.kl.coef=0")
    train(config)
    run = Run(config)
    for arguments, message in {
        (0, "updates"): "can't debug 'updates': there is no such stage; the stages are dataset",
        (0, "publish"): "it logs into MLflow and makes no data",
        (9, "update"): "iteration 9: run 'tiny' has iterations 0 to 0",
        (0, "ref_logprobs"): "has no ref_logprobs of iteration 0; it has prompts, rollout, reward, old_logprobs",
        (None, "update"): "has no update before the first iteration; it has dataset, warm_start",
    }.items():
        with pytest.raises((ConfigError, NotFoundError)) as caught:
            debug(run, *arguments)
        assert message in str(caught.value)
    with pytest.raises(NotFoundError, match="shard 7: rollout of iteration 0 has shards 0 to 1"):
        debug(run, 0, "rollout", 7)


def test_the_command_ends_with_code_1_where_the_result_differs(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("iterations=1")
    train(config)
    fresh_process()
    words = ["debug", "tiny", "0", "reward", "--compare", "--json", "--store", config.store.uri]
    same = CliRunner().invoke(app, words)
    assert same.exit_code == 0 and json.loads(same.output)["equal"] is True
    import tasks.reward

    class Other:
        make_reward = staticmethod(lambda options, settings: lambda sample: 0.5)

    monkeypatch.setattr(tasks.reward, "get_problem", lambda name: Other)
    other = CliRunner().invoke(app, words)
    assert other.exit_code == 1 and json.loads(other.output)["equal"] is False
    text = CliRunner().invoke(app, [*words[:5], *words[6:]])
    assert text.exit_code == 1 and "differ" in text.output


def test_a_stage_that_a_branch_shares_is_debugged_in_its_base(tiny: Tiny) -> None:
    from flows.branches import plan_rerun

    config = tiny("iterations=2")
    train(config)
    run = plan_rerun(config.store, "tiny", 1, "update", []).branch
    with pytest.raises(ConfigError, match="reward of iteration 0 is shared with run 'tiny'; `grpo debug tiny"):
        debug(run, 0, "reward")
