"""The loss of a micro-batch, the same for every backend: policy loss, KL, entropy, weights, and what is reported."""

from dataclasses import dataclass

from torch import Tensor

from grpo_lib.algorithms.kl import importance_corrected, straight_through
from grpo_lib.algorithms.losses import PolicyLoss
from grpo_lib.algorithms.registry import call
from grpo_lib.data.ragged import Ragged, kept_offsets
from grpo_lib.training.base import KlTerm, Objective
from grpo_lib.training.critic import Critic
from grpo_lib.training.logprobs import TokenKl, TokenLogprobs
from grpo_lib.training.microbatches import MicroBatch
from grpo_lib.training.minibatches import MiniBatch


class Totals:
    """Sums over the micro-batches of a step; means over the tokens that were added."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.value_loss: float | None = None
        self._sums: dict[str, float] = {}
        self._tokens: dict[str, float] = {}
        self._lowest, self._highest = float("inf"), float("-inf")

    def add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(values.detach().double().sum())
        self._tokens[name] = self._tokens.get(name, 0.0) + len(values)

    def add_loss(self, loss: PolicyLoss) -> None:
        self.add("ratio", loss.ratio)
        self.add("clip_fraction_high", loss.clipped_high)
        self.add("clip_fraction_low", loss.clipped_low)
        if len(loss.ratio):
            self._lowest = min(self._lowest, float(loss.ratio.min()))
            self._highest = max(self._highest, float(loss.ratio.max()))

    def metrics(self) -> dict[str, float]:
        means = {name: total / max(1.0, self._tokens[name]) for name, total in self._sums.items()}
        if self._highest >= self._lowest:
            means |= {"ratio_min": self._lowest, "ratio_max": self._highest}
        if self.value_loss is not None:
            means["value_loss"] = self.value_loss
        return {"loss": self.loss, **means}

    @property
    def nothing_left(self) -> bool:
        """There were tokens, and all were rejected."""
        return self._tokens.get("rejected_fraction", 0) > 0 and self._tokens.get("entropy", 0) == 0


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """Columns that a policy loss may name, of a micro-batch's tokens with mask 1."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    offsets: Tensor
    selected: Tensor | None


def micro_batch_loss(
    part: MiniBatch,
    micro: MicroBatch,
    scored: TokenLogprobs,
    exact_kl: TokenKl | None,
    objective: Objective,
    totals: Totals,
) -> Tensor:
    """The micro-batch's share of the mini-batch's loss, with gradient; its numbers go into ``totals``.

    Args:
        scored: of all response tokens of the micro-batch, with gradient.
        exact_kl: where the objective's KL is the exact one.
    """
    batch, device = part.batch, scored.logprobs.device
    taken = batch.mask.gather(micro.rows).values.bool()

    def column(rows: Ragged | None) -> Tensor:
        assert rows is not None, "the objective needs a column that the batch does not have"
        return rows.gather(micro.rows).values[taken].to(device)

    is_weights = None if batch.is_weights is None else column(batch.is_weights)
    if objective.correction is not None:
        log_ratio = scored.logprobs.detach()[taken.to(device)] - column(batch.old_logprobs)
        kept, is_weights = objective.correction(log_ratio.cpu(), kept_offsets(taken, micro.offsets))
        totals.add("rejected_fraction", ~kept)
        taken = taken.masked_scatter(taken, kept)
        is_weights = None if is_weights is None else is_weights[kept].to(device)
    # A masked token must not reach the gradient, not even as 0 * inf: nothing after this sees one.
    here = taken.to(device)
    tokens = _Tokens(
        logprobs=scored.logprobs[here],
        old_logprobs=column(batch.old_logprobs),
        advantages=column(batch.advantages),
        offsets=kept_offsets(taken, micro.offsets).to(device),
        selected=None if part.selected is None else column(part.selected),
    )
    entropy = scored.entropy[here]
    loss: PolicyLoss = call(objective.policy_loss, tokens)
    values = loss.values if is_weights is None else loss.values * is_weights
    if objective.kl is not None:
        kl = _kl(objective.kl, tokens, exact_kl, here, None if exact_kl else column(batch.ref_logprobs))
        values = values + objective.kl.coef * kl
        totals.add("kl", kl)
    if objective.entropy_coef:
        values = values - objective.entropy_coef * entropy
    total = (column(part.weights) * values).sum()
    totals.loss += float(total.detach())
    totals.add("entropy", entropy)
    totals.add("approx_kl", tokens.old_logprobs - tokens.logprobs)
    totals.add_loss(loss)
    if is_weights is not None:
        totals.add("is_weight", is_weights)
    return total


def critic_backward(part: MiniBatch, micro: MicroBatch, critic: Critic, totals: Totals) -> None:
    """The critic learns from every token with mask 1: rejection is about the policy."""
    taken = part.batch.mask.gather(micro.rows).values.bool()

    def column(rows: Ragged | None) -> Tensor:
        assert rows is not None, "a critic needs values and returns"
        return rows.gather(micro.rows).values[taken].to(critic.device)

    returns = column(part.batch.returns)
    loss, values = critic.backward(
        micro, taken.to(critic.device), column(part.batch.values), returns, column(part.weights)
    )
    totals.value_loss = (totals.value_loss or 0.0) + loss
    totals.add("value", values)
    totals.add("value_error", (values - returns).square())


def _kl(term: KlTerm, tokens: _Tokens, exact: TokenKl | None, here: Tensor, ref: Tensor | None) -> Tensor:
    """KL penalty of each token, ``[n]``."""
    if exact is None:
        assert term.estimator is not None
        assert ref is not None
        kl = term.estimator(tokens.logprobs, ref)
    else:
        kl = exact.full[here]
        if term.straight_through:
            kl = straight_through(kl, tokens.logprobs, exact.ref_logprobs[here])
    return importance_corrected(kl, tokens.logprobs, tokens.old_logprobs) if term.importance else kl
