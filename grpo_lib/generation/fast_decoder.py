"""Decoders of the Llama family, computed directly: what their Transformers modules compute, in fewer steps.

For one token a row much of a small model's time goes into what surrounds its matrix products. Here rotations are looked
up, sums are made in place, and no configurable layer of calls is in between. Models of other classes are decoded by
Transformers' own ``forward``.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention
from transformers import PreTrainedModel

from grpo_lib.generation.cache import RoomyCache, RoomyLayer, as_additive, attend_to_cache

FAMILY = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles do not depend on how long a row is."""

logger = logging.getLogger(__name__)


def fast_decoder(model: PreTrainedModel) -> "FastDecoder | None":
    """The decoder for a model whose layers are all full attention; None where its ``forward`` has to be called."""
    if (
        type(model).__name__ not in FAMILY
        or model.config.rope_parameters["rope_type"] not in ROPES
        or any(type(module) is not nn.Linear for name, module in model.named_modules() if name.endswith("_proj"))
    ):
        return None
    decoder = FastDecoder(model)
    if not _agrees(decoder, model):
        logger.warning(
            "%s is decoded by Transformers, slower: the fast decoder's logits for these weights differ from its own",
            type(model).__name__,
        )
        return None
    return decoder


class FastDecoder:
    """Computes logits from token ids and a cache. See `fast_decoder`.

    It holds the model's own parameters, so weights that are loaded into the model in place are its weights too.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        decoder = model.get_decoder()
        self.layers = [_Layer(layer) for layer in decoder.layers]
        self._embedding, self._head = model.get_input_embeddings().weight, _Linear(model.get_output_embeddings())
        self._norm, self._rotary = _Norm(decoder.norm), decoder.rotary_emb
        self._cos = self._sin = torch.empty(0, 0)

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: RoomyCache) -> Tensor:
        """Logits ``[rows, vocabulary]`` of the token after ``ids``.

        Args:
            ids: ``int64[rows, length]``: prompts, into an empty cache, or one more token of each row.
            positions: ``int64[rows, length]``.
            mask: of prompts ``bool[rows, length]``: tokens that are not padding; of one more token what is added to
                its scores, ``[rows, 1, 1, tokens]``. None: there is no padding.
        """
        if ids.shape[1] > 1 and mask is not None:
            square = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device)
            # A token of padding sees itself: with no score but -inf it would get NaN.
            mask = (square.tril() & mask.unsqueeze(1) | square.diag().diag()).unsqueeze(1)
        cos, sin = self._rotation(positions, cache.get_seq_length() + ids.shape[1])
        hidden = embedding(ids, self._embedding)
        for layer, states in zip(self.layers, cache.layers, strict=True):
            hidden = layer(hidden, cos, sin, mask, states)
        return self._head(self._norm(hidden[:, -1]))

    def _rotation(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines, ``[rows, length, 1, head_dim]``; positions are below ``end``."""
        if end > len(self._cos) or self._cos.device != positions.device:
            every = torch.arange(2 * end, device=positions.device).unsqueeze(0)
            cos, sin = self._rotary(self._embedding, every)
            first, second = sin[0].chunk(2, -1)
            self._cos, self._sin = cos[0], torch.cat([-first, second], -1)
        return self._cos[positions].unsqueeze(2), self._sin[positions].unsqueeze(2)


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._before_attention, self._before_mlp = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._query, self._key, self._value = map(_Linear, (attention.q_proj, attention.k_proj, attention.v_proj))
        self._norms = (_Norm(attention.q_norm), _Norm(attention.k_norm)) if hasattr(attention, "q_norm") else None
        self._head_dim, self._scaling, self._output = attention.head_dim, attention.scaling, _Linear(attention.o_proj)
        self._gate, self._up, self._down = map(_Linear, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        self._activation = mlp.act_fn

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, states: RoomyLayer) -> Tensor:
        """Changes ``hidden [rows, length, width]`` in place, too."""
        hidden += self._attend(self._before_attention(hidden), cos, sin, mask, states)
        normal = self._before_mlp(hidden)
        hidden += self._down(self._activation(self._gate(normal)).mul_(self._up(normal)))
        return hidden

    def _attend(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, states: RoomyLayer) -> Tensor:
        rows, length, _ = hidden.shape
        shape = (rows, length, -1, self._head_dim)
        query, key, value = (
            self._query(hidden).view(shape),
            self._key(hidden).view(shape),
            self._value(hidden).view(shape),
        )
        if self._norms is not None:
            query, key = self._norms[0](query), self._norms[1](key)
        query, key = _rotated(query, cos, sin).transpose(1, 2), _rotated(key, cos, sin).transpose(1, 2)
        keys, values = states.update(key, value.transpose(1, 2))
        if length == 1:
            output = attend_to_cache(query, keys, values, mask, self._scaling)
        else:
            output = scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, is_causal=mask is None, scale=self._scaling, enable_gqa=True
            )
        return self._output(output.transpose(1, 2).reshape(rows, length, -1))


class _Linear:
    def __init__(self, module: Any) -> None:
        self._weight, self._bias = module.weight, module.bias

    def __call__(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self._weight, self._bias)


class _Norm:
    """Divides by the root of the mean square, in float32 as Transformers does."""

    def __init__(self, module: Any) -> None:
        self._weight, self._eps = module.weight, module.variance_epsilon

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.dtype != torch.float32:
            return rms_norm(hidden, self._weight.shape, self._weight, self._eps)
        norms = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)  # in fewer passes than rms_norm on the CPU
        return (hidden * norms.square_().mul_(1 / hidden.shape[-1]).add_(self._eps).rsqrt_()).mul_(self._weight)


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``[rows, length, heads, head_dim]``."""
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)


@torch.inference_mode()
def _agrees(decoder: FastDecoder, model: PreTrainedModel) -> bool:
    """Compares logits after prompts of different lengths, and after one more token, with the model's own."""
    device, padding = decoder._embedding.device, 3
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(decoder._embedding), (2, 9), generator=generator).to(device)
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[1, :padding] = False
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    cache = RoomyCache(len(decoder.layers))
    ours = [decoder(ids[:, :-1], positions[:, :-1], valid[:, :-1], cache)]
    ours.append(decoder(ids[:, -1:], positions[:, -1:], as_additive(valid[:, None, None], ours[0].dtype), cache))
    theirs = model(input_ids=ids, attention_mask=valid, position_ids=positions, use_cache=False).logits[:, -2:]
    tolerance = max(1e-3, 4 * torch.finfo(theirs.dtype).eps) * theirs.abs().max()
    return bool(((torch.stack(ours, 1) - theirs).abs() <= tolerance).all())
