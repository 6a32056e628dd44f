"""What every training backend does, and the records that it takes and gives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from grpo_lib.algorithms.losses import PolicyLoss
from grpo_lib.data.ragged import Ragged
from grpo_lib.training.microbatches import Sequences


@dataclass(frozen=True, kw_only=True)
class UpdateBatch:
    """An iteration's rollouts with everything that the update reads. ``B`` rows, ``N`` response tokens."""

    sequences: Sequences
    mask: Ragged
    """``uint8[N]``: 1 where the token takes part in the loss."""
    old_logprobs: Ragged
    """``float32[N]``: the anchor of the ratio (recomputed, or the engine's in bypass mode)."""
    advantages: Ragged
    """``float32[N]``."""
    ref_logprobs: Ragged | None
    """``float32[N]``, with a KL penalty."""
    group_ids: Tensor
    """``int64[B]``: a mini-batch is whole groups."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss as functions and numbers: ``agg(policy_loss) - entropy_coef agg(entropy) + kl_coef agg(kl)``."""

    policy_loss: Callable[[Tensor, Tensor, Tensor], PolicyLoss]
    """``(logprobs, old_logprobs, advantages)``, each ``[n]``."""
    aggregation: Callable[[Tensor, Tensor], Tensor]
    """``(mask [N], offsets [B+1])`` of the whole mini-batch -> weight of each token, ``[N]``."""
    kl: Callable[[Tensor, Tensor], Tensor]
    kl_coef: float
    entropy_coef: float
    temperature: float


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How an iteration is cut into optimizer steps and micro-batches."""

    epochs: int
    mini_batch_groups: int | None
    """Whole groups an optimizer step; ``None``: all."""
    max_tokens: int
    """Padded tokens a micro-batch."""
    seed: int
    """Of the shuffle of each epoch."""
    max_skipped: int
    """Steps with a non-finite gradient that are skipped before the update fails."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step."""

    optimizer_step: int
    epoch: int
    rows: int
    """Rows of the mini-batch."""
    tokens: int
    """Response tokens of the mini-batch."""
    values: Mapping[str, float]


class Trainer(Protocol):
    """A policy with its optimizer. Its state is always that of one policy version."""

    optimizer_step: int

    def digest(self) -> str:
        """Digest of the weights."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """The weights, by name; views, not copies."""
        ...

    def logprobs(self, sequences: Sequences, temperature: float) -> tuple[Ragged, Ragged]:
        """Log-probs and entropies of the response tokens under the current policy, without gradient."""
        ...

    def update(self, batch: UpdateBatch, objective: Objective, batching: Batching) -> list[StepMetrics]:
        """Runs the optimizer steps of one iteration. After an error the state is undefined: restore it."""
        ...

    def save(self, folder: Path) -> None:
        """Writes weights (Hugging Face safetensors), optimizer and step into ``folder``."""
        ...

    def restore_weights(self, folder: Path) -> None:
        """Starts anew from a model folder, whatever else lies in it: fresh optimizer, step 0."""
        ...

    def restore(self, folder: Path) -> None:
        """Reads what ``save`` wrote; exact."""
        ...
