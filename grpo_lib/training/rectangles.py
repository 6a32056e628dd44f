"""Attention of packed rows without a kernel for them: rows of similar length share a rectangle of plain SDPA.

``T`` tokens of ``b`` rows stand one after another; spread over rectangles they are ``P >= T`` places, and what is
padding is known from lengths. Only attention sees the rectangles: the rest of the model runs on the ``T`` tokens.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SHORTEST, SPREAD = 0.88, 8
"""A rectangle takes rows of at least this fraction of its longest, and those up to this many tokens shorter."""


@dataclass(frozen=True, kw_only=True)
class Rectangles:
    """Where each token of packed rows stands."""

    shapes: list[tuple[int, int]]
    """Rows and width of each rectangle, widest first; they lie one after another."""
    source: Tensor
    """``int64[P]``: the token at each place; a row's padding repeats its last token."""
    place: Tensor
    """``int64[T]``: the place of each token."""


class PackedRows:
    """Rows of a micro-batch, with what attention derives from them once instead of in every layer.

    Args:
        offsets: ``int32[b+1]``: of the rows in the packed tokens.
    """

    def __init__(self, offsets: Tensor) -> None:
        self.offsets = offsets
        self._masks: dict[tuple[int, int], Tensor] = {}

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
        source, real = torch.cat(tokens), torch.cat(reals)
        place = torch.empty(int(offsets[-1]), dtype=torch.int64)
        place[source[real]] = real.nonzero().squeeze(1)
        return Rectangles(shapes=shapes, source=source.to(device), place=place.to(device))

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
        query: ``[T, heads, d]``.
        key: ``[T, kv_heads, d]``; each of its heads serves ``heads / kv_heads`` of the query's.
        value: ``[T, kv_heads, d_v]``.
        rows: of the ``T`` tokens.
        scale: of the scores.
        window: tokens that a token sees, itself included; None for all up to itself.
        softcap: scores ``s`` become ``softcap * tanh(s / softcap)``; None leaves them.
    """
    placed = rows.rectangles
    sizes = [height * width for height, width in placed.shapes]
    spread = [_Spread.apply(each, placed.source, placed.place).split(sizes) for each in (query, key, value)]
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
    return _Collect.apply(torch.cat(results), placed.place)


def _capped_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, softcap: float) -> Tensor:
    """``[height, heads, width, d_v]``; holds all scores, which no kernel of SDPA would."""
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * (scale / softcap))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32)
    return weights.to(value.dtype) @ value


class _Spread(torch.autograd.Function):
    """Tokens ``[T, ...]`` to their places ``[P, ...]``.

    No gradient comes back from padding: a causal row's tokens don't see it, and what it sees itself is dropped. So
    the backward pass is a gather too, several times as fast as adding by index.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, source: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return tokens.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, ctx.saved_tensors[0]), None, None


class _Collect(torch.autograd.Function):
    """The inverse: places ``[P, ...]`` to tokens ``[T, ...]``; padding is dropped."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.places = len(places)
        return places.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0]
        result = gradient.new_zeros(ctx.places, *gradient.shape[1:])
        return result.index_copy_(0, ctx.saved_tensors[0], gradient), None
