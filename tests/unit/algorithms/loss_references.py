"""The policy losses row by row in plain Python, derivatives worked out by hand; and random ragged batches for them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_lib.algorithms.losses import LOSSES, PolicyLoss
from grpo_lib.algorithms.registry import call
from grpo_lib.data.ragged import kept_offsets, lengths_to_offsets, repeat_rows

NAMES = [entry.name for entry in LOSSES]

OPTIONS: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 0.1, "clip_high": 0.15},
    "cispo": {"clip_low": 0.3},
    "sapo": {"tau_pos": 1.5, "tau_neg": 2.5},
    "clip_cov": {"clip_cov_ratio": 0.4, "cov_low": 0.05, "cov_high": 3.0},
    "kl_cov": {"kl_cov_ratio": 0.2, "coef": 0.7},
}
"""Options with which random batches reach every branch (else the defaults)."""


@dataclass(frozen=True)
class Batch:
    """Columns of a mini-batch under the names that losses and helpers ask for."""

    offsets: Tensor
    mask: Tensor
    """``bool[N]``."""
    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    selected: Tensor
    draws: Tensor
    weights: Tensor
    """What the sum over tokens weighs each with."""

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    def tokens_of(self, rows: Sequence[int]) -> Tensor:
        starts = self.offsets.tolist()
        return torch.tensor([token for row in rows for token in range(starts[row], starts[row + 1])]).long()

    def take(self, rows: Sequence[int]) -> "Batch":
        """Those rows, in that order."""
        lengths = self.offsets.diff()[torch.tensor(rows).long()]
        return self._tokens(self.tokens_of(rows), lengths_to_offsets(lengths))

    def valid(self) -> "Batch":
        """What a loss sees: the tokens with mask 1; rows stay, some without a token."""
        return self._tokens(self.mask.nonzero()[:, 0], kept_offsets(self.mask, self.offsets))

    def _tokens(self, tokens: Tensor, offsets: Tensor) -> "Batch":
        names = ("mask", "logprobs", "old_logprobs", "advantages", "selected", "draws", "weights")
        return Batch(offsets=offsets, **{name: getattr(self, name)[tokens] for name in names})

    def with_gradient(self) -> "Batch":
        return replace(self, logprobs=self.logprobs.clone().requires_grad_())

    def to(self, dtype: torch.dtype) -> "Batch":
        columns = {name: getattr(self, name).to(dtype) for name in ("logprobs", "old_logprobs", "advantages")}
        return replace(self, **columns)


def random_batch(
    seed: int,
    lengths: Sequence[int] = (1, 7, 5, 6, 1, 8, 9, 3, 1, 10),
    extreme: float = 50.0,
    constant_in_row: bool = False,
    spread: float = 0.4,
) -> Batch:
    """Log-probs below 0; rows of one token, observation tokens, rows without a valid token, some log-ratios of
    ``+-extreme``, rows of zero advantages, rows whose advantages vary."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(count: int) -> Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float64)

    def normal(count: int) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    offsets = lengths_to_offsets(torch.tensor(lengths).long())
    n = int(offsets[-1])
    row_ids = repeat_rows(torch.arange(len(lengths)), offsets)
    kind = torch.randint(0, 4, (len(lengths),), generator=generator)  # 0: zero, 1 and 2: one value, 3: varying
    kind[2::5], kind[3::5] = 0, 3
    by_row, by_token = normal(len(lengths))[row_ids], normal(n)
    varying = torch.zeros(n, dtype=torch.bool) if constant_in_row else kind[row_ids] == 3
    advantages = torch.where(varying, by_token, by_row).masked_fill(kind[row_ids] == 0, 0.0)
    mask = uniform(n) < 0.75
    empty = torch.randint(0, 6, (len(lengths),), generator=generator) == 0
    empty[5::7] = True
    mask &= ~empty[row_ids]
    log_ratio = spread * normal(n)
    pick = uniform(n)
    log_ratio = torch.where(pick < 0.05, extreme, torch.where(pick > 0.95, -extreme, log_ratio))
    highest = -1.5 * -uniform(n).log() - 0.02
    return Batch(
        offsets=offsets,
        mask=mask,
        logprobs=highest - (-log_ratio).clamp(min=0),
        old_logprobs=highest - log_ratio.clamp(min=0),
        advantages=advantages,
        selected=uniform(n) < 0.3,
        draws=uniform(n),
        weights=uniform(n),
    )


def bound(name: str, options: Mapping[str, object]) -> Callable[..., PolicyLoss]:
    return LOSSES[name].bind(options, "test")


