"""Whether weights are those of an engine's model."""

from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_lib.errors import ModelError
from grpo_lib.training.digest import HEAD


def check_weights(own: Mapping[str, torch.Size], state: Mapping[str, Tensor], *, tied: bool) -> None:
    """Names and shapes are those of the engine's model.

    Args:
        own: of its weights.
        tied: its head shares the embedding's weights, and may be missing.

    Raises:
        ModelError: with the first that differ.
    """
    problems = {
        "missing": own.keys() - state.keys() - ({HEAD} if tied else set()),
        "unknown": state.keys() - own.keys(),
        "of another shape": {name for name in own.keys() & state.keys() if own[name] != state[name].shape},
    }
    listed = "; ".join(f"{what}: {', '.join(sorted(names)[:3])}" for what, names in problems.items() if names)
    if listed:
        raise ModelError(f"these weights are not those of the engine's model ({listed}): load it from one folder")
