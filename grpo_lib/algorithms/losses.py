"""Policy losses per token, before aggregation (``aggregation.py`` is the one place that divides).

A loss sees only tokens with ``response_mask`` 1: a masked token must not reach the gradient, not even as ``0 * inf``.
Of the columns it names those it wants, each ``[N]`` over whole rows, and returns a ``PolicyLoss``. ``rho`` is
``exp(clamp(logprobs - old_logprobs, -20, 20))``. The importance weight of the rollout correction multiplies the values
afterwards, in one place, for every loss.

Traits: ``aggregation`` (the default one, else token-mean); ``zero_without_advantage`` (False: a row of zero
advantages has a gradient all the same). A ``helper`` chooses tokens of the *whole* mini-batch before the first backward
pass, so that the choice does not depend on micro-batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from grpo_lib.algorithms.registry import ClipHigh, ClipLow, Option, Registry
from grpo_lib.algorithms.selection import highest_covariance, random_in_covariance_band
from grpo_lib.data.ragged import repeat_rows, segment_mean

DualClip = Annotated[float, Option(gt=1, description="Bound on -ratio * advantage where A < 0; null: off.")]


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """What a policy loss says of each token."""

    values: Tensor
    """``[N]``, with gradient: the loss of the token."""
    ratio: Tensor
    """``[N]``, no gradient: new over old probability, of the token or of its row, as the loss uses it."""
    clipped_high: Tensor
    """``bool[N]``: the gradient was cut because the ratio is above its range."""
    clipped_low: Tensor
    """``bool[N]``: the gradient was cut because the ratio is below its range."""


LOSSES: Registry[Callable[..., PolicyLoss]] = Registry(
    "policy loss",
    {
        "logprobs": "`[N]`: log pi_theta of the token, with gradient",
        "old_logprobs": "`[N]`: log pi_old",
        "advantages": "`[N]`",
        "offsets": "`int64[B+1]`: of the rows",
        "selected": "`bool[N]`: chosen by the loss's helper over the whole mini-batch",
    },
    helper_columns=("logprobs", "advantages", "draws"),
)


@LOSSES.register(
    "ppo_clip",
    aliases=["vanilla"],
    formula="max(-A rho, -A clip(rho, 1-clip_low, 1+clip_high)); where A < 0 at most -A dual_clip",
    paper="Schulman et al. 2017, PPO, eq. 7, arXiv:1707.06347; dual clip: Ye et al. 2020, arXiv:1912.09729; "
    "clip-higher: Yu et al. 2025, DAPO, arXiv:2503.14476",
    use="the default; several updates on one batch without leaving the trust region",
)
def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    dual_clip: DualClip | None = 3.0,
) -> PolicyLoss:
    """PPO's clipped surrogate; ``clip_high > clip_low`` keeps rare tokens alive."""
    log_ratio = (logprobs - old_logprobs).detach()
    return _clipped(logprobs, log_ratio, advantages, clip_low, clip_high, dual_clip)


@LOSSES.register(
    "gspo",
    formula="ppo_clip on the row's ratio s = exp(mean_m(lp - lp_old)), its gradient token by token",
    paper="Zheng et al. 2025, GSPO (its GSPO-token form), arXiv:2507.18071",
    use="mixture-of-experts models, whose single-token ratios are noise",
    aggregation="seq-mean-token-mean",
)
def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    offsets: Tensor,
    *,
    clip_low: ClipLow = 3e-4,
    clip_high: ClipHigh = 4e-4,
) -> PolicyLoss:
    """Value ``s`` and gradient ``s * grad lp`` at every token: ``exp(lp - sg(lp) + sg(log s))``, exponent <= 10."""
    log_row = segment_mean((logprobs - old_logprobs).detach(), offsets)
    return _clipped(
        logprobs, repeat_rows(log_row, offsets), advantages, clip_low, clip_high, None, exponents=(-1e30, 10)
    )


@LOSSES.register(
    "geo_mean",
    aliases=["gmpo"],
    formula="per row -mean_m(A) exp(mean_m(log-ratio, clipped to [-clip_low, clip_high] where A makes it pessimistic))",
    paper="Zhao et al. 2025, Geometric-Mean Policy Optimization, arXiv:2507.20673",
    use="steadier than token ratios: one outlier moves a geometric mean little",
    aggregation="seq-mean-token-mean",
)
def geo_mean(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    offsets: Tensor,
    *,
    clip_low: Annotated[float, Option(gt=0, description="The log-ratio is clipped below -clip_low.")] = 0.4,
    clip_high: Annotated[float, Option(gt=0, description="The log-ratio is clipped above clip_high.")] = 0.4,
) -> PolicyLoss:
    """Every token of a row has the row's value; with ``seq-mean-token-mean`` rows are averaged as in the paper."""
    x = (logprobs - old_logprobs).clamp(-20, 20)
    high, low = (x > clip_high) & (advantages > 0), (x < -clip_low) & (advantages < 0)
    clipped = torch.where(high, clip_high, torch.where(low, -clip_low, x))
    ratio = segment_mean(clipped, offsets).exp()
    rows = -segment_mean(advantages, offsets) * ratio
    return PolicyLoss(
        values=repeat_rows(rows, offsets),
        ratio=repeat_rows(ratio.detach(), offsets),
        clipped_high=high,
        clipped_low=low,
    )


