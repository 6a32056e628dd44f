"""A policy's weights as the artifact that goes from the trainer to engines elsewhere."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from grpo_lib.storage.keys import StageSpec
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.tensors import load_tensors, save_tensors

WEIGHTS = StageSpec(name="weights", version=1, reads=("model.dtype",))
STEM = "weights"


def save_weights(weights: Mapping[str, Tensor], dtype: torch.dtype, folder: Path) -> str:
    """Writes them in ``dtype``, tied ones once; returns their digest in it."""
    converted: dict[int, Tensor] = {}
    for value in weights.values():
        converted.setdefault(value.data_ptr(), value.detach().to("cpu", dtype))
    state = {name: converted[value.data_ptr()] for name, value in weights.items()}
    save_tensors(state, folder, STEM)
    return weights_digest(state)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """What ``save_weights`` wrote.

    Raises:
        CorruptError: it is not whole.
    """
    return load_tensors(folder, STEM)
