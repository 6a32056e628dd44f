"""The ``fsdp2`` backend: parameters, gradients and optimizer state sharded over the ranks (`fully_shard`)."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_lib.training.learner import (
    AdamWSettings,
    adamw,
    clipped_step,
    named_moments,
    set_moments,
    trainable,
    whole_weights,
)
from grpo_lib.training.modules import decoder_layers
from grpo_lib.training.world import World


def shard(module: nn.Module, world: World, dtype: torch.dtype | None) -> Any:
    """Shards a module in place, decoder layer by decoder layer; ``dtype`` is that of gathered weights."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(world.device.type, (world.size,))
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    }
    for layer in decoder_layers(module):
        fully_shard(layer, **options)
    return fully_shard(module, **options)


class Fsdp2Learner:
    """A `Learner` on every rank. Weights stay float32; with a lower ``dtype`` they are cast when gathered."""

    def __init__(self, module: nn.Module, settings: AdamWSettings, world: World, dtype: torch.dtype | None) -> None:
        self.module = shard(module, world, dtype)
        self._world = world
        self._settings = settings
        self._parameters = trainable(self.module)
        self._optimizer = self._fresh_optimizer()

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        return adamw(self._parameters, self._settings, fused=True)

    def backward(self, loss: Tensor) -> None:
        (loss * self._world.size).backward()  # FSDP averages over the ranks

    def step(self, lr: float) -> float:
        return clipped_step(self._optimizer, self._parameters, lr, self._settings.max_grad_norm)

    def discard(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def weights(self) -> dict[str, Tensor]:
        self._reshard()
        return whole_weights(self.module, lambda each: _full(each.detach()).cpu(), keep=self._world.rank == 0)

    def moments(self) -> dict[str, Tensor]:
        kept = {}
        for name, value in named_moments(self._optimizer, self._parameters, _full):  # gathered one by one
            if self._world.rank == 0:
                kept[name] = value.cpu()
        return kept

    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        self._reshard()
        own = self.module.state_dict()
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(_part(value, own[name]))
        self._optimizer = self._fresh_optimizer()
        self.discard()
        set_moments(self._optimizer, self._parameters, moments, _part)

    def _reshard(self) -> None:
        """After a forward pass without backward the outermost weights are still whole."""
        for each in self.module.modules():
            if hasattr(each, "reshard"):
                each.reshard()

    def gathered(self) -> AbstractContextManager[None]:
        return unsharded(self.module)


@contextmanager
def unsharded(module: Any) -> Iterator[None]:
    """Gathers what no decoder layer holds, the head among it; the next backward pass or reading lets it go."""
    module.unshard()
    yield


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _part(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has; no communication."""
    if not isinstance(like, DTensor):
        return value.to(like.device)
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