def select(name: str, batch: Batch, options: Mapping[str, object]) -> Batch:
    """The batch with ``selected`` chosen by the loss's helper over the batch's valid tokens."""
    helper = LOSSES[name].bind_helper(options, "test")
    chosen = torch.zeros_like(batch.mask)
    if helper:
        chosen[batch.mask] = call(helper, batch.valid())
    return replace(batch, selected=chosen)


@dataclass(frozen=True)
class Reference:
    """A loss over the tokens with mask 1."""

    values: list[float]
    gradient: list[float]
    """Of ``sum_t c_t l_t``, ``c`` the weights, with respect to the log-probs."""
    high: list[bool]
    low: list[bool]


@dataclass(frozen=True)
class Row:
    lp: list[float]
    old: list[float]
    a: list[float]
    selected: list[bool]
    c: list[float]


def reference(name: str, batch: Batch, options: Mapping[str, object]) -> Reference:
    """``batch`` holds valid tokens only; options not given have the library's defaults."""
    chosen = LOSSES[name].options.model_validate(options).model_dump()
    result = Reference([], [], [], [])
    starts = batch.offsets.tolist()
    columns = (batch.logprobs, batch.old_logprobs, batch.advantages, batch.selected, batch.weights)
    for row in range(batch.rows):
        here = slice(starts[row], starts[row + 1])
        of_row = ROWS[name](Row(*(column[here].tolist() for column in columns)), chosen)
        result.values.extend(of_row.values)
        result.gradient.extend(of_row.gradient)
        result.high.extend(of_row.high)
        result.low.extend(of_row.low)
    return result


