"""The records that the trainer takes and gives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    row_seeds: Tensor
    """``int64[B]``: for whatever is drawn for a token; the row's own wherever it stands."""
    is_weights: Ragged | None = None
    """``float32[N]``: importance weights of the rollout correction."""
    values: Ragged | None = None
    """``float32[N]``: of the critic before the update."""
    returns: Ragged | None = None
    """``float32[N]``: what the critic learns."""

    def gather(self, rows: Tensor) -> "UpdateBatch":
        """The given rows, in the given order; a row may be taken several times."""

        def take(column: Ragged | None) -> Ragged | None:
            return None if column is None else column.gather(rows)

        return UpdateBatch(
            sequences=self.sequences.gather(rows),
            mask=self.mask.gather(rows),
            old_logprobs=self.old_logprobs.gather(rows),
            advantages=self.advantages.gather(rows),
            ref_logprobs=take(self.ref_logprobs),
            group_ids=self.group_ids[rows],
            row_seeds=self.row_seeds[rows],
            is_weights=take(self.is_weights),
            values=take(self.values),
            returns=take(self.returns),
        )


@dataclass(frozen=True, kw_only=True)
class KlTerm:
    """The KL penalty in the loss."""

    coef: float
    estimator: Callable[[Tensor, Tensor], Tensor] | None
    """``(logprobs, ref_logprobs)``, each ``[n]``; None: exact, from the logits of policy and reference."""
    straight_through: bool = False
    """Of the exact one: its value with the gradient of k2."""
    importance: bool = False
    """Times the ratio to the old policy."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss as functions and numbers: ``agg(policy_loss) - entropy_coef agg(entropy) + kl.coef agg(kl)``."""

    policy_loss: Callable[..., PolicyLoss]
    """Of the columns in ``algorithms.losses.LOSSES`` that its positional parameters name."""
    aggregation: Callable[[Tensor, Tensor], Tensor]
    """``(mask [N], offsets [B+1])`` of the whole mini-batch -> weight of each token, ``[N]``."""
    temperature: float
    kl: KlTerm | None = None
    entropy_coef: float = 0.0
    select: Callable[..., Tensor] | None = None
    """Chooses tokens of the whole mini-batch before the first backward pass: the loss's helper."""
    zero_without_advantage: bool = True
    """Rows of zero advantages have no gradient of the policy loss."""
    correction: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]] | None = None
    """Bypass mode: ``(log ratio to the engine [n], offsets [b+1])`` -> tokens kept ``bool[n]``, weights ``[n]``."""


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How an iteration is cut into optimizer steps and micro-batches."""

    epochs: int
    mini_batch_groups: int | None
    """Whole groups an optimizer step; ``None``: all."""
    max_tokens: int
    """Of a micro-batch, with padding."""
    seed: int
    """Of the shuffle of each epoch."""
    max_skipped: int
    """Steps with a non-finite gradient that are skipped before the update fails."""
    max_kl: float | None = None
    """The iteration ends before the first step whose mini-batch has a larger approximate KL to the old policy."""
    train_policy: bool = True
    """False: only the critic learns."""


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
