"""How far apart the policy that sampled and the policy that learns are: the metrics of the rollout correction.

In numpy: blocks of rows are worked on while they are in the processor's cache, and a call on a few hundred rows costs
a fifth of torch's.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Flags = NDArray[np.bool_]
Counts = NDArray[np.integer[Any]]


class RowSums:
    """``log_rho = lp_old - lp_roll`` of some whole rows, with what several rules want of it.

    Args:
        log_rho: ``[n]``, finite; 0 where not taken.
        taken: ``bool[n]``.
        offsets: ``int64[B+1]``; of the ``B`` rows the ``b`` that hold a token count.
    """

    def __init__(self, log_rho: Floats, taken: Flags, offsets: Counts) -> None:
        lengths = np.diff(offsets)
        self._lengths, self._starts = lengths[lengths > 0], offsets[:-1][lengths > 0]
        self.lowest = float(log_rho.min(initial=0))
        within = self.lowest >= -20 and log_rho.max(initial=0) <= 20
        self._clamped = log_rho if within else np.clip(log_rho, -20, 20)
        self.log_rho = log_rho
        self.taken = taken
        self.valid = self.counts(taken)
        """``[b]``: tokens taken."""
        self.sum = self.sums(log_rho)
        """``float64[b]``, summed in the dtype of `log_rho`."""
        self.rho = torch.from_numpy(self._clamped).exp().numpy()  # twice as fast as numpy's
        """``[n]``."""

    def k2(self) -> Floats:
        """``log_rho^2 / 2``, ``[n]``."""
        return np.square(self.log_rho) / 2

    def k3(self) -> Floats:
        """``rho - 1 - log_rho``, ``[n]``."""
        result = np.expm1(self._clamped)
        result -= self._clamped
        return result

    def sums(self, values: Floats) -> NDArray[np.float64]:
        """``[n] -> float64[b]``."""
        return np.add.reduceat(values, self._starts).astype(np.float64)

    def means(self, values: Floats) -> NDArray[np.float64]:
        """``[n] -> float64[b]``: over the tokens taken; values are 0 elsewhere."""
        return self.sums(values) / np.maximum(self.valid, 1)

    def largest(self, values: Floats) -> Floats:
        """``[n] -> [b]``."""
        return np.maximum.reduceat(values, self._starts)

    def smallest(self, values: Floats) -> Floats:
        """``[n] -> [b]``."""
        return np.minimum.reduceat(values, self._starts)

    def counts(self, flags: Flags) -> Counts:
        """``bool[n] -> [b]``: how many are true."""
        if flags.all():
            return self._lengths
        return np.add.reduceat(flags.view(np.uint8), self._starts, dtype=np.int32)

    def spread(self, rows: NDArray[Any]) -> NDArray[Any]:
        """``[b] -> [n]``."""
        return np.repeat(rows, self._lengths)


class Mismatch:
    """What is summed over blocks of rows, and the metrics from it.

    Tokens are those with mask 1 and finite log-probs, before rejection. The fractions beyond the bounds are of token
    or, with ``by_row``, of row ratios, as the weights are.
    """

    def __init__(self, *, upper: float, lower: float, by_row: bool) -> None:
        self.upper, self.lower, self.by_row = upper, lower, by_row
        self.tokens = self.rows = self.tokens_left = self.rows_left = self.nonfinite = 0
        self._of_rows: list[tuple[NDArray[Any], ...]] = []
        names = ("k3", "rho_squared", "above", "below", "weight", "weight_squared", "row_weight")
        self._sums = dict.fromkeys(names, 0.0)
        self._lowest, self._highest = float("inf"), 0.0

    def add(self, block: RowSums, rollout_logprobs: Floats, left: Counts, weights: Floats, nonfinite: int) -> None:
        """One block.

        Args:
            block: its rows.
            rollout_logprobs: ``[n]``, 0 where not taken.
            left: ``[b]``: tokens after rejection.
            weights: ``[n]``, 0 where not left.
            nonfinite: tokens that are dropped.
        """
        filled, tokens, tokens_left = block.valid > 0, int(block.valid.sum()), int(left.sum())
        self.nonfinite += nonfinite
        self.tokens += tokens
        self.rows += int(np.count_nonzero(filled))
        self.tokens_left += tokens_left
        self.rows_left += int(np.count_nonzero(left))
        if tokens == 0:
            return
        self._of_rows.append((block.valid[filled], block.sum[filled], block.sums(rollout_logprobs)[filled]))
        others = len(weights) - tokens  # not taken: their log_rho is 0 and rho 1
        sums = self._sums
        sums["k3"] += _sum(block.k3())
        sums["rho_squared"] += _sum_of_squares(block.rho) - others
        sums["above"] += np.count_nonzero(block.rho > self.upper) - others * (self.upper < 1)
        sums["below"] += np.count_nonzero(block.rho < self.lower) - others * (self.lower > 1)
        sums["weight"] += _sum(weights)
        sums["weight_squared"] += _sum_of_squares(weights)
        if self.by_row:  # all weights of a row are equal
            sums["row_weight"] += float(block.largest(weights).sum(dtype=np.float64))
        if tokens_left:
            self._lowest = min(self._lowest, _lowest(weights, tokens_left))
            self._highest = max(self._highest, float(weights.max()))

    def mean_weight(self) -> float:
        """Over the tokens, or with ``by_row`` over the rows, that are left; 1 where there are none or all are 0."""
        if self.by_row:
            return self._sums["row_weight"] / max(1, self.rows_left) or 1.0
        return self._sums["weight"] / max(1, self.tokens_left) or 1.0

    def metrics(self, weight_scale: float) -> dict[str, float]:
        """All of them; the weights' are of what is left, divided by ``weight_scale``."""
        result = {"nonfinite_tokens": float(self.nonfinite)}
        if self.tokens == 0:
            return result
        valid, log_rho, rollout = (np.concatenate(column) for column in zip(*self._of_rows, strict=True))
        log_ppl_ratio = -log_rho / valid  # log(ppl_old / ppl_rollout)
        log_ppl = -rollout / valid
        row_rho = np.exp(np.clip(log_rho, -20, 20))
        above, below = self._sums["above"] / self.tokens, self._sums["below"] / self.tokens
        if self.by_row:
            above, below = float((row_rho > self.upper).mean()), float((row_rho < self.lower).mean())
        result |= {
            "kl": -float(log_rho.sum()) / self.tokens,
            "k3_kl": self._sums["k3"] / self.tokens,
            "chi2_token": self._sums["rho_squared"] / self.tokens - 1,
            "chi2_seq": float(np.square(row_rho).mean()) - 1,
            "rollout_ppl": float(np.exp(np.minimum(log_ppl, 80)).mean()),
            "old_ppl": float(np.exp(np.minimum(log_ppl + log_ppl_ratio, 80)).mean()),
            "log_ppl_ratio": float(log_ppl_ratio.mean()),
            "log_ppl_ratio_abs": float(np.abs(log_ppl_ratio).mean()),
            "log_ppl_ratio_min": float(log_ppl_ratio.min()),
            "log_ppl_ratio_max": float(log_ppl_ratio.max()),
            "above_fraction": above,
            "below_fraction": below,
            "masked_token_fraction": 1 - self.tokens_left / self.tokens,
            "masked_row_fraction": 1 - self.rows_left / self.rows,
        }
        if self.tokens_left == 0:
            return result
        mean, square = (self._sums[name] / self.tokens_left for name in ("weight", "weight_squared"))
        return result | {
            "weight_mean": mean / weight_scale,
            "weight_std": max(0.0, square - mean * mean) ** 0.5 / weight_scale,
            "weight_min": self._lowest / weight_scale,
            "weight_max": self._highest / weight_scale,
            "effective_sample_size": min(1.0, mean * mean / square) if square else 0.0,
        }


