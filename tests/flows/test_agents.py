"""Runs whose rollouts have several turns: from the calls of an untrained model to the update."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from grpo_lib.config import RunConfig
from grpo_lib.config_files import make_config
from grpo_lib.data.schemas import ROLLOUT_EXTRAS
from grpo_lib.errors import ConfigError
from grpo_lib.generation.tools import TOOLS, ToolError, register_tool
from grpo_lib.problems import PROBLEMS
from grpo_lib.run import Run
from grpo_lib.storage.manifests import Manifest
from grpo_lib.tracking.metrics import is_described, metric_points
from tests.flows.runs import fresh_process, of, train
from tests.flows.tiny import TINY, EasyCountdown

pytestmark = pytest.mark.usefixtures("prefect_here")


@pytest.fixture
def calling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RunConfig]]:
    """The tiny run with a tool that an untrained model of few tokens calls now and then."""
    import tasks.reward

    def easy(name: str) -> type[EasyCountdown]:
        return EasyCountdown

    monkeypatch.setattr(tasks.reward, "get_problem", easy)
    letters = replace(PROBLEMS["countdown_calculator"], alphabet="0123456789+-*/=,;xv()abcdefghijklmnopqrstuwyz: ")
    monkeypatch.setitem(PROBLEMS, "countdown_calculator", letters)
    entries = dict(TOOLS._entries)

    @register_tool("picky", opening="-", closing="</calc>")
    def picky(text: str) -> str:
        if len(text) > 3:
            raise ToolError("too much at once")
        return str(len(text))

    settings: dict[str, Any] = TINY | {
        "store": {"uri": str(tmp_path / "store")},
        "data": {"problem": "countdown_calculator", "train_prompts": 200, "heldout_prompts": 8},
        "warm_start": {"steps": 40, "warmup_steps": 1, "batch_size": 8, "demonstrations": 64},
        "rollout": TINY["rollout"] | {"samples": 4, "max_new_tokens": 60, "agent": {"tools": ["picky"]}},
    }
    yield lambda *overrides: make_config(settings, overrides)
    TOOLS._entries.clear()
    TOOLS._entries.update(entries)


def rows(config: RunConfig, manifests: list[Manifest], stage: str, iteration: int) -> pa.Table:
    found = of(manifests, stage, iteration)
    return Run(config).stages.table([each.to_ref(reused=True) for each in sorted(found, key=lambda each: each.shard)])


def test_two_iterations_with_tools_from_call_to_update(calling: Callable[..., RunConfig]) -> None:
    config = calling()
    manifests = train(config)
    summaries = [each.summary for each in of(manifests, "rollout")]
    assert sum(float(str(each["tool_calls_mean"])) for each in summaries) > 0, "the model must call now and then"
    for iteration in (0, 1):
        rollouts = rows(config, manifests, "rollout", iteration)
        advantages = rows(config, manifests, "advantage", iteration)
        assert {*ROLLOUT_EXTRAS.names} <= {*rollouts.column_names}
        assert advantages.column("response_mask").equals(rollouts.column("response_mask"))
        lists = zip(
            *(rollouts.column(n).to_pylist() for n in ("response_mask", "rollout_logprobs", "turns")), strict=True
        )
        for mask, logprobs, turns in lists:
            assert len(mask) <= 60 and mask[0] == mask[-1] == 1
            assert all(logprob == 0 for logprob, own in zip(logprobs, mask, strict=True) if not own)
            assert "".join(map(str, mask)).count("01") == turns - 1
    for each in of(manifests, "old_logprobs"):
        assert float(str(each.summary["rollout_abs_difference_max"])) < 1e-3, "what tools said is not compared"
    for each in of(manifests, "advantage"):
        assert abs(float(str(each.summary["mismatch/k3_kl"]))) < 1e-6
    assert len(of(manifests, "update")) == 2
    names = set(metric_points(manifests).column("name").to_pylist())
    assert {"rollout/turns_mean", "rollout/observation_fraction", "rollout/failed_fraction"} <= names
    assert [name for name in names if name.startswith("rollout/") and not is_described(name)] == []


def test_failed_tools_give_null_rewards_with_the_reason_and_teach_nothing(calling: Callable[..., RunConfig]) -> None:
    config = calling("rollout.agent.on_tool_error=fail", "rollout.prompts=8", "iterations=1", "rollout.shards=1")
    manifests = train(config)
    rollouts, rewards, advantages = (rows(config, manifests, stage, 0) for stage in ("rollout", "reward", "advantage"))
    failures = rollouts.column("failure").to_pylist()
    failed = [row for row, failure in enumerate(failures) if failure is not None]
    assert failed and len(failed) < len(failures)
    for row, failure in enumerate(failures):
        assert (rewards.column("value")[row].as_py() is None) == (failure is not None)
        assert rewards.column("reason")[row].as_py() == failure
        assert any(advantages.column("response_mask")[row].as_py()) == (failure is None)
    assert {failures[row] for row in failed} == {"picky: too much at once"}
    assert {rollouts.column("finish_reason")[row].as_py() for row in failed} == {"failed"}
    (summary,) = (each.summary for each in of(manifests, "rollout"))
    assert summary["failed_fraction"] == len(failed) / len(failures)


def test_a_run_with_tools_resumes_and_another_setting_of_the_agent_makes_other_rollouts(
    calling: Callable[..., RunConfig],
) -> None:
    before = train(calling("iterations=1"))
    fresh_process()
    after = train(calling("iterations=2"))
    assert {each.key for each in of(before, "rollout")} < {each.key for each in of(after, "rollout")}
    fresh_process()
    whole = train(calling("iterations=2", "name=whole"))
    digests = [[each.digest for each in of(found, "update")] for found in (after, whole)]
    assert digests[0] == digests[1]
    other = train(calling("iterations=1", "name=other", "rollout.agent.max_turns=1"))
    assert {each.key for each in of(other, "rollout")}.isdisjoint({each.key for each in of(after, "rollout")})
    assert {each.summary["turns_mean"] for each in of(other, "rollout")} == {1.0}


def test_a_tool_that_is_not_registered_ends_the_run_before_anything_is_made(
    calling: Callable[..., RunConfig],
) -> None:
    config = calling("rollout.agent.tools=[browser]")
    with pytest.raises(ConfigError, match="there is no tool 'browser'"):
        train(config)
    assert Run(config).stages.manifests() == []
