"""The ``fsdp2`` backend: parameters, gradients and optimizer state sharded over the ranks (`fully_shard`)."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_lib.training.learner import AdamWSettings, TorchLearner, named_moments, whole_weights
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


class Fsdp2Learner(TorchLearner):
    """A `Learner` on every rank. Weights stay float32; with a lower ``dtype`` they are cast when gathered."""

    def __init__(self, module: nn.Module, settings: AdamWSettings, world: World, dtype: torch.dtype | None) -> None:
        super().__init__(shard(module, world, dtype), settings)
        self._world = world

    def backward(self, loss: Tensor) -> None:
        (loss * self._world.size).backward()  # FSDP averages over the ranks

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
        super().load(weights, moments)

    def _own(self, value: Tensor, like: Tensor) -> Tensor:
        """This rank's shard of a tensor that every rank has; no communication."""
        if not isinstance(like, DTensor):
            return super()._own(value, like)
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

    def _reshard(self) -> None:
        """After a forward pass without backward the outermost weights are still whole."""
        for each in self.module.modules():
            if isinstance(each, FSDPModule):
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
