"""Weights as a Hugging Face model folder, whatever backend and however many ranks hold them."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from grpo_lib.errors import CorruptError
from grpo_lib.models import load_model
from grpo_lib.training.digest import weights_digest


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a model folder says besides weights."""

    config: Any
    generation_config: Any

    @property
    def tied(self) -> bool:
        """Whether the head shares the embedding's weights."""
        return bool(self.config.get_text_config().tie_word_embeddings)

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Of all weights, by name."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(deepcopy(self.config))
        return {name: value.shape for name, value in model.state_dict().items()}


def describe(path: str) -> Description:
    """Of a folder or hub name; no weights are read."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # there is none
        generation = None
    return Description(config=config, generation_config=generation)


def export_model(model: Any, weights: Mapping[str, Tensor], dtype: torch.dtype, folder: Path) -> str:
    """Writes config and weights in ``dtype`` as ``AutoModelForCausalLM`` and vLLM read them, and reads them back.

    Args:
        model: a model, whose own weights may be sharded, or its `Description`.
        weights: whole, by the names of a plain model of that class.

    Returns:
        The digest of the written weights (`weights_digest`).

    Raises:
        CorruptError: what was read back has another digest.
    """
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(deepcopy(model.config), dtype=dtype)  # which it writes into
    converted: dict[int, Tensor] = {}  # tied weights stay one tensor
    for value in weights.values():
        converted.setdefault(value.data_ptr(), value.detach().to("cpu", dtype))
    state = {name: converted[value.data_ptr()] for name, value in weights.items()}
    twin.load_state_dict(state, strict=True, assign=True)
    twin.tie_weights()
    twin.save_pretrained(folder, max_shard_size="4GB")
    if model.generation_config is not None:  # as it is: Transformers refuses to write some that it reads
        (folder / "generation_config.json").write_text(model.generation_config.to_json_string())
    expected, found = (weights_digest(each) for each in (state, load_model(str(folder), dtype, "cpu").state_dict()))
    if found != expected:
        raise CorruptError(
            f"the model exported to {folder} reads back with digest {found[:16]} instead of {expected[:16]}; "
            "is the disk full or failing?"
        )
    return expected
