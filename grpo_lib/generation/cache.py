"""A key-value cache for batched decoding, plugged into Transformers.

Transformers' own ``DynamicCache`` copies the whole cache for every token. This one writes into spare room, which
doubles when it is used up, and attention reads only the part in use. Rows can be repeated and dropped.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_SDPA = "grouped_sdpa"
"""Name under which Transformers finds `grouped_attention`."""


class RoomyLayer(CacheLayerMixin):
    """Keys and values of one layer, each ``[rows, heads, capacity, head_dim]``, the first ``length`` in use."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends the states of new tokens; returns those of all tokens, as views."""
        end = self.length + key_states.shape[2]
        if self.length == 0:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
        else:
            if end > self.keys.shape[2]:
                self.keys, self.values = (_with_room(old, self.length, 2 * end) for old in (self.keys, self.values))
            self.keys[:, :, self.length : end] = key_states
            self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def take(self, rows: Tensor, room: int) -> None:
        """Becomes the cache of ``rows`` (``int64``, repetitions allowed) with room for ``room`` more tokens."""
        self.keys, self.values = (
            _with_room(old[:, :, : self.length][rows], self.length, self.length + room)
            for old in (self.keys, self.values)
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


class RoomyCache(Cache):
    """A cache of ``RoomyLayer`` for every layer of a model."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[RoomyLayer() for _ in range(layers)])

    def take(self, rows: Tensor, room: int) -> None:
        """Becomes the cache of ``rows`` (``int64``, repetitions allowed) with room for ``room`` more tokens."""
        for layer in self.layers:
            layer.take(rows, room)


def _with_room(states: Tensor, length: int, capacity: int) -> Tensor:
    rows, heads, _, head_dim = states.shape
    roomy = states.new_empty(rows, heads, capacity, head_dim)
    roomy[:, :, :length] = states[:, :, :length]
    return roomy


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """SDPA that does not copy keys and values for each query head when one token is decoded.

    The query heads ``[rows, heads, 1, head_dim]`` of a key-value head stand in for positions.
    """
    mask_per_row = attention_mask is None or attention_mask.shape[1:3] == (1, 1)
    if (
        query.shape[2] > 1
        or query.shape[1] == key.shape[1]
        or not mask_per_row
        or kwargs.get("position_bias") is not None
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    output = attend_to_cache(query, key, value, attention_mask, scaling)
    return output.transpose(1, 2), None


def attend_to_cache(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None
) -> Tensor:
    """Attention of one token a row: ``[rows, heads, 1, head_dim]``. Keys and values are not copied for query heads.

    Args:
        query: ``[rows, heads, 1, head_dim]``.
        key: ``[rows, shared, length, head_dim]``, as ``value``: each for ``heads / shared`` query heads.
        mask: ``[rows, 1, 1, length]``: what is added to the scores; bool: where they stay.
    """
    rows, heads, _, head_dim = query.shape
    shared = key.shape[1]
    grouped = query.reshape(rows, shared, -1, head_dim)
    if query.is_cpu and query.dtype == torch.float32:  # two batched products are faster than SDPA for a few queries
        if mask is None:
            added = query.new_zeros(1)
        else:
            added = as_additive(mask) if mask.dtype == torch.bool else mask
            added = added.expand(-1, shared, -1, -1).flatten(0, 1)
        scaling = head_dim**-0.5 if scaling is None else scaling
        scores = torch.baddbmm(added, grouped.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), alpha=scaling)
        output = torch.bmm(scores.softmax(-1), value.flatten(0, 1))
    else:
        output = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, heads, 1, -1)


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Makes a Transformers model that runs on SDPA run on `grouped_attention`."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(GROUPED_SDPA, grouped_attention)
        AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
        model.set_attn_implementation(GROUPED_SDPA)


def as_additive(valid: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A mask that is added to scores: 0 where ``valid``, ``bool`` of any shape, and -inf elsewhere."""
    return torch.zeros(valid.shape, dtype=dtype, device=valid.device).masked_fill_(~valid, float("-inf"))
