"""What is trained: the same model, prompts, reward, batch and settings for everybody."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib.config import SmallModelConfig

SAMPLES = 8
"""Responses of a prompt: a group."""
BATCH = 128
"""Responses of an update."""
SEED = 17
"""Of the puzzles and of the warm start; seeds of the trainings are given."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how much it generates in an iteration."""

    name: str
    """Of the model, and how many responses."""
    shape: SmallModelConfig
    responses: int
    """Of an iteration."""
    new_tokens: int
    iterations: int
    warm_steps: int
    lr: float
    skipped: int = 2
    """First iterations, in which engines start: they train, and don't count in seconds."""

    @property
    def model(self) -> str:
        """Cases of one model begin with the same weights."""
        return self.name.split("-")[0]

    @property
    def updates(self) -> int:
        """Of an iteration."""
        return self.responses // BATCH

    def settings(self, model: Path | None) -> list[str]:
        """Ours, over the demo's; from a model folder, or, with None, for its warm start."""
        sizes = [f"model.small.{key}={value}" for key, value in self.shape.model_dump().items()]
        start = (
            [*sizes, f"warm_start.steps={self.warm_steps}"]
            if model is None
            else [f"model.path={model}", "warm_start=null"]
        )
        return [
            *start,
            f"rollout.prompts={self.responses // SAMPLES}",
            f"rollout.samples={SAMPLES}",
            f"rollout.max_new_tokens={self.new_tokens}",
            f"trainer.mini_batch_prompts={BATCH // SAMPLES}",
            f"trainer.optimizer.lr={self.lr}",
            "trainer.optimizer.schedule=constant",
            "trainer.optimizer.warmup_steps=0",
            f"iterations={self.iterations}",
            f"evaluation.every={self.iterations}",
            "evaluation.prompts=16",
            f"checkpoint.every={self.iterations}",
        ]

    def trl(self) -> dict[str, Any]:
        """TRL's settings of the same mathematics: the mean over the tokens of an update is its "bnpo"."""
        return {
            "per_device_train_batch_size": BATCH,
            "gradient_accumulation_steps": 1,
            "steps_per_generation": self.updates,
            "num_generations": SAMPLES,
            "max_completion_length": self.new_tokens,
            "max_steps": self.iterations * self.updates,
            "learning_rate": self.lr,
            "lr_scheduler_type": "constant",
            "adam_beta2": 0.99,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "beta": 0.0,
            "epsilon": 0.2,
            "epsilon_high": 0.28,
            "loss_type": "bnpo",
            "scale_rewards": "group",
        }


SMALL = SmallModelConfig()
THE_36M = SmallModelConfig(hidden_size=512, layers=8, heads=8, kv_heads=4, head_dim=64, mlp_size=2048)
CASES = {
    each.name: each
    for each in (
        Case(name="S-128", shape=SMALL, responses=128, new_tokens=96, iterations=96, warm_steps=1100, lr=4e-4),
        Case(name="S-1024", shape=SMALL, responses=1024, new_tokens=96, iterations=12, warm_steps=1100, lr=4e-4),
        Case(
            name="M-128", shape=THE_36M, responses=128, new_tokens=96, iterations=6, warm_steps=150, lr=2e-5, skipped=1
        ),
    )
}