def clamp(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def rho_and_slope(lp: float, old: float) -> tuple[float, float]:
    """``exp(clamp(lp - old, -20, 20))`` and its derivative by ``lp``."""
    rho = math.exp(clamp(lp - old, -20, 20))
    return rho, rho if -20 <= lp - old <= 20 else 0.0


def clipped(a: float, ratio: float, slope: float, low: float, high: float) -> tuple[float, float, bool, bool]:
    """``max(-A s, -A clip(s))``: the clip binds where it makes the objective worse."""
    if a > 0 and ratio > 1 + high:
        return -a * (1 + high), 0.0, True, False
    if a < 0 and ratio < 1 - low:
        return -a * (1 - low), 0.0, False, True
    return -a * ratio, -a * slope, False, False


TokenResult = tuple[float, float, bool, bool]
"""Value, derivative by the token's log-prob, clipped high, clipped low."""


def ppo_clip(lp: float, old: float, a: float, selected: bool, o: dict[str, Any]) -> TokenResult:
    rho, slope = rho_and_slope(lp, old)
    value, slope, high, low = clipped(a, rho, slope, o["clip_low"], o["clip_high"])
    if o["dual_clip"] is not None and a < 0 and value > -a * o["dual_clip"]:
        return -a * o["dual_clip"], 0.0, True, False
    return value, slope, high, low


def cispo(lp: float, old: float, a: float, selected: bool, o: dict[str, Any]) -> TokenResult:
    rho, _ = rho_and_slope(lp, old)
    low, high = 1 - o["clip_low"], 1 + o["clip_high"]
    weight = clamp(rho, low, high)
    return -weight * a * lp, -weight * a, rho > high, rho < low


def sapo(lp: float, old: float, a: float, selected: bool, o: dict[str, Any]) -> TokenResult:
    rho, slope = rho_and_slope(lp, old)
    tau = o["tau_pos"] if a > 0 else o["tau_neg"]
    x = tau * (rho - 1)
    gate = 1 / (1 + math.exp(-x)) if x < 700 else 1.0
    other = 1 / (1 + math.exp(x)) if x < 700 else 0.0  # 1 - gate
    return -a * 4 / tau * gate, -a * 4 * gate * other * slope, False, False


def reinforce(lp: float, old: float, a: float, selected: bool, o: dict[str, Any]) -> TokenResult:
    return -a * lp, -a, False, False


def clip_cov(lp: float, old: float, a: float, selected: bool, o: dict[str, Any]) -> TokenResult:
    rho, slope = rho_and_slope(lp, old)
    value, slope, high, low = clipped(a, rho, slope, o["clip_low"], o["clip_high"])
    return (0.0, 0.0, high, low) if selected else (value, slope, high, low)


def kl_cov(lp: float, old: float, a: float, selected: bool, o: dict[str, Any]) -> TokenResult:
    rho, slope = rho_and_slope(lp, old)
    if not selected:
        return -a * rho, -a * slope, False, False
    sign = (lp > old) - (lp < old)
    return -a * rho + o["coef"] * abs(lp - old), -a * slope + o["coef"] * sign, False, False


def dppo(lp: float, old: float, a: float, change: float, o: dict[str, Any]) -> TokenResult:
    if a > 0 and lp > old and change > o["bound_high"]:
        return 0.0, 0.0, True, False
    if a < 0 and lp < old and change > o["bound_low"]:
        return 0.0, 0.0, False, True
    rho, _ = rho_and_slope(lp, old)
    weight = min(rho, o["cap"])
    return -a * weight * lp, -a * weight, False, False


def dppo_tv(lp: float, old: float, a: float, selected: bool, o: dict[str, Any]) -> TokenResult:
    p, p_old = math.exp(lp), math.exp(old)
    others = abs((1 - p) - (1 - p_old))
    return dppo(lp, old, a, (abs(p - p_old) + others) / 2, o)


def dppo_kl(lp: float, old: float, a: float, selected: bool, o: dict[str, Any]) -> TokenResult:
    p, p_old = math.exp(lp), math.exp(old)
    change = p_old * (old - lp) + (1 - p_old) * (math.log1p(-p_old) - math.log1p(-p))
    return dppo(lp, old, a, change, o)


def dro(lp: float, old: float, a: float, selected: bool, o: dict[str, Any]) -> TokenResult:
    return -(a * lp - o["beta"] / 2 * (lp - old) ** 2), -(a - o["beta"] * (lp - old)), False, False


def token_by_token(token: Callable[[float, float, float, bool, dict[str, Any]], TokenResult]) -> "RowReference":
    def row_reference(row: Row, options: dict[str, Any]) -> Reference:
        results = [token(*each, options) for each in zip(row.lp, row.old, row.a, row.selected, strict=True)]
        return Reference(
            values=[value for value, _, _, _ in results],
            gradient=[c * slope for c, (_, slope, _, _) in zip(row.c, results, strict=True)],
            high=[high for _, _, high, _ in results],
            low=[low for _, _, _, low in results],
        )

    return row_reference


def gspo(row: Row, options: dict[str, Any]) -> Reference:
    """``ratio_t = exp(min(10, lp_t - sg(lp_t) + sg(log s)))``: its derivative by ``lp_t`` is itself, below the cap."""
    result = Reference([], [], [], [])
    if not row.lp:
        return result
    log_s = math.fsum(lp - old for lp, old in zip(row.lp, row.old, strict=True)) / len(row.lp)
    ratio = math.exp(min(10.0, log_s))
    for a, c in zip(row.a, row.c, strict=True):
        slope = ratio if log_s <= 10 else 0.0
        value, slope, high, low = clipped(a, ratio, slope, options["clip_low"], options["clip_high"])
        result.values.append(value)
        result.gradient.append(c * slope)
        result.high.append(high)
        result.low.append(low)
    return result


def geo_mean(row: Row, options: dict[str, Any]) -> Reference:
    """``l = -mean(A) exp(mean(y))`` at every token; ``dl / dlp_u = l / T`` where ``y_u`` is not clipped."""
    size = len(row.lp)
    clipped_log_ratios, free, high, low = [], [], [], []
    for lp, old, a in zip(row.lp, row.old, row.a, strict=True):
        x = clamp(lp - old, -20, 20)
        high.append(a > 0 and x > options["clip_high"])
        low.append(a < 0 and x < -options["clip_low"])
        clipped_log_ratios.append(options["clip_high"] if high[-1] else -options["clip_low"] if low[-1] else x)
        free.append(not high[-1] and not low[-1] and -20 <= lp - old <= 20)
    if not size:
        return Reference([], [], [], [])
    loss = -math.fsum(row.a) / size * math.exp(math.fsum(clipped_log_ratios) / size)
    total = math.fsum(row.c)
    return Reference([loss] * size, [total * loss / size if each else 0.0 for each in free], high, low)


RowReference = Callable[[Row, dict[str, Any]], Reference]
ROWS: dict[str, RowReference] = {
    "ppo_clip": token_by_token(ppo_clip),
    "gspo": gspo,
    "geo_mean": geo_mean,
    "cispo": token_by_token(cispo),
    "sapo": token_by_token(sapo),
    "reinforce": token_by_token(reinforce),
    "clip_cov": token_by_token(clip_cov),
    "kl_cov": token_by_token(kl_cov),
    "dppo_tv": token_by_token(dppo_tv),
    "dppo_kl": token_by_token(dppo_kl),
    "dro": token_by_token(dro),
}