CHUNK = 1024
"""Values summed in their own type before float64 takes over: several times as fast as float64 throughout."""


def _sum(values: Floats) -> float:
    return _sum_of_products(values, np.ones(CHUNK, dtype=values.dtype))


def _sum_of_squares(values: Floats) -> float:
    return _sum_of_products(values, values)


def _sum_of_products(a: Floats, b: Floats) -> float:
    """``b``: as long as ``a``, or one chunk for all."""
    whole = len(a) // CHUNK * CHUNK
    rest = len(a) - whole
    tail = b[whole:] if len(b) == len(a) else b[:rest]
    chunks = np.vecdot(a[:whole].reshape(-1, CHUNK), b[: len(b) // CHUNK * CHUNK].reshape(-1, CHUNK))
    return float(chunks.sum(dtype=np.float64)) + float(np.dot(a[whole:].astype(np.float64), tail.astype(np.float64)))


def _lowest(weights: Floats, left: int) -> float:
    """The least of the ``left`` weights that are left; the others are 0."""
    if left == len(weights):
        return float(weights.min())
    if np.count_nonzero(weights > 0) < left:
        return 0.0
    # The bits of floats >= 0 are ordered as integers are; taking 1 away makes 0 the largest of all.
    bits = weights.view(f"u{weights.itemsize}") - 1
    return float((bits.min() + 1).view(weights.dtype))
