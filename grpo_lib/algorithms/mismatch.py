"""How far apart the policy that sampled and the policy that learns are: the metrics of the rollout correction."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from grpo_lib.data.ragged import repeat_rows, segment_max, segment_sum


class RowSums:
    """``log_rho = lp_old - lp_roll`` of some whole rows with what several rules want of it.

    Args:
        log_rho: ``[n]``, finite; 0 where not taken.
        taken: ``bool[n]``.
        offsets: ``int64[b+1]``.
    """

    def __init__(self, log_rho: Tensor, taken: Tensor, offsets: Tensor) -> None:
        self.log_rho = log_rho
        self.taken = taken
        self.offsets = offsets
        self.valid = segment_sum(taken.long(), offsets)
        """``int64[b]``: tokens taken."""
        self.sum = segment_sum(log_rho, offsets).double()
        """``float64[b]``."""
        self.rho = log_rho.clamp(-20, 20).exp_()
        """``[n]``."""

    def mean(self, values: Tensor) -> Tensor:
        """``float64[b]``: mean over the tokens taken of values that are 0 elsewhere."""
        return segment_sum(values, self.offsets).double() / self.valid.clamp(min=1)

    def spread(self, rows: Tensor) -> Tensor:
        """``[b] -> [n]``."""
        return repeat_rows(rows, self.offsets)

    def k2(self) -> Tensor:
        """``log_rho^2 / 2``, ``[n]``."""
        return self.log_rho.square() / 2

    def k3(self) -> Tensor:
        """``rho - 1 - log_rho``, ``[n]``."""
        x = self.log_rho.clamp(-20, 20)
        if x.is_cpu:  # four times as fast as torch's
            return torch.from_numpy(np.expm1(x.numpy())).sub_(x)
        return x.expm1() - x


@dataclass(kw_only=True)
class Mismatch:
    """Sums over blocks of rows; tokens are those with mask 1 and finite log-probs, before rejection.

    The fractions beyond the bounds are of token or row ratios, as the weights are; bounds that are not set are 2 and
    1 over the upper one.
    """

    upper: float
    lower: float
    by_row: bool
    tokens: int = 0
    rows: int = 0
    kept_tokens: int = 0
    kept_rows: int = 0
    nonfinite: int = 0
    _sums: dict[str, float] = field(default_factory=dict)
    _least: dict[str, float] = field(default_factory=dict)

    def add(self, block: RowSums, rollout_logprobs: Tensor, kept: Tensor, weights: Tensor, nonfinite: int) -> None:
        """One block, on the CPU.

        Args:
            rollout_logprobs: ``[n]``, 0 where not taken.
            kept: ``bool[n]``, after rejection.
            weights: ``[n]``, 0 where not kept.
            nonfinite: tokens that are dropped.
        """
        filled = block.valid > 0
        total, valid = block.sum[filled], block.valid[filled]
        tokens = int(valid.sum())
        left = segment_sum(kept.long(), block.offsets)
        kept_tokens = int(left.sum())
        self.nonfinite += nonfinite
        self.rows += len(valid)
        self.tokens += tokens
        self.kept_tokens += kept_tokens
        self.kept_rows += int((left > 0).sum())
        if tokens == 0:
            return
        self._add("log_rho", total.sum(dtype=torch.float64))
        self._add("k3", block.k3().sum(dtype=torch.float64))
        self._add("rho_squared", block.rho.square().sum(dtype=torch.float64) - (len(kept) - tokens))  # of tokens not taken it is 1
        self._add("chi2_rows", (2 * total.clamp(-20, 20)).exp().sum(dtype=torch.float64))
        rollout = block.mean(rollout_logprobs)[filled]
        log_ratio = -total / valid  # log(ppl_old / ppl_rollout)
        self._add("ppl_rollout", (-rollout).clamp(max=80).exp().sum(dtype=torch.float64))
        self._add("ppl_old", (log_ratio - rollout).clamp(max=80).exp().sum(dtype=torch.float64))
        self._add("log_ppl", log_ratio.sum(dtype=torch.float64))
        self._add("log_ppl_abs", log_ratio.abs().sum(dtype=torch.float64))
        self._extremes("log_ppl", log_ratio)
        ratios = (total.clamp(-20, 20).exp() if self.by_row else block.rho).numpy()
        counted = np.True_ if self.by_row else block.taken.numpy()
        self._add("above", np.count_nonzero((ratios > self.upper) & counted))
        self._add("below", np.count_nonzero((ratios < self.lower) & counted))
        self._add("weight", weights.sum(dtype=torch.float64))
        self._add("weight_squared", weights.square().sum(dtype=torch.float64))
        if kept_tokens:
            self._extremes("weight", weights if kept_tokens == len(kept) else weights.where(kept, weights.max()))
        if self.by_row:  # all weights of a row are equal
            self._add("row_weight", segment_max(weights, block.offsets)[left > 0].double().sum())

    def mean_weight(self) -> float:
        """Over the tokens, or with ``by_row`` over the rows, that are left; 1 where there are none or all are 0."""
        if self.kept_tokens == 0:
            return 1.0
        total, of = ("row_weight", self.kept_rows) if self.by_row else ("weight", self.kept_tokens)
        return self._sums[total] / of or 1.0

    def metrics(self, weight_scale: float) -> dict[str, float]:
        """All of them; the weights' are of what is left, divided by ``weight_scale``."""
        result = {"nonfinite_tokens": float(self.nonfinite)}
        if self.tokens == 0:
            return result
        sums = self._sums
        of = self.rows if self.by_row else self.tokens
        result |= {
            "kl": -sums["log_rho"] / self.tokens,
            "k3_kl": sums["k3"] / self.tokens,
            "chi2_token": sums["rho_squared"] / self.tokens - 1,
            "chi2_seq": sums["chi2_rows"] / self.rows - 1,
            "rollout_ppl": sums["ppl_rollout"] / self.rows,
            "old_ppl": sums["ppl_old"] / self.rows,
            "log_ppl_ratio": sums["log_ppl"] / self.rows,
            "log_ppl_ratio_abs": sums["log_ppl_abs"] / self.rows,
            "log_ppl_ratio_min": self._least["log_ppl"],
            "log_ppl_ratio_max": -self._least["-log_ppl"],
            "above_fraction": sums["above"] / of,
            "below_fraction": sums["below"] / of,
            "masked_token_fraction": 1 - self.kept_tokens / self.tokens,
            "masked_row_fraction": 1 - self.kept_rows / self.rows,
        }
        if self.kept_tokens == 0:
            return result
        mean, square = sums["weight"] / self.kept_tokens, sums["weight_squared"] / self.kept_tokens
        return result | {
            "weight_mean": mean / weight_scale,
            "weight_std": max(0.0, square - mean * mean) ** 0.5 / weight_scale,
            "weight_min": self._least["weight"] / weight_scale,
            "weight_max": -self._least["-weight"] / weight_scale,
            "effective_sample_size": min(1.0, mean * mean / square) if square else 0.0,
        }

    def _add(self, name: str, value: Tensor | float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def _extremes(self, name: str, values: Tensor) -> None:
        low, high = values.aminmax()
        self._least[name] = min(self._least.get(name, float("inf")), float(low))
        self._least[f"-{name}"] = min(self._least.get(f"-{name}", float("inf")), -float(high))


def count(mask: Tensor) -> int:
    """Number of true values, on the CPU."""
    return int(np.count_nonzero(mask.numpy()))


def cleared(values: Tensor, mask: Tensor) -> Tensor:
    """Finite ``values`` where ``mask``, else 0, on the CPU: four times as fast as ``where``."""
    return torch.from_numpy(values.numpy() * mask.numpy())
