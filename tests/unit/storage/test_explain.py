"""Why a key differs: each component that can, and nothing else."""

from typing import Any

import pytest

from grpo_lib.config import RunConfig
from grpo_lib.config_files import make_config
from grpo_lib.storage.explain import key_differences, setting_differences
from grpo_lib.storage.keys import StageSpec, config_slice, stage_key
from grpo_lib.storage.manifests import ArtifactRef, InputRef, Manifest

SETTINGS = {"data": {"problem": "countdown"}, "warm_start": {}}
SPEC = StageSpec(name="reward", version=3, reads=("reward", "rollout.samples"))


def ref(stage: str, digest: str) -> ArtifactRef:
    place = f"runs/demo/{stage}/{digest}/manifest.json"
    return ArtifactRef(
        stage=stage, run="demo", iteration=7, shard=0, key="b" * 64, manifest=place,
        digest=digest * 64, rows=1, tokens=2, seconds=0.1,
    )  # fmt: skip


INPUTS = [ref("prompts", "a"), ref("rollout", "b"), ref("rollout", "c")]


def committed(config: RunConfig, **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "stage": SPEC.name, "stage_version": SPEC.version, "key": stage_key(SPEC, config, INPUTS, 7, 0, {"data": "x"}),
        "digest": "d" * 64, "run": "demo", "iteration": 7, "shard": 0, "rows": 1, "tokens": 0, "parts": [],
        "inputs": [InputRef(stage=each.stage, manifest=each.manifest, digest=each.digest) for each in INPUTS],
        "config": config_slice(config, SPEC.reads), "external": {"data": "x"}, "seed": config.seed, "summary": {},
        "created_ms": 1, "seconds": 1.0, "host": "here", "code_version": "1", "packages": {}, "adopted_from": None,
    }  # fmt: skip
    return Manifest(**(values | changes)).sealed()


def why(before: Manifest, config: RunConfig, inputs: list[ArtifactRef] = INPUTS, **external: str) -> list[str]:
    return [str(each) for each in key_differences(before, SPEC, config, inputs, external or {"data": "x"})]


def changed(*overrides: str) -> RunConfig:
    return make_config(SETTINGS, overrides)


def test_an_equal_key_has_no_difference_and_an_unread_setting_makes_none() -> None:
    assert why(committed(changed()), changed("rollout.temperature=0.5", "iterations=3", "name=other")) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("reward.correct=2",), ["reward.correct: 1.0 -> 2.0"]),
        (("rollout.samples=4", "reward.max_failed=0.5"), ["reward.max_failed: 0.05 -> 0.5", "rollout.samples: 8 -> 4"]),
        (("seed=5",), ["seed: 0 -> 5"]),
    ],
)
def test_a_setting_is_named_with_both_values(overrides: tuple[str, ...], expected: list[str]) -> None:
    before, config = committed(changed()), changed(*overrides)
    assert why(before, config) == expected
    assert stage_key(SPEC, config, INPUTS, 7, 0, {"data": "x"}) != before.key


def test_a_stage_of_another_version_says_so() -> None:
    assert why(committed(changed(), stage_version=2), changed()) == ["stage version: 2 -> 3"]


def test_inputs_are_named_by_stage_and_by_their_number_where_there_are_several() -> None:
    before = committed(changed())
    other = [ref("prompts", "f"), ref("rollout", "b"), ref("rollout", "e")]
    assert why(before, changed(), other) == [
        f"input prompts: {'a' * 12} -> {'f' * 12}",
        f"input rollout.1: {'c' * 12} -> {'e' * 12}",
    ]
    assert why(before, changed(), INPUTS[:2]) == ["input rollout.1: is gone"]
    assert why(before, changed(), [*INPUTS, ref("filter", "9")]) == ["input filter: is new"]


def test_things_outside_the_store_are_named() -> None:
    before = committed(changed())
    assert why(before, changed(), data="y") == ["data: x -> y"]
    assert why(before, changed(), **{"data": "x", "plugin/mine": "1"}) == ["plugin/mine: is new"]
    assert why(before, changed(), **{"data": "x", "branch": "b"}) == ["it is the first stage of a branch"]


def test_a_manifest_of_before_externals_were_recorded_blames_nothing_on_them() -> None:
    assert why(committed(changed(), external=None), changed(), data="y") == []


def test_sections_that_come_or_go_are_named_by_what_is_in_them() -> None:
    without, with_one = {"critic": None, "x": {"a": 1}}, {"critic": {"lr": 0.1}, "x": {"a": 1, "b": 2}}
    assert sorted(map(str, setting_differences(without, with_one))) == ["critic.lr: None -> 0.1", "x.b: None -> 2"]
    assert sorted(map(str, setting_differences(with_one, without))) == ["critic.lr: 0.1 -> None", "x.b: 2 -> None"]
