"""The rollout correction row by row in plain Python, from the formulas; and batches to compare it on.

A row is a list of tokens ``(lp_old, lp_roll, m)``. All sums are ``math.fsum`` of float64 numbers.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from grpo_lib.algorithms.rollout_correction import Importance, Rejection
from grpo_lib.data.ragged import lengths_to_offsets

Token = tuple[float, float, int]
Rows = list[list[Token]]
T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """Rows as the library wants them."""

    old: Tensor
    rollout: Tensor
    mask: Tensor
    offsets: Tensor

    def rows(self) -> Rows:
        tokens = zip(self.old.tolist(), self.rollout.tolist(), self.mask.long().tolist(), strict=True)
        whole = list(tokens)
        return [whole[start:stop] for start, stop in itertools.pairwise(self.offsets.tolist())]


def batch_of(rows: Rows, dtype: torch.dtype = torch.float64) -> Batch:
    tokens = list(itertools.chain.from_iterable(rows))
    return Batch(
        old=torch.tensor([old for old, _, _ in tokens], dtype=dtype),
        rollout=torch.tensor([rollout for _, rollout, _ in tokens], dtype=dtype),
        mask=torch.tensor([m for _, _, m in tokens], dtype=torch.bool),
        offsets=lengths_to_offsets(torch.tensor([len(row) for row in rows], dtype=torch.int64)),
    )


def from_log_ratios(rows: Sequence[Sequence[float]], rollout: float = -1.0) -> Batch:
    """Every token with mask 1; the engine says ``rollout`` of each."""
    return batch_of([[(rollout + x, rollout, 1) for x in row] for row in rows])


def random_batch(seed: int, dtype: torch.dtype = torch.float64) -> Batch:
    """Rows of one token, rows with mask 0 only, observations inside, log-ratios of +-50, infinite and NaN log-probs."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 16, (24,), generator=generator)
    lengths[:3] = 1
    offsets = lengths_to_offsets(lengths)
    tokens = int(offsets[-1])
    rollout = -torch.rand(tokens, generator=generator, dtype=torch.float64) * 4 - 0.01
    # Rows differ in how far the policies are apart, so that every rule keeps some and rejects some.
    far = torch.rand(24, generator=generator, dtype=torch.float64).square().repeat_interleave(lengths)
    old = rollout + far * torch.randn(tokens, generator=generator, dtype=torch.float64)
    some = torch.randperm(tokens, generator=generator)
    old[some[:3]] += 50
    old[some[3:6]] -= 50
    mask = torch.rand(tokens, generator=generator) < 0.8
    mask[: offsets[1]] = True
    mask[offsets[1] : offsets[2]] = False
    mask[offsets[7] : offsets[8]] = False
    old[offsets[-2] :] = rollout[offsets[-2] :] + 0.01  # one row that every rule keeps
    mask[-1] = True
    odd = torch.tensor([-math.inf, math.inf, math.nan, -math.inf, math.nan], dtype=torch.float64)
    rollout[some[6:11]] = odd
    rollout[offsets[9] : offsets[10]] = -math.inf  # a row without a finite log-prob
    return Batch(old.to(dtype), rollout.to(dtype), mask, offsets)


@dataclass(frozen=True)
class Reference:
    weights: list[float] | None
    mask: list[bool]
    metrics: dict[str, float]


def correct_by_formula(
    rows: Rows, importance: Importance | None, rejections: Sequence[Rejection], veto: float | None
) -> Reference:
    """Raises ZeroDivisionError where a mean over nothing is asked for."""
    taken = [[bool(m) and math.isfinite(old - rollout) for old, rollout, m in row] for row in rows]
    x = [[old - rollout for old, rollout, _ in row] for row in rows]
    of_row = [_where(values, valid) for values, valid in zip(x, taken, strict=True)]  # log-ratios that take part
    kept, rejected = [list(valid) for valid in taken], {}
    for row, values in enumerate(of_row):
        if veto is not None and any(_exp_unclamped(value) < veto for value in values):
            rejected["veto"] = rejected.get("veto", 0) + 1
            kept[row] = [False] * len(kept[row])
    for rule in rejections:
        for row, values in enumerate(of_row):
            passed = iter(_passed(rule, values))
            here = [next(passed) if valid else True for valid in taken[row]]
            rejected[rule.kind] = rejected.get(rule.kind, 0) + (not all(here))
            kept[row] = [left and passes for left, passes in zip(kept[row], here, strict=True)]
    plain = [
        [_exp(value) if valid else 0.0 for value, valid in zip(x[r], taken[r], strict=True)] for r in range(len(x))
    ]
    weights = plain if importance is None else _weights(importance, plain, of_row)
    weights = [[w if k else 0.0 for w, k in zip(*row, strict=True)] for row in zip(weights, kept, strict=True)]
    if importance is not None and importance.batch_normalize:
        scale = _scale(importance, weights, kept)
        weights = [[w / scale for w in row] for row in weights]
    metrics = {"nonfinite_tokens": float(sum(m for row in rows for _, _, m in row) - sum(map(sum, taken)))}
    metrics |= _mismatch(rows, taken, of_row, importance) | _of_weights(weights, kept)
    tokens, filled = sum(map(sum, taken)), sum(map(any, taken))
    metrics["masked_token_fraction"] = 1 - sum(map(sum, kept)) / tokens
    metrics["masked_row_fraction"] = 1 - sum(map(any, kept)) / filled
    names = [*(["veto"] if veto is not None else []), *(rule.kind for rule in rejections)]
    metrics |= {f"{name}_rejected_rows": float(rejected.get(name, 0)) for name in names}
    return Reference(None if importance is None else _flat(weights), _flat(kept), metrics)


