"""Reward functions of the user's own through whole runs: what they do wrong is counted, and costs nothing else."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from grpo_lib.config import RunConfig
from grpo_lib.errors import RewardError
from grpo_lib.problems import get_problem
from grpo_lib.run import Run
from tests.flows.runs import Tiny, fresh_process, of, train

pytestmark = pytest.mark.usefixtures("prefect_here")

HOSTILE = """
import os
import sys


def reward(sample):
    if not sample.rollout_id:  # of an evaluation
        return 0.0
    _, prompt, number = map(int, sample.rollout_id.split("-"))
    row = 2 * prompt + number
    if row == 0:
        while True:
            pass
    if row == 1:
        return float(len(bytearray(10 * 2**30)))
    if row == 2:
        os._exit(0)
    if row == 3:
        for _ in range(1024):
            sys.stdout.write("x" * 2**20)
    if row == 4:
        return "1.0"
    if row == 5:
        return float("nan")
    if row > 5 and row % 3 == 0:
        raise ValueError("every third")
    return float(row)
"""
REASONS = {
    0: "took longer than reward.timeout_seconds=20",
    1: "MemoryError",
    2: "ended",
    4: "str",
    5: "nan",
    6: "ValueError: every third",
    9: "ValueError: every third",
    12: "ValueError: every third",
    15: "ValueError: every third",
}
FEW = {
    "name": "reward",
    "rollout": "{prompts: 8, samples: 2, shards: 2, max_prompt_tokens: 24, max_new_tokens: 12}",
}


def functions(file: Path, *more: str) -> str:
    return f"reward.functions=[{', '.join([f'{{path: {file}, name: reward}}', *more])}]"


def rewards_of(config: RunConfig, k: int) -> pa.Table:
    run = Run(config)
    manifests = sorted(of(run.stages.manifests(k), "reward"), key=lambda each: each.shard)
    return run.stages.table([each.to_ref(reused=True) for each in manifests])


def test_a_hostile_file_costs_the_samples_it_harms_and_nothing_else(tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "hostile_reward.py"
    file.write_text(HOSTILE)
    config = tiny(
        functions(file), f"rollout={FEW['rollout']}", "reward.timeout_seconds=20", "reward.max_failed=0.9",
        "evaluation.prompts=2", "iterations=2",
    )  # fmt: skip
    manifests = train(config)
    for k in range(2):
        table = rewards_of(config, k)
        reasons = dict(enumerate(table.column("reason").to_pylist()))
        assert {row for row, reason in reasons.items() if reason is not None} == set(REASONS)
        for row, said in REASONS.items():
            assert said in reasons[row], (row, reasons[row])
        wanted = [None if row in REASONS else float(row) for row in range(16)]
        assert table.column("value").to_pylist() == wanted
        (advantages,) = of(manifests, "advantage", k)
        assert advantages.summary["rows_without_reward"] == 9
        rows = Run(config).stages.table(advantages.to_ref(reused=True)).column("advantages").to_pylist()
        assert not any(any(rows[row]) for row in REASONS), "they are in no loss"
        (update,) = of(manifests, "update", k)
        assert update.summary["trained_rows"] == 7
        assert all(math.isfinite(value) for value in update.summary.values() if isinstance(value, float))
        failed = [float(str(each.summary["failed_fraction"])) for each in of(manifests, "reward", k)]
        assert np.mean(failed) == 9 / 16


def test_too_many_nulls_stop_the_run_and_a_mended_file_goes_on_with_what_was_generated(
    tiny: Tiny, tmp_path: Path
) -> None:
    file = tmp_path / "mended_reward.py"
    file.write_text("def reward(sample):\n    return float(len(sample.response)) if not sample.rollout_id else 1 / 0\n")
    config = tiny(functions(file), "iterations=1")
    with pytest.raises(RewardError) as error:
        train(config)
    message = str(error.value)
    assert "1 of 4 rewards failed (25.0%) and 3 were not judged any more, reward.max_failed=0.05 allows 5.0%" in message
    assert "1 x ZeroDivisionError: division by zero (first: sample 0, " in message
    before = of(Run(config).stages.manifests(), "rollout")
    assert before, "what was generated is committed"

    fresh_process()
    file.write_text("def reward(sample):\n    return float(len(sample.response))\n")
    manifests = train(config)
    after = {each.path for each in of(manifests, "rollout")}
    assert {each.path for each in before} <= after, "and is not generated again"
    assert all(each.summary["failed_fraction"] == 0 for each in of(manifests, "reward"))


FAILS_AT_FIRST = """
from pathlib import Path

