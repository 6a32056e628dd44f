"""A key changes with what a stage's result depends on, and with nothing else; a stage reads nothing else."""

from typing import Any

import pytest

from grpo_lib.config import RunConfig
from grpo_lib.config_files import make_config
from grpo_lib.storage.stages import ArtifactRef, ConfigView, StageSpec, config_slice, stage_key

SETTINGS = {
    "data": {"problem": "countdown"},
    "warm_start": {},
    "trainer": {"optimizer": {"schedule": "linear"}},
}
SPEC = StageSpec(name="reward", version=1, reads=("reward", "rollout.samples", "decay_steps", "algorithm.kl"))


def ref(digest: str, **values: Any) -> ArtifactRef:
    fixed: dict[str, Any] = {"stage": "rollout", "run": "demo", "iteration": 7, "shard": 0, "rows": 1, "tokens": 2}
    place = "runs/demo/iterations/000007/rollout/k/manifest.json"
    return ArtifactRef(**{**fixed, "key": "b" * 64, "manifest": place, "seconds": 0.1, "digest": digest * 64, **values})


def changed(*overrides: str) -> RunConfig:
    return make_config(SETTINGS, overrides)


def test_a_key_is_a_sha256_and_always_the_same(config: RunConfig) -> None:
    key = stage_key(SPEC, config, [ref("a")], 7)
    assert len(key) == 64 and set(key) <= set("0123456789abcdef")
    assert key == stage_key(SPEC, changed(), [ref("a")], 7)


@pytest.mark.parametrize(
    "override",
    [
        "reward.correct=2",
        "reward.max_failed=0.5",
        "rollout.samples=4",
        "algorithm.kl.coef=0.1",
        "seed=1",
        "iterations=9",
    ],
)
def test_a_key_changes_with_every_declared_setting_and_the_seed(config: RunConfig, override: str) -> None:
    assert stage_key(SPEC, changed(override), [], 7) != stage_key(SPEC, config, [], 7)


def test_iterations_change_no_key_where_the_learning_rate_does_not_depend_on_them() -> None:
    constant = "trainer.optimizer.schedule=constant"
    assert stage_key(SPEC, changed(constant, "iterations=9"), [], 7) == stage_key(SPEC, changed(constant), [], 7)


@pytest.mark.parametrize(
    "override", ["rollout.temperature=0.5", "algorithm.loss_options={clip_low: 0.1}", "name=other", "store.uri=x"]
)
def test_a_key_does_not_change_with_what_is_not_declared(config: RunConfig, override: str) -> None:
    assert stage_key(SPEC, changed(override), [], 7) == stage_key(SPEC, config, [], 7)


def test_a_key_changes_with_version_name_iteration_shard_and_inputs(config: RunConfig) -> None:
    newer = StageSpec(name="reward", version=2, reads=SPEC.reads)
    other = StageSpec(name="advantage", version=1, reads=SPEC.reads)
    keys = [
        stage_key(SPEC, config, [], 7),
        stage_key(newer, config, [], 7),
        stage_key(other, config, [], 7),
        stage_key(SPEC, config, [], 8),
        stage_key(SPEC, config, [], None),
        stage_key(SPEC, config, [], 7, shard=1),
        stage_key(SPEC, config, [ref("a")], 7),
        stage_key(SPEC, config, [ref("a"), ref("c")], 7),
        stage_key(SPEC, config, [ref("c"), ref("a")], 7),
    ]
    assert len(set(keys)) == len(keys)


def test_of_an_input_only_its_content_counts(config: RunConfig) -> None:
    elsewhere = ref("a", run="other", manifest="runs/other/manifest.json", seconds=9.0, reused=True)
    assert stage_key(SPEC, config, [elsewhere], 7) == stage_key(SPEC, config, [ref("a")], 7)


def test_the_slice_holds_the_declared_values_and_nothing_else(config: RunConfig) -> None:
    assert config_slice(config, SPEC.reads) == {
        "reward": {
            "correct": 1.0,
            "format_only": 0.1,
            "functions": [],
            "timeout_seconds": 10.0,
            "max_failed": 0.05,
            "runner": {"processes": 1, "concurrency": 64, "rate": None, "memory_gib": 4.0, "cache": True},
        },
        "rollout.samples": 8,
        "decay_steps": 120,
        "algorithm.kl": {
            "estimator": "k3",
            "coef": 0.0,
            "place": "loss",
            "controller": "fixed",
            "target": 0.1,
            "horizon": 10_000.0,
            "importance": False,
        },
    }


def test_a_setting_in_a_section_that_is_null_is_null() -> None:
    config = make_config({"data": {"problem": "countdown"}, "model": {"path": "Qwen"}})
    assert config_slice(config, ["warm_start.steps"]) == {"warm_start.steps": None}
    assert ConfigView(config, StageSpec(name="s", version=1, reads=("warm_start.steps",))).warm_start is None


@pytest.mark.parametrize("path", ["rewards", "reward.wrong", "seed.more", "reward.model_dump", "data.path"])
def test_a_path_that_does_not_exist_is_a_bug(config: RunConfig, path: str) -> None:
    with pytest.raises(AssertionError, match=path):
        config_slice(config, [path])


def test_a_view_reads_what_is_declared_like_the_configuration(config: RunConfig) -> None:
    view = ConfigView(config, SPEC)
    assert view.reward is config.reward
    assert view.reward.correct == 1.0
    assert view.rollout.samples == 8
    assert view.algorithm.kl.estimator == "k3"
    assert view.decay_steps == 120


def test_a_view_refuses_what_is_not_declared_and_names_stage_and_path(config: RunConfig) -> None:
    view = ConfigView(config, SPEC)
    with pytest.raises(AttributeError, match=r"'reward' reads 'rollout\.temperature'"):
        _ = view.rollout.temperature
    with pytest.raises(AttributeError, match="'reward' reads 'seed'"):
        _ = view.seed
    with pytest.raises(AttributeError, match=r"'algorithm\.loss_options'"):
        _ = view.algorithm.loss_options
    with pytest.raises(AttributeError, match="'model_dump'"):
        view.model_dump()


def test_a_view_is_read_only(config: RunConfig) -> None:
    with pytest.raises(AttributeError, match="never changes"):
        ConfigView(config, SPEC).reward = None
    assert repr(ConfigView(config, SPEC).rollout).startswith("ConfigView('reward', 'rollout.'")


def test_a_key_changes_with_what_lies_outside_the_store(config: RunConfig) -> None:
    keys = {stage_key(SPEC, config, [], None, 0, external) for external in (None, {"data": "a"}, {"data": "b"})}
    assert len(keys) == 3
