"""Rollout correction: what to do where the policy that sampled is not the one that the update starts from.

Another implementation, a stale version or a replayed batch: ``log_rho = lp_old - lp_roll`` says how far apart they are.
Importance weights undo the difference, rejection leaves out what is too far gone, the veto drops rows with a token that
the old policy finds impossible. Weights have no gradient; rejection only ever clears the mask.

Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy training"; Liu, Li et al. 2025, "When speed
kills stability"; IcePop: Ling team 2025.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from grpo_lib.algorithms.mismatch import Mismatch, RowSums, cleared, count
from grpo_lib.data.ragged import row_blocks, segment_max, segment_min, segment_sum
from grpo_lib.errors import AlgorithmError

Level = Literal["token", "sequence"]
RejectionKind = Literal[
    "token", "sequence", "geometric",
    "token_k2", "seq_sum_k2", "seq_mean_k2", "seq_max_k2",
    "token_k3", "seq_sum_k3", "seq_mean_k3", "seq_max_k3",
]  # fmt: skip
REJECTION_KINDS: tuple[RejectionKind, ...] = get_args(RejectionKind)


@dataclass(frozen=True, kw_only=True)
class Importance:
    """How tokens are weighted."""

    level: Level
    """``token``: ``exp(log_rho)``; ``sequence``: ``exp(sum_m log_rho)`` of the row for all its tokens."""
    upper: float
    """Larger weights are cut to it."""
    lower: float | None = None
    """IcePop: weights outside ``[lower, upper]`` are 0 instead of cut."""
    batch_normalize: bool = False
    """Divide by the mean over the tokens (rows) that are left, after the cut."""


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """Which tokens or rows are left out."""

    kind: RejectionKind
    upper: float
    lower: float | None = None
    """Of the ratio kinds; None: ``1 / upper``."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What the correction says of each token."""

    weights: Tensor | None
    """``float32[N]``, 0 where the mask is 0; None without importance weights."""
    mask: Tensor
    """``bool[N]``: tokens that are left."""
    metrics: dict[str, float]


def correct(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    offsets: Tensor,
    *,
    importance: Importance | None = None,
    rejections: Sequence[Rejection] = (),
    veto: float | None = None,
) -> Correction:
    """The correction of a whole iteration, with its metrics; columns on the CPU.

    Tokens with an infinite or NaN log-prob are dropped and counted (``nonfinite_tokens``).

    Args:
        old_logprobs: ``[N]``.
        rollout_logprobs: ``[N]``, as the engine reported them.
        mask: ``bool[N]``: tokens that take part.
        offsets: ``int64[B+1]``.
        importance: None: no weights.
        rejections: all must be passed.
        veto: at most 1: a row with a token whose ``exp(log_rho)`` (not clamped) is below is dropped whole.

    Raises:
        AlgorithmError: no token is left, naming what rejected how many.
    """
    # numpy asks for huge pages, torch does not: fresh memory costs half as much.
    kept = torch.from_numpy(np.zeros(len(mask), dtype=np.bool_))
    weights = None if importance is None else torch.from_numpy(np.zeros(len(mask), dtype=np.float32))
    mismatch = _mismatch(importance)
    touched: dict[str, int] = {}
    for rows in row_blocks(offsets):
        tokens = slice(int(offsets[rows.start]), int(offsets[rows.stop]))
        inside = offsets[rows.start : rows.stop + 1] - tokens.start
        block, rollout, nonfinite = _finite(old_logprobs[tokens], rollout_logprobs[tokens], mask[tokens], inside)
        left = _keep(block, rejections, veto, touched)
        of_tokens = cleared(block.rho if importance is None else _weights(block, importance), left)
        mismatch.add(block, rollout, left, of_tokens, nonfinite)
        kept[tokens] = left
        if weights is not None:
            weights[tokens] = of_tokens
    if mismatch.tokens + mismatch.nonfinite and not mismatch.kept_tokens:
        raise AlgorithmError(_nothing_left(mismatch, touched))
    scale = 1.0
    if weights is not None and importance is not None and importance.batch_normalize:
        scale = mismatch.mean_weight()
        weights /= scale
    metrics = mismatch.metrics(scale) | {f"{rule}_rejected_rows": float(rows) for rule, rows in touched.items()}
    return Correction(weights=weights, mask=kept, metrics=metrics)


