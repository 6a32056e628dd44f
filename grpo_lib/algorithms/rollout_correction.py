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

from grpo_lib.algorithms.mismatch import Counts, Flags, Floats, Mismatch, RowSums
from grpo_lib.data.ragged import row_blocks
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
    # Fresh memory of numpy's is in huge pages, of torch's not: it costs half as much.
    kept = np.zeros(len(mask), dtype=np.bool_)
    weights = None if importance is None else np.zeros(len(mask), dtype=np.float32)
    mismatch = _mismatch(importance)
    touched: dict[str, int] = {}
    for rows in row_blocks(offsets):
        tokens = slice(int(offsets[rows.start]), int(offsets[rows.stop]))
        inside = offsets[rows.start : rows.stop + 1].numpy() - tokens.start
        old, rollout, m = (column[tokens].numpy() for column in (old_logprobs, rollout_logprobs, mask))
        block, rollout, nonfinite = _finite(old, rollout, m, inside)
        kept[tokens], left = _keep(block, rejections, veto, touched)
        of_tokens = block.rho if importance is None else _weights(block, importance)
        of_tokens = np.multiply(of_tokens, kept[tokens], out=None if weights is None else weights[tokens])
        mismatch.add(block, rollout, left, of_tokens, nonfinite)
    if mismatch.tokens + mismatch.nonfinite and not mismatch.tokens_left:
        raise AlgorithmError(_nothing_left(mismatch, touched))
    scale = 1.0
    if weights is not None and importance is not None and importance.batch_normalize:
        scale = mismatch.mean_weight()
        weights /= scale
    return Correction(
        weights=None if weights is None else torch.from_numpy(weights),
        mask=torch.from_numpy(kept),
        metrics=mismatch.metrics(scale) | {f"{rule}_rejected_rows": float(rows) for rule, rows in touched.items()},
    )


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
    x = log_rho.detach().cpu().numpy()
    rows = RowSums(x, np.ones(len(x), dtype=np.bool_), offsets.cpu().numpy())
    kept, _ = _keep(rows, rejections, veto, {})
    device = log_rho.device
    weights = None if importance is None else torch.from_numpy(_weights(rows, importance) * kept).float().to(device)
    return torch.from_numpy(kept).to(device), weights


def _mismatch(importance: Importance | None) -> Mismatch:
    """Bounds that are not set are 2 and 1 over the upper one."""
    upper = importance.upper if importance else 2.0
    lower = importance.lower if importance and importance.lower is not None else 1 / upper
    return Mismatch(upper=upper, lower=lower, by_row=importance is not None and importance.level == "sequence")


def _finite(old: Floats, rollout: Floats, mask: Flags, offsets: Counts) -> tuple[RowSums, Floats, int]:
    """Of a block: the rows, the engine's log-probs (0 where not taken), how many tokens are dropped as not finite."""
    with np.errstate(invalid="ignore"):
        log_rho = old - rollout
    finite = np.isfinite(log_rho)
    nonfinite = 0
    if not finite.all():
        nonfinite = int(np.count_nonzero(mask & ~finite))
        log_rho, rollout, mask = np.where(finite, log_rho, 0), np.where(finite, rollout, 0), mask & finite
    if not mask.all():
        taken = mask.astype(log_rho.dtype)
        log_rho *= taken
        rollout = rollout * taken
    return RowSums(log_rho, mask, offsets), rollout, nonfinite


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


def _weights(rows: RowSums, importance: Importance) -> Floats:
    """``[n]``; of tokens that are not taken too."""
    if importance.level == "token":
        return _cut(rows.rho, importance)
    return rows.spread(_cut(np.exp(np.clip(rows.sum, -20, 20)), importance).astype(np.float32))


def _cut(rho: Floats, importance: Importance) -> Floats:
    if importance.lower is None:
        return np.minimum(rho, importance.upper)
    return np.where((rho < importance.lower) | (rho > importance.upper), 0, rho)


def _keep(
    rows: RowSums, rejections: Sequence[Rejection], veto: float | None, touched: dict[str, int]
) -> tuple[Flags, Counts]:
    """``bool[n]``: tokens that pass every rule, and ``[b]``: how many of each row.

    Adds the rows that each rule touches to ``touched``.
    """
    filled = rows.valid > 0
    whole, kept = filled, rows.taken
    if veto is not None:
        touched.setdefault("veto", 0)
        if rows.lowest < math.log(veto):
            whole = filled & (rows.smallest(rows.log_rho) >= math.log(veto))
            touched["veto"] += int(np.count_nonzero(filled & ~whole))
    for rule in rejections:
        passes = _passes(rows, rule)
        if rule.kind.startswith("token"):
            hit = rows.counts(rows.taken & ~passes) > 0
            kept = kept & passes
        else:
            hit = filled & ~passes
            whole = whole & passes
        touched[rule.kind] = touched.get(rule.kind, 0) + int(np.count_nonzero(hit))
    left = rows.valid * whole if kept is rows.taken else rows.counts(kept) * whole
    return kept & rows.spread(whole), left


def _passes(rows: RowSums, rule: Rejection) -> Flags:
    """``bool[n]`` of the token kinds, ``bool[b]`` of the others."""
    match rule.kind:
        case "token":
            return _between(rows.rho, rule)
        case "sequence":
            return _between(np.exp(np.clip(rows.sum, -20, 20)), rule)
        case "geometric":
            return _between(np.exp(np.clip(rows.sum / np.maximum(rows.valid, 1), -20, 20)), rule)
    level, _, estimator = rule.kind.rpartition("_")
    divergence = rows.k2() if estimator == "k2" else rows.k3()
    match level:
        case "seq_sum":
            divergence = rows.sums(divergence)
        case "seq_mean":
            divergence = rows.means(divergence)
        case "seq_max":
            divergence = rows.largest(divergence)
    return divergence <= rule.upper


def _between(ratio: Floats, rule: Rejection) -> Flags:
    lower = 1 / rule.upper if rule.lower is None else rule.lower
    return (ratio >= lower) & (ratio <= rule.upper)
