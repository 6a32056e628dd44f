"""The critic of PPO: a copy of the policy's backbone with a value head, its own optimizer and its own state."""

from dataclasses import dataclass

from torch import Tensor

from grpo_lib.algorithms.losses import value_loss
from grpo_lib.training.learner import Learner
from grpo_lib.training.microbatches import MicroBatch


@dataclass(frozen=True, kw_only=True)
class Critic:
    """Predicts, before each response token, the return from there on."""

    learner: Learner
    """Of a `ValueModule`."""
    lr: float
    value_clip: float | None

    def backward(
        self, batch: MicroBatch, taken: Tensor, old: Tensor, returns: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Adds a micro-batch's gradient. Of the tokens ``taken``: old values, returns and aggregation weights.

        Args:
            taken: ``int64``: indices into the micro-batch's response tokens.

        Returns:
            The micro-batch's share of the loss, and the predicted values of the tokens taken.
        """
        values: Tensor = self.learner.module(batch)[taken]
        loss = (weights * value_loss(values, old, returns, clip=self.value_clip)).sum()
        self.learner.backward(loss)
        return loss.detach(), values.detach()

    def step(self) -> float:
        """An optimizer step with the gradient so far, unless that is not finite; its norm."""
        return self.learner.step(self.lr)
