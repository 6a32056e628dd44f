"""Tiny causal language models with random weights, and sequences for them; for ranks too, which have no fixtures."""

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from grpo_lib.config import SmallModelConfig
from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.models import make_small_model
from grpo_lib.training.microbatches import Sequences

VOCABULARY = 23
POSITIONS = 64
SMALL = SmallModelConfig(hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp_size=32)


def _qwen3() -> Any:
    return make_small_model(SMALL, VOCABULARY, eos_id=1, pad_id=0, max_positions=POSITIONS, seed=5)


def _llama() -> Any:
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(shape)


def _gpt2() -> Any:
    shape = GPT2Config(
        vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3
    )
    return GPT2LMHeadModel(shape)


def _gemma() -> Any:
    """Gemma 3: a layer with a window smaller than most rows, one without."""
    shape = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
        max_position_embeddings=POSITIONS,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=4,
        query_pre_attn_scalar=8,
        initializer_range=0.3,
    )
    return Gemma3ForCausalLM(shape)


BUILDERS = {"qwen3": _qwen3, "llama": _llama, "gpt2": _gpt2, "gemma": _gemma}


def tiny_model(architecture: str = "qwen3") -> Any:
    """A model by the name of its architecture; the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BUILDERS[architecture]().float().eval()


def random_sequences(seed: int, rows: int) -> Sequences:
    """Random prompts (1 to 6 tokens) and responses (1 to 12) by seed; the first response has one token.

    Of each three rows the first and the last share a prompt.
    """
    generator = torch.Generator().manual_seed(seed)

    def tokens(longest: int, first: int | None = None) -> Ragged:
        lengths = torch.randint(1, longest + 1, (rows,), generator=generator)
        if first is not None:
            lengths[0] = first
        offsets = lengths_to_offsets(lengths)
        ids = torch.randint(1, VOCABULARY, (int(offsets[-1]),), generator=generator, dtype=torch.int32)
        return Ragged(values=ids, offsets=offsets)

    places = torch.arange(rows)
    prompt_of = places - 2 * (places % 3 == 2)
    return Sequences(prompts=tokens(6), responses=tokens(12, first=1), prompt_of=prompt_of)
