"""Attention of packed rows, plugged into Transformers: no row sees another.

On a GPU one kernel takes rows of any lengths (``torch.nn.attention.varlen``); in float32, and on the CPU, rows of
similar length share a rectangle (``rectangles.py``). What a model asks of attention that is not done here is refused.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from grpo_lib.data.ragged import Ragged, concat_rows, lengths_to_offsets
from grpo_lib.errors import ModelError
from grpo_lib.training.microbatches import Sequences, micro_batch
from grpo_lib.training.rectangles import PackedRows, collect, rectangle_attention

PACKED = "packed"
"""Name under which Transformers finds `packed_attention`."""
REMEDY = "set trainer.layout=padded"
WITHOUT_EFFECT = {"position_ids", "cu_seq_lens_k", "max_length_k", "use_cache", "cache_position", "return_dict"}
"""What models hand on to attention without changing it; the rotary embedding has used the positions by then."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.08}
"""Of `check_packing`, relative to the size of the hidden states."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    packed_rows: PackedRows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed row: ``[1, T, heads, d_v]``. Differentiable.

    Args:
        query: ``[1, heads, T, d]``; keys and values ``[1, kv_heads, T, d]``.
        attention_mask: None; rows are known from their offsets.
        scaling: of the scores; None for ``1 / sqrt(d)``.
        sliding_window: tokens that a token sees, itself included.
        softcap: bound of the scores.
        cu_seq_lens_q: ``int32[b+1]``: the whole rows' offsets.
        max_length_q: tokens of the longest row.
        packed_rows: the same rows, with what earlier layers have derived from them.

    Raises:
        ModelError: the model asks for something else, or hands no offsets on.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    changes = sorted(name for name, each in kwargs.items() if name not in WITHOUT_EFFECT and not _nothing(each))
    if changes or attention_mask is not None or not causal:
        asked = changes or (["an attention mask"] if attention_mask is not None else ["attention in both directions"])
        raise _refusal(module, f"asks attention for {', '.join(asked)}, which packed rows can't have")
    if cu_seq_lens_q is None or max_length_q is None:
        raise _refusal(module, "does not hand the offsets of packed rows on to attention")
    assert (len(query), query.shape[2]) == (1, key.shape[2]), "packed rows are one row, which sees itself"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (_precision(each).squeeze(0).transpose(0, 1) for each in (query, key, value))  # [T, heads, d]
    if q.is_cuda and softcap is not None:
        raise _refusal(module, f"caps attention scores at {softcap}, which no kernel for packed rows on a GPU does")
    rows = PackedRows(cu_seq_lens_q) if packed_rows is None else packed_rows
    if _has_kernel(q, v):
        if rows.whole is not None:
            q, k, v = (rows.whole.spread(each) for each in (q, k, v))
        window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)  # tokens before; tokens after
        longest = max_length_q
        output: Any = varlen_attn(
            q, k, v, cu_seq_lens_q, cu_seq_lens_q, longest, longest, scale=scale, window_size=window, enable_gqa=True
        )
        if rows.whole is not None:
            output = collect(output, rows.whole.place)
    else:
        output = rectangle_attention(q, k, v, rows, scale, sliding_window, softcap)
    return output.unsqueeze(0), None


def _nothing(argument: Any) -> bool:
    return argument is None or (isinstance(argument, bool | int | float) and argument == 0)


def _precision(states: Tensor) -> Tensor:
    """As autocast would have it: norms and rotary embeddings before attention may have left float32."""
    device = states.device.type
    return states.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else states


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether Flash Attention takes heads of this size and precision."""
    head_dim = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and head_dim == value.shape[-1] and head_dim <= 256 and head_dim % 8 == 0


def _refusal(module: nn.Module, reason: str) -> ModelError:
    return ModelError(f"{type(module).__name__} {reason}: {REMEDY}")


def use_packed_attention(model: PreTrainedModel) -> None:
    """Makes a Transformers model run on packed rows, and only on these.

    There is no mask function to register: Transformers makes no mask for an attention that has none.

    Raises:
        ModelError: the model can't; the message says why.
    """
    layer_types, _ = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    if unknown := set(layer_types) - {"full_attention", "sliding_attention"}:
        raise _refusal(model, f"has layers of type {', '.join(sorted(unknown))}, through which packed rows would mix")
    if not model._supports_attention_backend:
        raise _refusal(model, "computes its attention itself, where packed rows would mix")
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise _refusal(model, "takes no positions, so packed rows can't each begin at 0")
    AttentionInterface.register(PACKED, packed_attention)
    model.set_attn_implementation(PACKED)


@torch.no_grad()
def check_packing(model: PreTrainedModel, autocast: torch.dtype | None = None) -> None:
    """Compares hidden states of three short rows, packed, with those of one row at a time on plain attention.

    Two of them share a prompt.

    Args:
        model: of `use_packed_attention`, with the weights and on the device with which it will run.
        autocast: precision of its passes, unless it is that of the weights.

    Raises:
        ModelError: they differ by more than rounding, or the model asks something of attention that isn't done.
    """
    device, generator = model.device, torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size

    def tokens(*lengths: int) -> Ragged:
        values = torch.randint(vocabulary, (sum(lengths),), generator=generator)
        return Ragged(values=values, offsets=lengths_to_offsets(torch.tensor(lengths)))

    rows = Sequences(prompts=tokens(2, 1), responses=tokens(3, 7, 2), prompt_of=torch.tensor([0, 0, 1]))
    whole = concat_rows(rows.prompts.gather(rows.prompt_rows), rows.responses)
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        batch = micro_batch(rows, torch.arange(3), "packed").to(device)
        packed = model.base_model(**batch.model_inputs()).last_hidden_state[0][batch.predicts]
        model.set_attn_implementation("eager")
        try:
            alone = [
                model.base_model(input_ids=row[None].to(device), use_cache=False).last_hidden_state[0]
                for row in whole.values.split(whole.lengths.tolist())
            ]
        finally:
            model.set_attn_implementation(PACKED)
    predicts = micro_batch(rows, torch.arange(3)).predicts  # in rows padded to the longest
    expected = pad_sequence(alone, batch_first=True).flatten(0, 1)[predicts.to(device)].float()
    error = float((packed.float() - expected).norm() / expected.norm())
    allowed = TOLERANCE[autocast or model.dtype]
    if not error <= allowed:
        raise _refusal(model, f"gives packed rows other hidden states (by {error:.1%}, allowed {allowed:.1%})")
