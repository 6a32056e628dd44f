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

import torch
from torch import Tensor

from grpo_lib.algorithms.mismatch import Mismatch, RowSums
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
    """The correction of a whole iteration, with its metrics.

    Tokens with an infinite or NaN log-prob are dropped and counted (``nonfinite_tokens``).

    Args:
        old_logprobs: ``[N]``.
        rollout_logprobs: ``[N]``, as the engine reported them.
        mask: ``bool[N]``: tokens that take part.
        offsets: ``int64[B+1]``.
        importance: None: no weights.
        rejections: all must be passed.
        veto: a row with a token whose ``exp(log_rho)`` (not clamped) is below is dropped whole.

    Raises:
        AlgorithmError: no token is left, naming what rejected how many.
    """
    kept = torch.zeros(len(mask), dtype=torch.bool, device=mask.device)
    weights = None if importance is None else torch.zeros(len(mask), dtype=torch.float32, device=mask.device)
    mismatch = _mismatch(importance)
    touched: dict[str, int] = {}
    for rows in row_blocks(offsets):
        tokens = slice(int(offsets[rows.start]), int(offsets[rows.stop]))
        rollout, m = rollout_logprobs[tokens], mask[tokens]
        log_rho = old_logprobs[tokens] - rollout
        taken = m & log_rho.isfinite()
        block = RowSums(log_rho.where(taken, 0.0), taken, offsets[rows.start : rows.stop + 1] - tokens.start)
        left = _keep(block, rejections, veto, touched)
        of_tokens = (block.rho if importance is None else _weights(block, importance)) * left
        mismatch.add(block, rollout, left, of_tokens, nonfinite=int(m.sum() - taken.sum()))
        kept[tokens] = left
        if weights is not None:
            weights[tokens] = of_tokens
    if mismatch.tokens and not mismatch.kept_tokens:
        raise AlgorithmError(_nothing_left(mismatch, touched))
    scale = 1.0
    if weights is not None and importance is not None and importance.batch_normalize:
        scale = _mean_weight(weights, kept, offsets, importance.level)
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


def _nothing_left(mismatch: Mismatch, touched: dict[str, int]) -> str:
    rules = "; ".join(f"{rule} rejects {rows:,} of {mismatch.rows:,} rows" for rule, rows in touched.items())
    kl = mismatch.metrics(1.0)["k3_kl"]
    return (
        f"rollout correction: none of the {mismatch.tokens:,} response tokens is left ({rules}; mean KL between engine "
        f"and trainer {kl:.3g} nats a token). Loosen algorithm.rollout_correction, or mend what makes them differ"
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


def _mean_weight(weights: Tensor, kept: Tensor, offsets: Tensor, level: Level) -> float:
    """Over tokens, or over rows with a token left; 1 where all weights are 0."""
    if level == "token":
        mean = float(weights.sum(dtype=torch.float64)) / int(kept.sum())
    else:
        left = segment_sum(kept.long(), offsets)
        rows = segment_sum(weights, offsets).double()[left > 0] / left[left > 0]
        mean = float(rows.mean())
    return mean or 1.0


def _keep(rows: RowSums, rejections: Sequence[Rejection], veto: float | None, touched: dict[str, int]) -> Tensor:
    """``bool[n]``: tokens that pass every rule; adds the rows that each rule touches to ``touched``."""
    kept = rows.taken
    if veto is not None:
        lowest = segment_min(rows.log_rho.where(rows.taken, torch.inf), rows.offsets)
        vetoed = lowest < math.log(veto)
        kept = kept & ~rows.spread(vetoed)
        touched["veto"] = touched.get("veto", 0) + int(vetoed.sum())
    for rule in rejections:
        passes = _passes(rows, rule)
        if not rule.kind.startswith("token"):
            passes = rows.spread(passes)
        hit = segment_sum((rows.taken & ~passes).long(), rows.offsets) > 0
        kept = kept & passes
        touched[rule.kind] = touched.get(rule.kind, 0) + int(hit.sum())
    return kept


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
            divergence = segment_sum(divergence.double(), rows.offsets)
        case "seq_mean":
            divergence = rows.mean(divergence)
        case "seq_max":
            divergence = segment_max(divergence, rows.offsets)
    return divergence <= rule.upper


def _between(ratio: Tensor, rule: Rejection) -> Tensor:
    lower = 1 / rule.upper if rule.lower is None else rule.lower
    return (ratio >= lower) & (ratio <= rule.upper)
