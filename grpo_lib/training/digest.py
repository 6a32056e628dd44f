"""Identity of a set of weights: the same on both sides, trainer and engine."""

from collections.abc import Mapping

import torch
from torch import Tensor

HEAD = "lm_head.weight"
LARGE = 32 * 2**20
"""Bytes that are worth starting threads for."""


def weights_digest(state: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """BLAKE3 over names, dtypes, shapes and bytes, in the order of names; of what they are in ``dtype`` if given.

    A head that shares its storage with the embedding is left out, so that it makes no difference whether tied
    weights are listed once or twice.
    """
    from blake3 import blake3  # a machine that only trains may lack it

    # Threads of this call alone: those of BLAKE3's AUTO are the process's, and a fork, as vLLM's, does not have them.
    large = sum(each.nbytes for each in state.values()) > LARGE
    digest = blake3(max_threads=torch.get_num_threads() if large else 1)
    for name in sorted(state):
        if name == HEAD and is_tied(state):
            continue
        tensor = state[name].detach().to("cpu", dtype).contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def is_tied(state: Mapping[str, Tensor]) -> bool:
    """Whether the head shares its storage with another of the weights."""
    head = state[HEAD]
    return any(
        other.data_ptr() == head.data_ptr() and other.shape == head.shape and other.device == head.device
        for name, other in state.items()
        if name != HEAD and head.numel()
    )
