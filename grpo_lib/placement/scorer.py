"""The trainer's log-prob function without the trainer: proves an engine that works where, or while, nothing trains."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from grpo_lib.config import RunConfig, TrainerConfig
from grpo_lib.data.ragged import Ragged
from grpo_lib.generation.base import Sampling
from grpo_lib.placement.train import TrainWorker
from grpo_lib.run import Run
from grpo_lib.training.microbatches import Sequences
from grpo_lib.training.world import World


class Scorer:
    """Scores a few rows under a policy, with a plain model of the same kind as the trainer's.

    Args:
        folder: of the initial policy.
    """

    def __init__(self, run: Run, folder: Path, device: torch.device) -> None:
        self._worker = TrainWorker(Run(plain(run.config)), folder, World.alone(device))
        self._digest = ""

    def load(self, weights: Mapping[str, Tensor], digest: str) -> None:
        """Takes a policy's weights, which have that digest in the precision that they came in."""
        self._worker.trainer.load_policy(weights, {}, 0)
        self._digest = digest

    def digest(self) -> str:
        return self._digest

    def score_few(self, few: Sequences, sampling: Sampling) -> Ragged:
        """Log-probs under the distribution that tokens are sampled from."""
        return self._worker.score_few(few, sampling)


def plain(config: RunConfig) -> RunConfig:
    """The same model in one process: merged weights, no critic, nothing to train with."""
    trainer = config.trainer
    alone = TrainerConfig(max_tokens=trainer.max_tokens, layout=trainer.layout, optimizer=trainer.optimizer)
    placement = config.placement.model_copy(update={"ranks": 1})
    return config.model_copy(update={"trainer": alone, "critic": None, "placement": placement})