@LOSSES.register(
    "cispo",
    formula="-sg(clip(rho, 1-clip_low, 1+clip_high)) A lp",
    paper="MiniMax 2025, MiniMax-M1, arXiv:2506.13585",
    use="no token loses its gradient: rare reasoning tokens keep learning",
)
def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: Annotated[float, Option(gt=0, le=1, description="The weight is at least 1 - clip_low.")] = 1.0,
    clip_high: ClipHigh = 0.28,
) -> PolicyLoss:
    """REINFORCE with a clipped importance weight that has no gradient."""
    ratio = _ratio(logprobs, old_logprobs).detach()
    values = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages * logprobs
    return PolicyLoss(values=values, ratio=ratio, clipped_high=ratio > 1 + clip_high, clipped_low=ratio < 1 - clip_low)


@LOSSES.register(
    "sapo",
    formula="-A (4/tau) sigmoid(tau (rho - 1)), tau = tau_pos where A > 0, else tau_neg",
    paper="Gao et al. 2025, Soft Adaptive Policy Optimization, arXiv:2511.20347",
    use="a soft gate in place of the clip's hard edge",
)
def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    tau_pos: Annotated[float, Option(gt=0, description="Sharpness of the gate where A > 0.")] = 1.0,
    tau_neg: Annotated[
        float, Option(gt=0, description="Sharpness where A <= 0; more than tau_pos is steadier.")
    ] = 1.05,
) -> PolicyLoss:
    """At rho = 1 the gate's slope is 1; nothing is ever clipped."""
    log_ratio = (logprobs - old_logprobs).detach()
    ratio = log_ratio.clamp(-20, 20).exp()
    tau = tau_neg + (advantages > 0).to(ratio.dtype) * (tau_pos - tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1))
    slopes = -4 * advantages * gate * (1 - gate) * ratio * (log_ratio.abs() <= 20)
    return _unclipped(_Known.apply(logprobs, -4 * advantages * gate / tau, slopes), ratio)


@LOSSES.register(
    "reinforce",
    aliases=["gpg"],
    formula="-A lp",
    paper="Williams 1992, REINFORCE; Chu et al. 2025, GPG, arXiv:2504.02546",
    use="one update a batch, or with an importance weight (presets pg_is, pg_rs)",
    takes_ratio=False,
)
def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> PolicyLoss:
    """Plain policy gradient."""
    return _unclipped(-advantages * logprobs, _ratio(logprobs, old_logprobs))


@LOSSES.register(
    "clip_cov",
    formula="ppo_clip without dual clip; a random part of the tokens with (A - mean A)(lp - mean lp) in (lb, ub) is "
    "taken out",
    paper="Cui et al. 2025, The Entropy Mechanism of RL for Reasoning LMs, arXiv:2505.22617",
    use="keeps entropy up: those tokens are the ones that use it up",
    helper=random_in_covariance_band,
)
def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    selected: Tensor,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
) -> PolicyLoss:
    """``selected`` tokens have value and gradient 0; they stay in the denominators."""
    loss = _clipped(logprobs, (logprobs - old_logprobs).detach(), advantages, clip_low, clip_high, None)
    return replace(loss, values=loss.values.masked_fill(selected, 0.0))


@LOSSES.register(
    "kl_cov",
    formula="-A rho, plus coef |lp - lp_old| on the kl_cov_ratio of tokens with the highest (A - mean A)(lp - mean lp)",
    paper="Cui et al. 2025, The Entropy Mechanism of RL for Reasoning LMs, arXiv:2505.22617",
    use="as clip_cov, with a penalty in place of the cut",
    helper=highest_covariance,
    zero_without_advantage=False,
)
def kl_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    selected: Tensor,
    *,
    coef: Annotated[float, Option(ge=0, description="Weight of the penalty.")] = 1.0,
) -> PolicyLoss:
    """The penalty holds the tokens back that lower the entropy most."""
    ratio = _ratio(logprobs, old_logprobs)
    penalty = coef * (logprobs - old_logprobs).abs()
    return _unclipped(-advantages * ratio + penalty * selected, ratio)


Cap = Annotated[float, Option(ge=1, description="Bound c on the ratio in the weight.")]


@LOSSES.register(
    "dppo_tv",
    formula="-A sg(min(rho, c)) lp where |pi - pi_old| <= bound in the direction of A, else 0",
    paper="Qi et al. 2026, Rethinking the Trust Region in LLM RL (DPPO), eq. 11-13, arXiv:2602.04879",
    use="a trust region in probability, not in ratio: rare tokens may move, common ones may not",
)
def dppo_tv(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    bound_low: Annotated[float, Option(gt=0, le=1, description="Bound on the fall of pi where A < 0.")] = 0.2,
    bound_high: Annotated[float, Option(gt=0, le=1, description="Bound on the rise of pi where A > 0.")] = 0.2,
    cap: Cap = 20.0,
) -> PolicyLoss:
    """The divergence is the total variation of "this token or another"."""
    change = (logprobs.detach().exp() - old_logprobs.exp()).abs()
    return _dppo(logprobs, old_logprobs, advantages, change, bound_low, bound_high, cap)


