"""The smallest run that has every stage, with a reward that an untrained model earns now and then."""

from typing import Any

from grpo_lib.config_data import CountdownData
from grpo_lib.config_reward import RewardConfig
from grpo_lib.types import RewardFunction, RewardResult, Sample

TINY: dict[str, Any] = {
    "name": "tiny",
    "iterations": 2,
    "data": {"problem": "countdown", "train_prompts": 200, "heldout_prompts": 8},
    "model": {"small": {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "mlp_size": 32}},
    "warm_start": {"steps": 3, "warmup_steps": 1, "batch_size": 4, "demonstrations": 16},
    "rollout": {"prompts": 4, "samples": 2, "shards": 2, "max_prompt_tokens": 24, "max_new_tokens": 12},
    "algorithm": {"kl": {"coef": 0.01}},
    "trainer": {"optimizer": {"lr": 1e-3}},
    "evaluation": {"every": 2, "prompts": 4, "samples": 2},
    "checkpoint": {"every": 2},
    "placement": {"threads": 1},
}


class EasyCountdown:
    """Countdown's settings with a reward for digits: an untrained model gets some, and not the same in a group."""

    @staticmethod
    def make_reward(options: CountdownData, settings: RewardConfig) -> RewardFunction:
        def reward(sample: Sample) -> RewardResult:
            digits = sum(character.isdigit() for character in sample.response)
            return RewardResult(
                value=settings.correct * digits, components={"correct": float(digits > 4), "format": float(digits > 0)}
            )

        return reward


def use_easy_reward(name: str) -> type[EasyCountdown]:
    """Takes the place of ``get_problem`` in the reward stage."""
    assert name == "countdown"
    return EasyCountdown