def _passed(rule: Rejection, values: list[float]) -> list[bool]:
    """Whether each token of a row passes a rule."""
    lower = 1 / rule.upper if rule.lower is None else rule.lower
    k2 = [value * value / 2 for value in values]
    k3 = [_k3(value) for value in values]
    each = range(len(values))
    if not values:
        return []
    match rule.kind:
        case "token":
            return [lower <= _exp(value) <= rule.upper for value in values]
        case "sequence":
            return [lower <= _exp(math.fsum(values)) <= rule.upper for _ in each]
        case "geometric":
            return [lower <= _exp(_mean(values)) <= rule.upper for _ in each]
        case "token_k2":
            return [value <= rule.upper for value in k2]
        case "token_k3":
            return [value <= rule.upper for value in k3]
        case "seq_sum_k2":
            return [math.fsum(k2) <= rule.upper for _ in each]
        case "seq_sum_k3":
            return [math.fsum(k3) <= rule.upper for _ in each]
        case "seq_mean_k2":
            return [_mean(k2) <= rule.upper for _ in each]
        case "seq_mean_k3":
            return [_mean(k3) <= rule.upper for _ in each]
        case "seq_max_k2":
            return [max(k2) <= rule.upper for _ in each]
        case "seq_max_k3":
            return [max(k3) <= rule.upper for _ in each]


def _weights(importance: Importance, plain: list[list[float]], of_row: list[list[float]]) -> list[list[float]]:
    ratios = plain
    if importance.level == "sequence":
        ratios = [[_exp(math.fsum(values))] * len(row) for row, values in zip(plain, of_row, strict=True)]
    if importance.lower is None:
        return [[min(ratio, importance.upper) for ratio in row] for row in ratios]
    return [[ratio if importance.lower <= ratio <= importance.upper else 0.0 for ratio in row] for row in ratios]


def _scale(importance: Importance, weights: list[list[float]], kept: list[list[bool]]) -> float:
    """The mean weight over the tokens, or over the rows, that are left."""
    left = [_where(row, valid) for row, valid in zip(weights, kept, strict=True)]
    return _mean(_flat(left)) if importance.level == "token" else _mean([row[0] for row in left if row])


def _mismatch(
    rows: Rows, taken: list[list[bool]], of_row: list[list[float]], importance: Importance | None
) -> dict[str, float]:
    x = _flat(of_row)
    filled = [row for row in of_row if row]
    ppl_old, ppl_rollout = [], []
    for row, valid in zip(rows, taken, strict=True):
        if any(valid):
            ppl_old.append(math.exp(-_mean(_where([old for old, _, _ in row], valid))))
            ppl_rollout.append(math.exp(-_mean(_where([rollout for _, rollout, _ in row], valid))))
    log_ratio = [math.log(old / rollout) for old, rollout in zip(ppl_old, ppl_rollout, strict=True)]
    upper = 2.0 if importance is None else importance.upper
    lower = 1 / upper if importance is None or importance.lower is None else importance.lower
    by_row = importance is not None and importance.level == "sequence"
    ratios = [_exp(math.fsum(row)) for row in filled] if by_row else [_exp(value) for value in x]
    return {
        "kl": -_mean(x),
        "k3_kl": _mean([_k3(value) for value in x]),
        "chi2_token": _mean([_exp(value) ** 2 for value in x]) - 1,
        "chi2_seq": _mean([math.exp(2 * _clamp(math.fsum(row))) for row in filled]) - 1,
        "rollout_ppl": _mean(ppl_rollout),
        "old_ppl": _mean(ppl_old),
        "log_ppl_ratio": _mean(log_ratio),
        "log_ppl_ratio_abs": _mean([abs(value) for value in log_ratio]),
        "log_ppl_ratio_min": min(log_ratio),
        "log_ppl_ratio_max": max(log_ratio),
        "above_fraction": _mean([float(ratio > upper) for ratio in ratios]),
        "below_fraction": _mean([float(ratio < lower) for ratio in ratios]),
    }


def _of_weights(weights: list[list[float]], kept: list[list[bool]]) -> dict[str, float]:
    w = _flat([_where(row, valid) for row, valid in zip(weights, kept, strict=True)])
    mean = _mean(w)
    relative = [value / mean for value in w] if mean else []
    return {
        "weight_mean": mean,
        "weight_std": math.sqrt(_mean([(value - mean) ** 2 for value in w])),
        "weight_min": min(w),
        "weight_max": max(w),
        "effective_sample_size": 1 / _mean([value**2 for value in relative]) if relative else 0.0,
    }


def _k3(x: float) -> float:
    return math.expm1(_clamp(x)) - _clamp(x)


def _exp(x: float) -> float:
    return math.exp(_clamp(x))


def _exp_unclamped(x: float) -> float:
    return math.inf if x > 700 else math.exp(x)


def _clamp(x: float) -> float:
    return max(-20.0, min(20.0, x))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _where(values: Sequence[T], valid: Sequence[bool]) -> list[T]:
    return [value for value, taken in zip(values, valid, strict=True) if taken]


def _flat(rows: Iterable[Iterable[T]]) -> list[T]:
    return list(itertools.chain.from_iterable(rows))
