"""Reward functions tried before anything expensive: on samples like those of the run, of every source."""

from pathlib import Path

import pyarrow as pa
import pytest

from grpo_lib.config_reward import RewardConfig
from grpo_lib.errors import ConfigError
from grpo_lib.rewards.judges import Reward, make_judges
from grpo_lib.rewards.trial import trial_samples, try_reward

FILE = """
from grpo_lib.types import RewardResult

def level(sample):
    return float(sample.metadata["level"])

def every_token(sample):
    return RewardResult(value=0.0, token_scores=[1.0] * len(sample.response_ids))

def broken_for_math(sample):
    return 1.0 if sample.data_source == "qa" else 1 / 0
"""
PROMPTS = pa.table(
    {
        "prompt_id": [f"p{row}" for row in range(6)],
        "prompt": ["a", "b", "c", "d", "e", "f"],
        "reference": ["one two", "x", "y", "z", "4", "5"],
        "data_source": ["qa"] * 4 + ["math"] * 2,
        "demonstration": ["1 2 3", None, None, None, None, None],
        "metadata": ['{"level": 3}'] * 6,
    }
)


def reward(tmp_path: Path, *functions: dict[str, object]) -> Reward:
    file = tmp_path / "tried_rewards.py"
    file.write_text(FILE)
    settings = RewardConfig.model_validate({"functions": [{"path": str(file)} | each for each in functions]})
    return Reward(judges=make_judges(settings.functions, []), settings=settings)


def test_samples_are_of_every_source_with_metadata_and_tokens() -> None:
    samples = trial_samples(PROMPTS)
    assert [each.prompt_id for each in samples] == ["p0", "p1", "p2", "p4", "p5"]
    assert samples[0].response == "1 2 3" and samples[1].response == "x", "a right answer, where the data set has one"
    assert [len(each.response_ids) for each in samples] == [each.response_tokens for each in samples] == [3, 1, 1, 1, 1]
    assert samples[0].metadata == {"level": 3}


@pytest.mark.parametrize("name", ["level", "every_token"])
def test_functions_that_read_metadata_or_tokens_pass(tmp_path: Path, name: str) -> None:
    try_reward(reward(tmp_path, {"name": name}), trial_samples(PROMPTS))


def test_a_function_that_fails_on_one_source_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'broken_for_math' .* on 2 real samples .*ZeroDivisionError") as error:
        try_reward(reward(tmp_path, {"name": "broken_for_math"}), trial_samples(PROMPTS))
    assert "prompt p4" in str(error.value)


def test_sources_without_a_function_and_functions_without_a_source_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no function of reward\.functions judges data_source 'math'"):
        try_reward(reward(tmp_path, {"name": "level", "data_sources": ["qa"]}), trial_samples(PROMPTS))
    with pytest.raises(ConfigError, match=r"functions\[0\].data_sources: no prompt .* 'maths'.*mean math"):
        try_reward(reward(tmp_path, {"name": "level", "data_sources": ["maths"]}), trial_samples(PROMPTS))
