"""Whole runs on real tasks: one that learns, and one on the real GSM8K."""

import os
from pathlib import Path

import pytest

from grpo_lib.config_files import load_config
from grpo_lib.run import Run
from grpo_lib.tracking.reports import curve

pytestmark = pytest.mark.usefixtures("prefect_here")
CONFIGS = Path(__file__).parents[2] / "deployments" / "configs"


@pytest.mark.slow
def test_a_language_model_learns_precedence_from_reward_alone(tmp_path: Path) -> None:
    """The `expressions` case, somewhat shortened: the warm start goes left to right in 70 % of its demonstrations."""
    from flows.train import train

    settings = ["iterations=60", "evaluation.prompts=256", "evaluation.every=60", f"store.uri={tmp_path}"]
    report = train(load_config(CONFIGS / "expressions.yaml", settings))
    sampled = next(each for each in report.accuracy if each.mode == "sampled")
    assert sampled.before < 0.45, "the warm start must leave something to learn"
    assert sampled.after - sampled.before > 0.35 + 3 * (sampled.before_se + sampled.after_se) / 2
    assert (tmp_path / "runs" / report.run / "curve.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.skipif("GRPO_TEST_GSM8K" not in os.environ, reason="GRPO_TEST_GSM8K names no folder with GSM8K")
def test_gsm8k_runs_end_to_end_on_the_real_data(tmp_path: Path) -> None:
    from flows.train import train

    data = Path(os.environ["GRPO_TEST_GSM8K"]) / "train.jsonl"
    config = load_config(CONFIGS / "gsm8k.yaml", [f"data.path={data}", f"store.uri={tmp_path}"])
    train(config)
    stages = Run(config).stages
    manifests = stages.manifests()
    dataset = next(each for each in manifests if each.stage == "dataset")
    assert dataset.rows == 8792, "every row parses"
    steps, _ = curve(manifests, "update", "policy_version")
    assert steps == [0, 1]
    evaluations = [each for each in manifests if each.stage == "evaluate"]
    assert [each.iteration for each in evaluations] == [0, 2]
    assert {each.rows for each in evaluations} == {128}, "64 rows, greedy and sampled"
    rewards = stages.table([each.to_ref(reused=True) for each in manifests if each.stage == "reward"])
    assert rewards.num_rows == 2 * 4 * 4 and rewards.column("value").null_count == 0