LOG, MENDED = Path({log!r}), Path({mended!r})


def reward(sample):
    if sample.rollout_id.count("-") != 2:  # of an evaluation
        return 0.0
    if not MENDED.exists() and LOG.exists() and len(LOG.read_text().split()) >= 3:
        raise ValueError("no credit")
    with LOG.open("a") as file:
        print(sample.rollout_id, file=file)
    return float(len(sample.response))
"""


def test_what_was_judged_before_too_many_failed_is_not_judged_again(tiny: Tiny, tmp_path: Path) -> None:
    file, log, mended = tmp_path / "paid_reward.py", tmp_path / "log", tmp_path / "mended"
    file.write_text(FAILS_AT_FIRST.format(log=str(log), mended=str(mended)))
    config = tiny(functions(file), "rollout.shards=1", "iterations=1")
    with pytest.raises(RewardError, match="1 x ValueError: no credit"):
        train(config)
    paid = log.read_text().split()
    assert len(paid) == 3
    (kept,) = Run(config).stages.kept("reward", 0)
    assert kept.num_rows > 3
    fresh_process()
    mended.touch()
    train(config)
    judged = log.read_text().split()
    assert len(judged) == len(set(judged)) == kept.num_rows
    assert judged[:3] == paid


STEPS = """
from grpo_lib.types import RewardResult


def reward(sample):
    half = max(1, len(sample.response) // 2)
    steps = [(half, 1.0 if "1" in sample.response else 0.25), (len(sample.response), float(len(sample.response)))]
    return RewardResult(value=0.0, step_scores=steps if len(sample.response) > 1 else None)
"""


def test_scores_of_steps_reach_the_tokens_that_end_them_and_train(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.reward.get_problem", get_problem)
    file = tmp_path / "step_reward.py"
    file.write_text(STEPS)
    config = tiny(functions(file), "algorithm.advantage=grpo_process", "iterations=1")
    manifests = train(config)
    run = Run(config)
    rollouts = run.stages.table([each.to_ref(reused=True) for each in of(manifests, "rollout", 0)])
    rewards = rewards_of(config, 0)
    rows = zip(rollouts.column("text").to_pylist(), rewards.column("token_scores").to_pylist(), strict=True)
    scored = [(text, [score for score in scores if not math.isnan(score)]) for text, scores in rows]
    assert any(len(text) > 1 for text, _ in scored)
    for text, scores in scored:
        expected = [1.0 if "1" in text else 0.25, float(len(text))] if len(text) > 1 else []
        assert scores == expected or scores == [sum(expected)], "a token of several characters may end both steps"
    (update,) = of(manifests, "update", 0)
    assert float(str(update.summary["trained_rows"])) > 0


def test_a_second_function_and_another_weight_pay_only_for_what_is_new(tiny: Tiny, tmp_path: Path) -> None:
    file, calls = tmp_path / "counted_reward.py", tmp_path / "calls"
    calls.write_text("")
    file.write_text(
        f"def reward(sample):\n    open({str(calls)!r}, 'a').write('x')\n    return float(len(sample.response))\n"
    )
    train(tiny(functions(file), "iterations=1"))
    once = len(calls.read_text())
    assert once > 8
    fresh_process()
    format_too = "{name: length, weight: 0.5, kwargs: {target: 4}}"
    config = tiny(functions(file, format_too), "iterations=1", "name=tiny")
    from grpo_lib.config_branch import BranchConfig

    branch = config.model_copy(
        update={"name": "second", "branch": BranchConfig(run="tiny", iteration=0, stage="reward")}
    )
    train(branch)
    table = rewards_of(branch, 0)
    components = [dict(each) for each in table.column("components").to_pylist()]
    assert all({"reward", "length"} <= set(each) for each in components)
    values = table.column("value").to_pylist()
    assert values == pytest.approx([each["reward"] + 0.5 * each["length"] for each in components])
    evaluated = len(calls.read_text()) - once
    assert evaluated <= 12 + 6, (
        "the eight rollouts were not judged again, only the new policy's evaluation and the trial"
    )
