"""The loss of a micro-batch, the same for every backend: policy loss, KL, entropy, weights, and what is reported."""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lib.algorithms.kl import importance_corrected, straight_through
from grpo_lib.algorithms.losses import PolicyLoss
from grpo_lib.algorithms.registry import call
from grpo_lib.data.ragged import Ragged, kept_offsets
from grpo_lib.training.base import KlTerm, Objective
from grpo_lib.training.critic import Critic
from grpo_lib.training.logprobs import TokenScores
from grpo_lib.training.microbatches import MicroBatch
from grpo_lib.training.minibatches import MiniBatch
from grpo_lib.training.world import World


class Totals:
    """Sums over the micro-batches of a step, and then over the ranks; means over the tokens that were added."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}  # tensors stay where they are: no waiting for a GPU
        self._counts: dict[str, float] = {}
        self._shares: set[str] = set()
        self._extremes: list[Tensor] = []
        self._reduced: dict[str, float] = {}
        self._lowest, self._highest = float("inf"), float("-inf")

    def add(self, name: str, values: Tensor) -> None:
        """Values of tokens, to be reported as their mean."""
        self._add(name, values.detach().double().sum(), len(values))

    def add_share(self, name: str, value: Tensor | float) -> None:
        """A micro-batch's share of a number."""
        self._shares.add(name)
        self._add(name, value.detach().double() if isinstance(value, Tensor) else value, 0)

    def _add(self, name: str, value: Tensor | float, count: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value
        self._counts[name] = self._counts.get(name, 0.0) + count

    def add_loss(self, loss: PolicyLoss) -> None:
        self.add("ratio", loss.ratio)
        self.add("clip_fraction_high", loss.clipped_high)
        self.add("clip_fraction_low", loss.clipped_low)
        if len(loss.ratio):
            lowest, highest = torch.aminmax(loss.ratio.detach().double())
            self._extremes.append(torch.stack([-lowest, highest]))

    def add_micro_batch(self, micro: MicroBatch) -> None:
        self.add_share("trained_rows", len(micro.rows))
        computed = micro.computed if len(micro.rows) else 0  # a token that stands in for no rows is no padding
        self._add("padded_fraction", computed - micro.tokens, computed)

    def reduce(self, world: World) -> None:
        """To numbers, over the ranks, which all have added to the same names."""
        names = sorted(self._sums)
        sums = [torch.as_tensor(self._sums[name], dtype=torch.float64, device=world.device) for name in names]
        counts = torch.tensor([self._counts[name] for name in names], dtype=torch.float64, device=world.device)
        together = world.sum_(torch.cat([torch.stack(sums), counts])).tolist()
        self._reduced = dict(zip(names, together[: len(names)], strict=True))
        self._counts = dict(zip(names, together[len(names) :], strict=True))
        none = torch.full((2,), -torch.inf, dtype=torch.float64, device=world.device)
        lowest, self._highest = world.max_(torch.stack([none, *self._extremes]).amax(0)).tolist()
        self._lowest = -lowest

    def metrics(self) -> dict[str, float]:
        """Without the means of nothing: a 0 would count in the iteration's mean."""
        means = {
            name: total / (self._counts[name] or 1.0)
            for name, total in self._reduced.items()
            if self._counts[name] or name in self._shares
        }
        if self._highest >= self._lowest:
            means |= {"ratio_min": self._lowest, "ratio_max": self._highest}
        return means

    @property
    def nothing_left(self) -> bool:
        """There were tokens, and all were rejected."""
        return self._counts.get("rejected_fraction", 0) > 0 and self._counts.get("entropy", 0) == 0


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
    scored: TokenScores,
    objective: Objective,
    totals: Totals,
) -> Tensor:
    """The micro-batch's share of the mini-batch's loss, with gradient; its numbers go into ``totals``.

    Args:
        scored: of all response tokens of the micro-batch, with gradient; with the KL where the objective's is exact.
    """
    batch, device = part.batch, scored.logprobs.device
    taken = batch.mask.gather(micro.rows).values.bool()  # here and below on the CPU: a mask on a GPU is waited for

    def column(rows: Ragged | None) -> Tensor:
        assert rows is not None, "the objective needs a column that the batch does not have"
        return rows.gather(micro.rows).values[taken].to(device)

    is_weights = None if batch.is_weights is None else column(batch.is_weights)
    if objective.correction is not None:
        log_ratio = scored.logprobs.detach()[_places(taken, device)] - column(batch.old_logprobs)
        kept, is_weights = objective.correction(log_ratio.cpu(), kept_offsets(taken, micro.offsets))
        totals.add("rejected_fraction", ~kept)
        taken = taken.masked_scatter(taken, kept)
        is_weights = None if is_weights is None else is_weights[kept].to(device)
    # A masked token must not reach the gradient, not even as 0 * inf: nothing after this sees one.
    here = _places(taken, device)
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
        ref = None if scored.kl is not None else column(batch.ref_logprobs)
        kl = _kl(objective.kl, tokens, scored, here, ref)
        values = values + objective.kl.coef * kl
        totals.add("kl", kl)
    if objective.entropy_coef:
        values = values - objective.entropy_coef * entropy
    total = (column(part.weights) * values).sum()
    totals.add_share("loss", total)
    totals.add("entropy", entropy)
    totals.add("approx_kl", tokens.old_logprobs - tokens.logprobs)
    totals.add_loss(loss)
    if is_weights is not None:
        totals.add("is_weight", is_weights)
    return total


def critic_backward(part: MiniBatch, micro: MicroBatch, critic: Critic, totals: Totals) -> None:
    """The critic learns from every token with mask 1: rejection is about the policy."""
    device = micro.input_ids.device
    taken = part.batch.mask.gather(micro.rows).values.bool()

    def column(rows: Ragged | None) -> Tensor:
        assert rows is not None, "a critic needs values and returns"
        return rows.gather(micro.rows).values[taken].to(device)

    returns = column(part.batch.returns)
    loss, values = critic.backward(micro, taken.to(device), column(part.batch.values), returns, column(part.weights))
    totals.add_share("value_loss", loss)
    totals.add("value", values)
    totals.add("value_error", (values - returns).square())


def _places(taken: Tensor, device: torch.device) -> Tensor:
    """``bool[n]`` on the CPU -> the indices of what is true, ``int64`` on the device."""
    return torch.nonzero(taken).squeeze(1).to(device)


def _kl(term: KlTerm, tokens: _Tokens, scored: TokenScores, here: Tensor, ref: Tensor | None) -> Tensor:
    """KL penalty of each token, ``[n]``."""
    if scored.kl is None:
        assert term.estimator is not None
        assert ref is not None
        kl = term.estimator(tokens.logprobs, ref)
    else:
        assert scored.ref_logprobs is not None
        kl = scored.kl[here]
        if term.straight_through:
            kl = straight_through(kl, tokens.logprobs, scored.ref_logprobs[here])
    return importance_corrected(kl, tokens.logprobs, tokens.old_logprobs) if term.importance else kl
