"""What the update and the scoring stages read off the head at each response token, in tiles of tokens x vocabulary.

The logits ``[n, V]`` are never held: the forward pass keeps sums per token, relative to the largest logit so far, and
the backward pass makes each tile of logits anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE_VALUES = 2**20
"""Logits of a tile on a CPU: 4 MiB in float32 stay in its cache. On a GPU 32 times as many, for fewer launches."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """How hidden states become logits: ``softcap tanh(z / softcap)``, ``z = (hidden @ weight.T + bias) multiplier``."""

    weight: Tensor
    """``[V, h]``."""
    bias: Tensor | None = None
    """``[V]``."""
    multiplier: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Of ``n`` tokens under ``softmax(logits / temperature)``: each ``float32[n]``, float64 with such hidden states."""

    logprobs: Tensor
    entropy: Tensor
    """In nats."""
    kl: Tensor | None = None
    """In nats, to the reference, over the whole vocabulary; with gradient to the policy."""
    ref_logprobs: Tensor | None = None
    """Of the same tokens under the reference, without gradient."""
    sum_squared_probs: Tensor | None = None
    """``sum_v p_v^2``, without gradient."""


def token_scores(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    *,
    reference: tuple[Tensor, Head] | None = None,
    squares: bool = False,
) -> TokenScores:
    """Scores tokens; differentiable in ``hidden``, ``head.weight`` and ``head.bias``.

    Args:
        hidden: ``[n, h]``: final hidden states, each of which predicts a token; ``n`` may be 0.
        targets: ``int64[n]``: the tokens.
        reference: hidden states ``[n, h']`` and head (of the same vocabulary) of another policy, for the KL.
        squares: whether to sum the squared probabilities.
    """
    setting = _Setting(head, targets, temperature, reference, squares)
    logprobs, entropy, kl, ref_logprobs, sums = _TokenScores.apply(hidden, head.weight, head.bias, setting)
    return TokenScores(logprobs=logprobs, entropy=entropy, kl=kl, ref_logprobs=ref_logprobs, sum_squared_probs=sums)


# --- forward and backward pass ----------------------------------------------------------------------------------------


