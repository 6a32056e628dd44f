"""The frozen policy that the KL penalty holds the policy to."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_lib.training.heads import head_of
from grpo_lib.training.logprobs import Head
from grpo_lib.training.microbatches import MicroBatch


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A `PolicyModule` without gradient: of its own, or the policy's with the adapters of LoRA off."""

    module: Any
    """What forward passes go through, wrapped."""
    model: Any
    """The Transformers model inside."""
    gathered: Callable[[], AbstractContextManager[Any]] = nullcontext
    """While open, the weights of the head are whole."""
    passing: bool = False
    """They are so only until the next forward pass, so the head is copied."""
    switched: Callable[[], AbstractContextManager[Any]] = nullcontext
    """While open, the module is the reference."""

    def hidden(self, batch: MicroBatch, temperature: float) -> Tensor:
        """``[n, hidden]`` at the positions that predict the response."""
        with torch.no_grad(), self.switched():
            states: Tensor = self.module(batch, temperature, hidden_only=True)
        return states

    @contextmanager
    def head(self) -> Iterator[Head]:
        """Its head, whole while open: through the backward pass too."""
        with self.gathered():
            head = head_of(self.model)
            if not self.passing:
                yield head
                return
            bias = None if head.bias is None else head.bias.detach().clone()
            head = replace(head, weight=head.weight.detach().clone(), bias=bias)
        yield head
