"""Configurations of retrainings: from files, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_lib.config_files import load_retrain_config
from grpo_lib.errors import ConfigError

TRAIN: dict[str, Any] = {
    "data": {"problem": "files", "train": ["inbox"], "heldout": ["heldout.jsonl"]},
    "model": {"path": "model"},
    "reward": {"functions": [{"name": "exact_match"}]},
    "evaluation": {"prompts": 64},
}


def load(folder: Path, train: dict[str, Any], *overrides: str, **others: Any) -> Any:
    path = folder / "retrain.yaml"
    path.write_text(yaml.safe_dump({"model": "demo", "train": train, **others}))
    return load_retrain_config(path, overrides)


def test_the_training_may_extend_a_file_and_overrides_reach_into_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(TRAIN | {"iterations": 7, "algorithm": {"loss": "ppo_clip"}}))
    config = load(tmp_path, {"extends": "base.yaml", "seed": 3}, "train.rollout.prompts=8", "promotion.level=0.01")
    assert (config.train.iterations, config.train.seed, config.train.rollout.prompts) == (7, 3, 8)
    assert (config.promotion.level, config.prompts_needed) == (0.01, 8)


def test_the_ready_configuration_is_one() -> None:
    config = load_retrain_config(Path(__file__).parents[2] / "deployments" / "configs" / "retrain.yaml")
    assert (config.model, config.train.data.problem, config.train.warm_start) == ("expressions", "files", None)


CASES = {
    "made on the spot": ({"data": {"problem": "countdown"}, "warm_start": {}}, (), "set train.data.problem=files"),
    "nothing held out": (TRAIN, ("train.data.heldout=[]",), "train.data.heldout is empty"),
    "a warm start": (TRAIN, ("train.model.path=null", "train.warm_start={}"), "train.model.path is null"),
    "a name": (TRAIN, ("train.name=x",), "train.name: a retraining sets that itself"),
    "a start": (TRAIN, ("train.model.start={run: x, version: 1}",), "train.model.start: a retraining sets that itself"),
    "nothing to compare": (TRAIN, ("train.evaluation.samples=0",), "promotion.mode=sampled, but train.evaluation.sam"),
    "nothing greedy": (
        TRAIN,
        ("promotion.mode=greedy", "train.evaluation.greedy=false"),
        "promotion.mode=greedy, but train.evaluation.greedy=false",
    ),
    "a level of 1": (TRAIN, ("promotion.level=1",), "promotion.level=1: Input should be less than or equal to 0.5"),
    "a typing error": (TRAIN, ("aproval=manual",), "aproval: no such setting; did you mean approval"),
    "a long name": (TRAIN, (f"model={'x' * 81}",), "must match"),
    "an inner typing error": (TRAIN, ("train.rollout.sample=3",), "did you mean train.rollout.samples"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_can_not_work_is_refused_with_the_remedy(case: str, tmp_path: Path) -> None:
    train, overrides, message = CASES[case]
    with pytest.raises(ConfigError, match=message.replace("{", "\\{").replace("[", "\\[")):
        load(tmp_path, train, *overrides)