class _Setting(NamedTuple):
    """The arguments of ``token_scores`` that are not differentiated."""

    head: Head
    targets: Tensor
    temperature: float
    reference: tuple[Tensor, Head] | None
    squares: bool


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, setting: _Setting) -> tuple[Any, ...]:
        head, targets, temperature, reference, squares = setting
        policy, other = _Sums(hidden), _Sums(hidden)
        every_row, every_column = _tiles(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for columns, rows in product(every_column, every_row):
                logits, gap = tile_logits(hidden, head, temperature, rows, columns), None
                if reference is not None:
                    ref_logits = tile_logits(*reference, temperature, rows, columns)
                    gap = logits - ref_logits
                    other.add(ref_logits, targets, rows, columns)
                policy.add(logits, targets, rows, columns, gap, squares)
        ctx.set_materialize_grads(False)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(hidden, weight, bias)
            ctx.rest = setting, policy, other
        constants = [each.to(policy.top.dtype) for each in (other.logprobs, policy.squared / policy.total**2)]
        ctx.mark_non_differentiable(*constants)
        wanted = (True, True, reference is not None, reference is not None, squares)
        results = (
            *(each.to(policy.top.dtype) for each in (policy.logprobs, policy.entropy, policy.kl(other))),
            *constants,
        )
        return tuple(each if want else None for each, want in zip(results, wanted, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(each is None for each in gradients):
            return None, None, None, None
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad
        hidden, weight, bias = inputs
        setting, policy, other = ctx.rest
        exact = {"dtype": policy.top.dtype, "device": hidden.device}
        of_hidden = torch.zeros(hidden.shape, **exact) if needed[0] else None
        of_weight = torch.empty_like(weight) if needed[1] else None
        of_bias = torch.zeros(bias.shape, **exact) if needed[2] else None
        factors = _factors(policy, other, gradients, setting)
        every_row, every_column = _tiles(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for columns in every_column:
                block = torch.zeros(weight[columns].shape, **exact) if of_weight is not None else None
                for rows in every_row:
                    tile = _tile_gradient(hidden, setting, (policy.top, other.top), factors, rows, columns)
                    if of_hidden is not None:
                        of_hidden[rows] += _product(tile, weight[columns], hidden)
                    if block is not None:
                        block += _product(tile.T, hidden[rows], hidden)
                    if of_bias is not None:
                        of_bias[columns] += tile.sum(0)
                if of_weight is not None:
                    of_weight[columns] = block  # type: ignore[assignment]
        pairs = zip((of_hidden, of_weight, of_bias), inputs, strict=True)
        return *(None if each is None else each.to(given.dtype) for each, given in pairs), None


class _Sums:
    """Of ``n`` tokens, ``[n]`` each, over the vocabulary so far; ``x = logits - top``, the largest logit so far."""

    def __init__(self, hidden: Tensor) -> None:
        n, dtype, device = len(hidden), _dtype(hidden), hidden.device
        self.top = torch.full((n,), torch.finfo(dtype).min, dtype=dtype, device=device)
        # The target's logit; sums of e^x, e^x x, e^x (logits - reference's logits), e^2x.
        zeros = torch.zeros(5, n, dtype=torch.float64, device=device)
        self.logit, self.total, self.moment, self.cross, self.squared = zeros

    def add(
        self, x: Tensor, targets: Tensor, rows: slice, columns: slice, gap: Tensor | None = None, squares: bool = False
    ) -> None:
        """Adds the tile of logits ``x [t, v]``; it is overwritten, and so is ``gap``."""
        index, inside = _place(targets[rows], columns)
        self.logit[rows] += torch.where(inside, x.gather(1, index), 0.0)[:, 0]
        top = torch.maximum(self.top[rows], x.amax(1))
        rise = top.double() - self.top[rows]
        self.top[rows], shrink = top, (-rise).exp()
        e = x.sub_(top[:, None]).exp()
        self.moment[rows] = shrink * (self.moment[rows] - rise * self.total[rows]) + x.mul_(e).sum(1)
        self.total[rows] = shrink * self.total[rows] + e.sum(1)
        if gap is not None:
            self.cross[rows] = shrink * self.cross[rows] + gap.mul_(e).sum(1)
        if squares:
            self.squared[rows] = shrink**2 * self.squared[rows] + e.square_().sum(1)

    @property
    def logprobs(self) -> Tensor:
        return self.logit - self.top - self.total.log()

    @property
    def entropy(self) -> Tensor:
        return self.total.log() - self.moment / self.total

    def kl(self, other: "_Sums") -> Tensor:
        return self.cross / self.total - (self.top.double() - other.top) - (self.total / other.total).log()


class _Factors(NamedTuple):
    """``[n, 1]`` each, None for 0: see ``_tile_gradient``."""

    token: Tensor | None
    logprob: Tensor | None
    entropy: Tensor | None
    kl: Tensor | None
    entropy_shift: Tensor
    kl_shift: Tensor


def _factors(policy: _Sums, other: _Sums, gradients: Sequence[Tensor | None], setting: _Setting) -> _Factors:
    """From the gradients of the results; d H / d logit_v = -p_v (log p_v + H), d KL = p_v (log p_v - log q_v - KL)."""
    logprobs, entropy, kl = gradients[:3]
    scale = torch.full_like(policy.total, setting.head.multiplier / setting.temperature)
    share, log_total = scale / policy.total, policy.total.log()  # p_v = e^x_v / total

    def column(gradient: Tensor | None, by: Tensor) -> Tensor | None:
        return None if gradient is None else (gradient * by).to(policy.top.dtype)[:, None]

    return _Factors(
        token=column(logprobs, scale),
        logprob=column(logprobs, -share),
        entropy=column(entropy, -share),
        kl=column(kl, share),
        entropy_shift=(policy.entropy - log_total).to(policy.top.dtype)[:, None],
        kl_shift=(other.total.log() - log_total - policy.kl(other)).to(policy.top.dtype)[:, None],
    )


def _tile_gradient(
    hidden: Tensor, setting: _Setting, tops: tuple[Tensor, Tensor], factors: _Factors, rows: slice, columns: slice
) -> Tensor:
    """``[t, v]``: gradient of ``(hidden @ weight.T)_v``; ``x``, ``y`` are the policies' logits less their largest.

    ``token [v = target] + e^x_v (logprob + entropy (x_v + entropy_shift) + kl (x_v - y_v + kl_shift))``, times
    the slope of a softcap.
    """
    head, targets, temperature, reference, _ = setting
    token, logprob, entropy, kl = (None if each is None else each[rows] for each in factors[:4])
    x = tile_logits(hidden, head, temperature, rows, columns)
    slope = None if head.softcap is None else 1 - (x * (temperature / head.softcap)).square_()
    x.sub_(tops[0][rows, None])
    result = x.clamp(min=-70).exp_()  # 1e-31 is nothing here, and denormal numbers slow a CPU's products tenfold
    terms = []
    if kl is not None and reference is not None:
        y = tile_logits(*reference, temperature, rows, columns).sub_(tops[1][rows, None])
        terms.append(torch.sub(x, y, out=y).add_(factors.kl_shift[rows]).mul_(kl))
    if entropy is not None:
        terms.append(x.add_(factors.entropy_shift[rows]).mul_(entropy))
    if logprob is not None:
        terms.append(logprob)
    result.mul_(reduce(Tensor.add_, terms))
    if token is not None:
        index, inside = _place(targets[rows], columns)
        result.scatter_add_(1, index, token * inside)
    return result if slope is None else result.mul_(slope)


# --- tiles ------------------------------------------------------------------------------------------------------------


def _tiles(hidden: Tensor, weight: Tensor) -> tuple[list[slice], list[slice]]:
    """Cuts the ``n`` tokens and the vocabulary."""
    values = TILE_VALUES if hidden.device.type == "cpu" else 32 * TILE_VALUES
    t = max(1, min(len(hidden), isqrt(values)))
    v = min(values // t, 4 * isqrt(values))  # products round less when they add up blocks
    rows = [slice(i, min(i + t, len(hidden))) for i in range(0, len(hidden), t)]
    return rows, [slice(i, min(i + v, len(weight))) for i in range(0, len(weight), v)]


def tile_logits(hidden: Tensor, head: Head, temperature: float, rows: slice, columns: slice) -> Tensor:
    """``[t, v]``: logits over the temperature."""
    scale = head.multiplier / (head.softcap or temperature)
    tile = _product(hidden[rows], head.weight[columns].T, hidden, scale)
    if head.bias is not None:
        tile.add_(head.bias[columns], alpha=scale)
    return tile if head.softcap is None else tile.tanh_().mul_(head.softcap / temperature)


def _product(a: Tensor, b: Tensor, hidden: Tensor, scale: float = 1.0) -> Tensor:
    """``scale a @ b`` in the dtype of the results; on a GPU bfloat16 hidden states are multiplied as they are."""
    dtype = _dtype(hidden)
    if hidden.device.type == "cuda" and hidden.dtype == torch.bfloat16:
        return torch.mm(a.to(hidden.dtype), b.to(hidden.dtype), out_dtype=dtype).mul_(scale)
    return torch.addmm(a.new_zeros((), dtype=dtype), a.to(dtype), b.to(dtype), beta=0, alpha=scale)


def _place(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """``int64[t, 1]``, ``bool[t, 1]``: where among the columns the targets are, and whether they are."""
    index, last = targets[:, None] - columns.start, columns.stop - columns.start - 1
    return index.clamp(0, last), (index >= 0) & (index <= last)


def _dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32