@LOSSES.register(
    "dppo_kl",
    formula="as dppo_tv with KL(old || new) of the token against all others in place of the total variation",
    paper="Qi et al. 2026, Rethinking the Trust Region in LLM RL (DPPO), eq. 11, 12, 14, arXiv:2602.04879",
    use="as dppo_tv, stricter where probabilities are near 0 or 1",
)
def dppo_kl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    bound_low: Annotated[float, Option(gt=0, description="Bound in nats where pi falls and A < 0.")] = 0.05,
    bound_high: Annotated[float, Option(gt=0, description="Bound in nats where pi rises and A > 0.")] = 0.05,
    cap: Cap = 20.0,
) -> PolicyLoss:
    """Binary KL: ``p_old log(p_old/p) + (1-p_old) log((1-p_old)/(1-p))``."""
    new = logprobs.detach().clamp(max=-1e-7)
    old = old_logprobs.clamp(max=-1e-7)
    change = old.exp() * (old - new) - old.expm1() * (torch.log(-old.expm1()) - torch.log(-new.expm1()))
    return _dppo(logprobs, old_logprobs, advantages, change, bound_low, bound_high, cap)


@LOSSES.register(
    "dro",
    formula="-(A lp - beta/2 (lp - lp_old)^2)",
    paper="Richemond et al. 2024, Offline Regularised RL (DRO), arXiv:2405.19107",
    use="off-policy batches, held to the old policy by a square",
    zero_without_advantage=False,
    takes_ratio=False,
)
def dro(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    beta: Annotated[float, Option(ge=0, description="Weight of the square.")] = 0.1,
) -> PolicyLoss:
    """Policy gradient with a quadratic pull to the old policy."""
    values = beta / 2 * (logprobs - old_logprobs).square() - advantages * logprobs
    return _unclipped(values, _ratio(logprobs, old_logprobs))


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> Tensor:
    """``0.5 max((V-G)^2, (clip(V, V_old-eps, V_old+eps) - G)^2)`` per token, ``[N]``; unclipped with ``clip`` None.

    Schulman et al. 2017 in the form of Engstrom et al. 2020, section 3.
    """
    if clip is None:
        return (values - returns).square() / 2
    moved = (values - old_values).detach()
    near = moved.clamp(-clip, clip)
    error, clipped = (values - returns).detach(), old_values + near - returns
    squares, flat = error.square(), clipped.square()
    learns = (squares >= flat) | (near == moved)
    return _Known.apply(values, torch.maximum(squares, flat) / 2, error * learns)


class _Known(torch.autograd.Function):
    """A loss per token whose value and slope by the input are known: a few passes over memory instead of dozens."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
        ctx.save_for_backward(slopes)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] * ctx.saved_tensors[0], None, None


def _clipped(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    exponents: tuple[float, float] = (-20, 20),
) -> PolicyLoss:
    """``max(-A ratio, -A clip(ratio))``, at most ``-A dual_clip`` where ``A < 0``; its slope is ``-A ratio`` inside.

    Both are ``-A clamp(ratio, lower, upper)`` with the bounds that the sign of ``A`` makes active: where ``A < 0`` the
    ratio is held between ``1 - clip_low`` and ``dual_clip``, elsewhere below ``1 + clip_high``.
    """
    bad = (advantages < 0).to(advantages.dtype)
    never = 1e30  # no ratio is above
    lower = bad * (1 - clip_low)
    upper = bad * ((dual_clip or never) - 1 - clip_high) + (1 + clip_high)
    exponent = log_ratio.clamp(*exponents)
    ratio = exponent.exp()
    held = ratio.clamp(lower, upper)
    values = -advantages * held
    slopes = values * ((held == ratio) & (exponent == log_ratio))
    return PolicyLoss(
        values=_Known.apply(logprobs, values, slopes),
        ratio=ratio,
        clipped_high=(ratio > upper) & (advantages != 0),
        clipped_low=ratio < lower,
    )


def _dppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    change: Tensor,
    bound_low: float,
    bound_high: float,
    cap: float,
) -> PolicyLoss:
    """Tokens whose probability moved too far already, in the direction that ``A`` pushes it, have no gradient."""
    ratio = _ratio(logprobs, old_logprobs).detach()
    high = (advantages > 0) & (ratio > 1) & (change > bound_high)
    low = (advantages < 0) & (ratio < 1) & (change > bound_low)
    values = (-advantages * ratio.clamp(max=cap) * ~(high | low)) * logprobs
    return PolicyLoss(values=values, ratio=ratio, clipped_high=high, clipped_low=low)


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs).clamp(-20, 20).exp()


def _unclipped(values: Tensor, ratio: Tensor) -> PolicyLoss:
    none = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyLoss(values=values, ratio=ratio.detach(), clipped_high=none, clipped_low=none)
