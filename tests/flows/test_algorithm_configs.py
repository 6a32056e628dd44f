"""Every ready configuration of an algorithm runs: three iterations of the smallest Countdown case, by the real flow."""

from pathlib import Path

import pytest

from flows.train import train
from grpo_lib.config_files import load_config
from grpo_lib.recipe import aggregation_of
from grpo_lib.run import Run
from grpo_lib.storage.manifests import Manifest
from tests.flows.tiny import use_easy_reward

pytestmark = pytest.mark.usefixtures("prefect_here")
CONFIGS = Path(__file__).parents[2] / "deployments" / "configs" / "algorithms"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "base")
SMALLEST = [
    "iterations=3",
    "data.train_prompts=100",
    "data.heldout_prompts=8",
    "model.small={hidden_size: 32, layers: 1, heads: 2, kv_heads: 2, mlp_size: 32}",
    "warm_start={steps: 3, warmup_steps: 1, batch_size: 4, demonstrations: 16}",
    "rollout.prompts=4",
    "rollout.samples=4",
    "rollout.max_new_tokens=16",
    "trainer.optimizer.warmup_steps=0",
    "trainer.mini_batch_prompts=2",  # the second optimizer step is off-policy: ratios differ from 1
    "evaluation={every: 3, prompts: 4, samples: 2}",
    "checkpoint.every=3",
]
STAGES = {
    "remax": {"greedy_rollout", "greedy_reward", "ref_logprobs", "old_logprobs"},
    "ppo": {"values", "ref_logprobs", "old_logprobs"},
    "dapo": {"filter", "old_logprobs"},
    "rloo": {"ref_logprobs", "old_logprobs"},
    "grpo": {"ref_logprobs", "old_logprobs"},
    "correction_pg_is": set(),
    "correction_pg_rs": set(),
    "correction_ppo_is_bypass": set(),
    "correction_disabled": {"old_logprobs"},
}
"""Stages beyond prompts, rollout, reward, advantage, update that a configuration has to bring; of some of them."""
COMMON = {"prompts", "rollout", "reward", "advantage", "update", "publish"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all: what they share, the warm start above all, is made once and adopted."""
    return tmp_path_factory.mktemp("algorithms")


@pytest.mark.parametrize("name", NAMES)
def test_a_ready_configuration_runs_three_iterations(name: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.reward.get_problem", use_easy_reward)
    # The second optimizer step of a policy this small leaves [0.999, 1.001]; with one, pg_rs runs as it is.
    single = ["trainer.mini_batch_prompts=null"] if name == "correction_pg_rs" else []
    settings = [*SMALLEST, *single, f"name={name}", f"store.uri={store}"]
    config = load_config(CONFIGS / f"{name}.yaml", settings)
    train(config)
    manifests = Run(config).manifests()
    for k in range(3):
        made = {each.stage for each in manifests if each.iteration == k}
        assert made >= COMMON
        if name in STAGES:
            assert made - COMMON - {"evaluate", "checkpoint"} == STAGES[name]
    updates = [each for each in manifests if each.stage == "update"]
    assert [each.summary["policy_version"] for each in updates] == [1, 2, 3]
    assert len({_text(each, "policy_digest") for each in updates}) == 3, "every update changed the policy"
    assert all(_number(each, "skipped") == 0 for each in updates)
    assert any(_number(each, "grad_norm") > 0 for each in updates)
    advantages = [each for each in manifests if each.stage == "advantage"]
    assert all(abs(_number(each, "max")) < 1000 for each in advantages)
    if name == "ppo":
        assert len({_text(each, "critic_digest") for each in updates}) == 3
        assert _number(advantages[1], "kl_coef") == _number(advantages[0], "next_kl_coef")
    if name == "dapo":
        groups = [each for each in manifests if each.stage == "filter"]
        assert all(_number(each, "prompts_kept") >= 4 for each in groups if _number(each, "full"))


def test_the_configurations_differ_in_what_they_compute() -> None:
    shapes = {}
    for name in NAMES:
        config = load_config(CONFIGS / f"{name}.yaml", SMALLEST)
        algorithm = config.algorithm.model_dump_json(exclude={"rollout_correction": {"preset"}})
        shapes[name] = (algorithm, aggregation_of(config.algorithm), config.critic is None)
    # `disabled` and no correction at all are the same by design; nothing else is.
    assert len(set(shapes.values())) == len(NAMES)


def _number(manifest: Manifest, name: str) -> float:
    return float(str(manifest.summary[name]))


def _text(manifest: Manifest, name: str) -> str:
    return str(manifest.summary[name])
