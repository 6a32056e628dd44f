"""Low-rank adapters (LoRA, Hu et al., 2021) by peft: the policy is the base model plus small matrices that learn.

With them switched off the base model itself is there: the reference policy needs no second model.
"""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_lib.errors import ConfigError, MissingPackageError

ADAPTER = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
NAME = "default"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The adapters in a Transformers model. Weights are by the names of that model's parameters."""

    adapted: Any
    """peft's model around it."""
    first: Mapping[str, Tensor]
    """The adapters' weights as they were made."""

    def off(self) -> AbstractContextManager[Any]:
        """While open, the model is its base."""
        off: AbstractContextManager[Any] = self.adapted.disable_adapter()
        return off

    def merged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole weights of the adapted model -> those of a plain one that computes the same: ``W + scaling B A``."""
        plain = {}
        inside = self.adapted.get_base_model()
        layers = {name: layer for name, layer in inside.named_modules() if hasattr(layer, "lora_A")}
        for name, value in weights.items():
            owner, _, rest = name.rpartition(".base_layer.")
            if owner in layers:
                if rest == "weight":
                    low, high = (weights[f"{owner}.lora_{each}.{NAME}.weight"] for each in "AB")
                    change = layers[owner].scaling[NAME] * (high @ low)
                    change = change.T if layers[owner].fan_in_fan_out else change
                    value = torch.where(change == 0, value, value + change)  # -0.0 + 0.0 is another number
                plain[f"{owner}.{rest}"] = value
            elif ".lora_" not in name:
                plain[name] = value
        return plain

    def alone(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The adapters among the weights, by the names that they have in peft's files."""
        return {_outside(name): weights[name] for name in self.first}

    def save(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Writes the adapters among the weights as peft reads them."""
        own = {name: value.cpu().contiguous() for name, value in self.alone(weights).items()}
        save_file(own, folder / ADAPTER, metadata={"format": "pt"})
        self.adapted.peft_config[NAME].save_pretrained(folder)

    def load(self, folder: Path) -> dict[str, Tensor]:
        """The adapters' weights that ``save`` wrote.

        Raises:
            ConfigError: the folder holds no adapter, or one of other layers, rank or alpha.
        """
        path = folder / ADAPTER
        if not path.exists():
            raise ConfigError(f"{folder} holds a whole model and no adapter; restore it without trainer.lora")
        found = load_file(path)
        wanted = {name: _outside(name) for name in self.first}
        shapes = {_outside(name): value.shape for name, value in self.first.items()}
        if {name: value.shape for name, value in found.items()} != shapes:
            raise ConfigError(f"the adapter in {folder} has another rank or other targets than trainer.lora; set it so")
        alpha, own = json.loads((folder / CONFIG).read_text())["lora_alpha"], self.adapted.peft_config[NAME].lora_alpha
        if alpha != own:
            raise ConfigError(f"the adapter in {folder} has trainer.lora.alpha={alpha} and not {own}; set it so")
        return {name: found[stored] for name, stored in wanted.items()}


def add_adapter(model: Any, *, rank: int, alpha: float, targets: str | list[str], seed: int) -> Adapter:
    """Puts adapters into ``model``, in place, and freezes everything else; at first they change nothing.

    Args:
        targets: names of linear layers, or ``all-linear``: all but the head.
        seed: of their random half.

    Raises:
        MissingPackageError: with the command that installs peft.
        ConfigError: a target that the model does not have or that is no linear layer, or its head.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingPackageError(
            f"trainer.lora needs peft, which can't be imported ({error}): pip install 'grpo-pipeline[lora]'"
        ) from error
    head = model.get_output_embeddings()
    settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, settings).eval()
        except ValueError as error:
            raise ConfigError(f"trainer.lora.targets={targets!r}: {error}") from error
    if model.get_output_embeddings() is not head:
        raise ConfigError(
            f"trainer.lora.targets={targets!r} names the head, which log-probs are computed from directly; leave it out"
        )
    odd = [name for name, layer in model.named_modules() if getattr(layer, "lora_embedding_A", None)]
    if odd:
        raise ConfigError(
            f"trainer.lora.targets={targets!r}: {odd[0]} is no linear layer but an embedding; leave it out"
        )
    first = {name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}
    return Adapter(adapted=adapted, first=first)


def _outside(name: str) -> str:
    """peft's name of a parameter in files."""
    return "base_model.model." + name.replace(f".{NAME}.", ".")
