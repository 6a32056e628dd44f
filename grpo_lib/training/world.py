"""The processes that train one model together, as one of them sees them."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class World:
    """One rank among ``size`` ranks. The collectives work in place and do nothing in a world of one."""

    rank: int
    """0 .. size-1; rank 0 answers for all."""
    size: int
    """Number of ranks. With more than one, torch's default process group is initialised."""
    device: torch.device
    """Where this rank computes, and where tensors for the collectives must be."""

    @classmethod
    def alone(cls, device: torch.device) -> Self:
        """The world of a single process, without a process group."""
        return cls(rank=0, size=1, device=device)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replaces every element by its sum over the ranks."""
        return self._reduce(tensor, "SUM")

    def max_(self, tensor: Tensor) -> Tensor:
        """Replaces every element by its maximum over the ranks."""
        return self._reduce(tensor, "MAX")

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.size > 1:
            import torch.distributed as dist

            where: dict[str, Any] = {"device_ids": [self.device.index]} if self.device.type == "cuda" else {}
            dist.barrier(**where)

    def _reduce(self, tensor: Tensor, how: str) -> Tensor:
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, how))
        return tensor
