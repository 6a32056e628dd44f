"""The state of an optimizer as safetensors: one entry ``<parameter>/<what>`` for each of its tensors."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn


def save_moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], path: Path) -> None:
    """Writes the state of the named parameters."""
    moments = {
        f"{name}/{key}": value.detach().cpu().contiguous()
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    save_file(moments, path)


def load_moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], path: Path) -> None:
    """Reads it into an optimizer without state; exact."""
    moments = load_file(path)
    for name, parameter in parameters.items():
        prefix = f"{name}/"
        state = {key.removeprefix(prefix): value for key, value in moments.items() if key.startswith(prefix)}
        if state:
            optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}
