"""Models and tokenizers: small ones made on the spot, and pretrained ones from a folder or the hub.

Pretrained weights are read from safetensors only, and code that comes with a model is never run.
"""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as hf_logging

from grpo_lib.errors import ModelError
from grpo_lib.types import Problem

if TYPE_CHECKING:
    from grpo_lib.config import SmallModelConfig

hf_logging.disable_progress_bar()  # progress is shown by stage
if not torch.cuda.is_available():
    # Saving a model imports DeepSpeed where it is installed, which looks for devices and says so on stdout.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
PAD, EOS = "<pad>", "<eos>"
Loaded = TypeVar("Loaded")
_LOADING = threading.Lock()
"""Transformers switches process-wide defaults while it loads: two threads at once get broken models."""


def make_small_model(
    config: "SmallModelConfig", vocab_size: int, eos_id: int, pad_id: int, max_positions: int, seed: int
) -> Qwen3ForCausalLM:
    """A Qwen3-style causal language model with random float32 weights that depend on ``seed`` only.

    Embedding and head share their weights. The random state of the caller is left as it was.
    """
    shape = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.mlp_size,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        initializer_range=config.initializer_range,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
        dtype="float32",
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(shape)
    return model.to(torch.float32).eval()


def make_tokenizer(tags: Sequence[str], alphabet: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer that needs no training: each tag is one token, and so is each character (or byte).

    Ids are in the order ``<pad>`` (0), ``<eos>`` (1), tags, characters. Encoding adds no token and never reads
    ``<pad>`` or ``<eos>`` from text; decoding with ``skip_special_tokens`` leaves out those two, not the tags.

    Args:
        alphabet: the characters, each one token; encoding any other character raises. ``None``: all 256 bytes, so
            that any text can be encoded and comes back unchanged.
    """
    characters = sorted(pre_tokenizers.ByteLevel.alphabet()) if alphabet is None else list(dict.fromkeys(alphabet))
    vocabulary = {token: place for place, token in enumerate(dict.fromkeys([PAD, EOS, *tags, *characters]))}
    if alphabet is None:
        tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(tokenizer_models.WordLevel(vocab=vocabulary, unk_token=None))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS])
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def run_tokenizer(path: str | None, problem: Problem) -> Any:
    """The tokenizer of a run: the pretrained model's, or without one the small tokenizer of the problem."""
    return make_tokenizer(problem.tags, problem.alphabet) if path is None else load_tokenizer(path)


def load_model(path: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The causal language model in a local folder or of that name on the hub, in evaluation mode.

    Raises:
        ModelError: it is missing, broken, needs code of its own, or has no safetensors weights.
    """
    model = load_pretrained(
        "model",
        path,
        lambda: AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention_of(path), trust_remote_code=False, use_safetensors=True
        ),
    )
    return model.to(device).eval()


def attention_of(path: str) -> str:
    """Eager for models with soft-capping of attention scores (Gemma 2), which SDPA leaves out without a word."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
    return "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"


def load_tokenizer(path: str) -> Any:
    """The tokenizer in a local folder or of that name on the hub.

    Raises:
        ModelError: it is missing or broken, or it has no end-of-sequence token.
    """
    tokenizer = load_pretrained("tokenizer", path, lambda: AutoTokenizer.from_pretrained(path, trust_remote_code=False))
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer in {path!r} has no end-of-sequence token, so no response could ever end: "
            "set eos_token in its tokenizer_config.json"
        )
    return tokenizer


def load_pretrained(what: str, path: str, read: Callable[[], Loaded]) -> Loaded:
    """What ``read`` reads from a folder or the hub.

    Args:
        what: ``model`` or ``tokenizer``.

    Raises:
        ModelError: it is missing, broken, or needs code of its own; with the remedy.
    """
    place = Path(path)
    if place.is_file():
        raise ModelError(f"{path!r} is a file; name a folder that save_pretrained wrote, or a model on the hub")
    if place.is_absolute() and not place.exists():
        raise ModelError(f"there is no folder {path!r}; name one that save_pretrained wrote, or a model on the hub")
    if what == "model" and (place / "adapter_config.json").is_file():
        raise ModelError(
            f"the folder {path!r} holds adapters (LoRA), which are no model of their own; `grpo export` writes one "
            "that has them merged"
        )
    needed = "config.json" if what == "model" else "tokenizer_config.json or tokenizer.json"
    if place.is_dir() and not any((place / name).is_file() for name in needed.split(" or ")):
        raise ModelError(f"the folder {path!r} has no {needed}, so it holds no {what}: write it with save_pretrained")
    try:
        with _LOADING:
            return read()
    except Exception as error:  # Transformers, safetensors and the hub's client raise whatever they like
        origin = f"folder {path!r}" if place.is_dir() else f"hub name {path!r} (and there is no such folder)"
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(
            f"the {what} can't be loaded from {origin}: {reason}. It must have been written by save_pretrained "
            "with safetensors weights and need no code of its own; a hub name needs the network or a filled cache"
        ) from error
