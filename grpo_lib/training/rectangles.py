"""Attention of packed rows without a kernel for them: rows of similar length share a rectangle of plain SDPA.

``T`` tokens of ``b`` rows stand one after another, a prompt that rows share once; spread over rectangles, each row with
its prompt, they are ``P >= T`` places, and what is padding is known from lengths. Only attention sees the rectangles:
the rest of the model runs on the ``T`` tokens.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grpo_lib.training.row_gather import RowGather, take_rows

SHORTEST, SPREAD = 0.88, 8
"""A rectangle takes rows of at least this fraction of its longest, and those up to this many tokens shorter."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where each token of packed rows stands for attention."""

    spread: RowGather
    """The token at each of the ``P`` places; a row's padding repeats its last token."""
    place: Tensor
    """``int64[T]``: a place of each token, the first of several."""


@dataclass(frozen=True, kw_only=True)
class Rectangles(Placed):
    """One after another."""

    shapes: list[tuple[int, int]]
    """Rows and width of each, widest first."""


class PackedRows:
    """Rows of a micro-batch, with what attention derives from them once instead of in every layer.

    Args:
        offsets: ``int32[b+1]``: of whole rows, each with its prompt, one after another: ``E`` tokens.
        row_tokens: ``int64[E]``, on the CPU: the packed tokens that these are, where rows share a prompt; None: one
            after another.
        tokens: ``T``, of all packed tokens; None: ``E``.
    """

    def __init__(self, offsets: Tensor, row_tokens: Tensor | None = None, tokens: int | None = None) -> None:
        self.offsets = offsets
        self.row_tokens = row_tokens
        self.tokens = int(offsets[-1]) if tokens is None else tokens
        self._masks: dict[tuple[int, int], Tensor] = {}

    @cached_property
    def whole(self) -> Placed | None:
        """The whole rows one after another, as a kernel takes them; None: the packed tokens are that."""
        if self.row_tokens is None:
            return None
        device = self.offsets.device
        return Placed(
            spread=RowGather.of(self.row_tokens, self.tokens).to(device),
            place=_first_places(self.row_tokens, self.tokens).to(device),
        )

    @cached_property
    def rectangles(self) -> Rectangles:
        offsets, device = self.offsets.cpu().long(), self.offsets.device
        lengths = offsets.diff()
        order = torch.argsort(lengths, descending=True, stable=True)
        longest = lengths[order]
        shapes, tokens, reals, start = [], [], [], 0
        while start < len(order):
            width = int(longest[start])
            shortest = min(SHORTEST * width, width - SPREAD)
            end = int(torch.searchsorted(-longest, -shortest, right=True))
            rows, column = order[start:end, None], torch.arange(width)
            tokens.append((offsets[rows] + torch.minimum(column, lengths[rows] - 1)).flatten())
            reals.append((column < lengths[rows]).flatten())
            shapes.append((end - start, width))
            start = end
        source, real = torch.cat(tokens), torch.cat(reals).nonzero().squeeze(1)
        if self.row_tokens is not None:
            source = self.row_tokens[source]
        place = real[_first_places(source[real], self.tokens)]
        spread = RowGather.of(source, self.tokens, real).to(device)
        return Rectangles(shapes=shapes, spread=spread, place=place.to(device))

    def band(self, width: int, window: int) -> Tensor:
        """``bool[width, width]``: a token sees itself and the ``window - 1`` tokens before it."""
        if (width, window) not in self._masks:
            seen = torch.ones(width, width, dtype=torch.bool, device=self.offsets.device)
            self._masks[width, window] = seen.tril().triu(1 - window)
        return self._masks[width, window]


def rectangle_attention(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Causal attention within each row, ``[T, heads, d_v]``. Differentiable.

    Args:
        query: ``[T, heads, d]``, of the packed tokens.
        key: ``[T, kv_heads, d]``; each of its heads serves ``heads / kv_heads`` of the query's.
        value: ``[T, kv_heads, d_v]``.
        rows: of the ``T`` tokens.
        scale: of the scores.
        window: tokens that a token sees, itself included; None for all up to itself.
        softcap: scores ``s`` become ``softcap * tanh(s / softcap)``; None leaves them.
    """
    placed = rows.rectangles
    sizes = [height * width for height, width in placed.shapes]
    spread = [placed.spread(each).split(sizes) for each in (query, key, value)]
    results = []
    for (height, width), *parts in zip(placed.shapes, *spread, strict=True):
        q, k, v = (each.unflatten(0, (height, width)).transpose(1, 2) for each in parts)  # [height, heads, width, d]
        sees = width if window is None else min(window, width)
        if softcap is not None:
            output = _capped_attention(q, k, v, rows.band(width, sees), scale, softcap)
        elif sees < width:
            output = scaled_dot_product_attention(q, k, v, rows.band(width, sees), scale=scale, enable_gqa=True)
        else:
            output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        results.append(output.transpose(1, 2).flatten(0, 1))
    return collect(torch.cat(results), placed.place)


def _capped_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, softcap: float) -> Tensor:
    """``[height, heads, width, d_v]``; holds all scores, which no kernel of SDPA would."""
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * (scale / softcap))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32)
    return weights.to(value.dtype) @ value


def _first_places(source: Tensor, tokens: int) -> Tensor:
    """``int64[T]``: the first place of each token among ``source int64[P]``."""
    return torch.full((tokens,), len(source)).scatter_reduce(0, source, torch.arange(len(source)), "amin")


def collect(places: Tensor, place: Tensor) -> Tensor:
    """Tokens ``[T, ...]`` from their places ``[P, ...]``; padding and repetitions are dropped. Differentiable."""
    collected: Tensor = _Collect.apply(places, place)
    return collected


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, places: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.places = len(places)
        return take_rows(places, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0]
        result = gradient.new_zeros(ctx.places, *gradient.shape[1:])
        return result.index_copy_(0, ctx.saved_tensors[0], gradient), None