def correct_rows(
    log_rho: Tensor,
    offsets: Tensor,
    *,
    importance: Importance | None,
    rejections: Sequence[Rejection] = (),
    veto: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Which tokens are left, ``bool[n]``, and their weights, ``float32[n]``, for whole rows of finite ``log_rho [n]``.

    What bypass mode needs at each micro-batch, with ``log_rho = lp - lp_roll``. Nothing here looks beyond a row.
    """
    rows = RowSums(log_rho.detach(), torch.ones_like(log_rho, dtype=torch.bool), offsets)
    kept = _keep(rows, rejections, veto, {})
    return kept, None if importance is None else _weights(rows, importance) * kept


def _mismatch(importance: Importance | None) -> Mismatch:
    upper = importance.upper if importance else 2.0
    lower = importance.lower if importance and importance.lower is not None else 1 / upper
    return Mismatch(upper=upper, lower=lower, by_row=importance is not None and importance.level == "sequence")


def _finite(old: Tensor, rollout: Tensor, mask: Tensor, offsets: Tensor) -> tuple[RowSums, Tensor, int]:
    """Of a block: the rows, the engine's log-probs (0 where not taken), how many tokens are dropped as not finite."""
    log_rho = old - rollout
    finite = torch.from_numpy(np.isfinite(log_rho.numpy()))
    taken = mask & finite
    valid = count(taken)
    if valid < len(mask):
        if count(finite) < len(mask):
            log_rho, rollout = log_rho.where(finite, 0.0), rollout.where(finite, 0.0)
        log_rho, rollout = cleared(log_rho, taken), cleared(rollout, taken)
    return RowSums(log_rho, taken, offsets), rollout, count(mask) - valid


def _nothing_left(mismatch: Mismatch, touched: dict[str, int]) -> str:
    reasons = [f"{rule} rejects {rows:,} of {mismatch.rows:,} rows" for rule, rows in touched.items()]
    if mismatch.nonfinite:
        reasons.append(f"{mismatch.nonfinite:,} of them have an infinite or NaN log-prob")
    if mismatch.tokens:
        reasons.append(f"mean KL between engine and trainer {mismatch.metrics(1.0)['k3_kl']:.3g} nats a token")
    return (
        f"rollout correction: none of the {mismatch.tokens + mismatch.nonfinite:,} response tokens is left "
        f"({'; '.join(reasons)}). Loosen algorithm.rollout_correction, or mend what makes engine and trainer differ"
    )


def _weights(rows: RowSums, importance: Importance) -> Tensor:
    """``float32[n]``; of tokens that are not taken too."""
    if importance.level == "token":
        return _cut(rows.rho, importance).float()
    return rows.spread(_cut(rows.sum.clamp(-20, 20).exp(), importance).float())


def _cut(rho: Tensor, importance: Importance) -> Tensor:
    if importance.lower is None:
        return rho.clamp(max=importance.upper)
    return rho.masked_fill((rho < importance.lower) | (rho > importance.upper), 0.0)


def _keep(rows: RowSums, rejections: Sequence[Rejection], veto: float | None, touched: dict[str, int]) -> Tensor:
    """``bool[n]``: tokens that pass every rule; adds the rows that each rule touches to ``touched``."""
    filled = rows.valid > 0
    whole, tokens = torch.ones_like(filled), rows.taken
    if veto is not None:
        passes = segment_min(rows.log_rho, rows.offsets) >= math.log(veto)
        whole = whole & passes
        touched["veto"] = touched.get("veto", 0) + int((filled & ~passes).sum())
    for rule in rejections:
        passes = _passes(rows, rule)
        if rule.kind.startswith("token"):
            tokens = tokens & passes
            hit = segment_sum((rows.taken & ~passes).long(), rows.offsets) > 0
        else:
            whole = whole & passes
            hit = filled & ~passes
        touched[rule.kind] = touched.get(rule.kind, 0) + int(hit.sum())
    return tokens & rows.spread(whole)


def _passes(rows: RowSums, rule: Rejection) -> Tensor:
    """``bool[n]`` of the token kinds, ``bool[b]`` of the others."""
    match rule.kind:
        case "token":
            return _between(rows.rho, rule)
        case "sequence":
            return _between(rows.sum.clamp(-20, 20).exp(), rule)
        case "geometric":
            return _between((rows.sum / rows.valid.clamp(min=1)).clamp(-20, 20).exp(), rule)
    level, _, estimator = rule.kind.rpartition("_")
    divergence = rows.k2() if estimator == "k2" else rows.k3()
    match level:
        case "seq_sum":
            divergence = segment_sum(divergence, rows.offsets)
        case "seq_mean":
            divergence = rows.mean(divergence)
        case "seq_max":
            divergence = segment_max(divergence, rows.offsets)
    return divergence <= rule.upper


def _between(ratio: Tensor, rule: Rejection) -> Tensor:
    lower = 1 / rule.upper if rule.lower is None else rule.lower
    return (ratio >= lower) & (ratio <= rule.upper)
