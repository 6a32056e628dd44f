"""A network with its optimizer: what each backend implements, and the backend of one process.

A backend owns wrapping, backward and step, the full state by parameter name, and gathering; everything else about an
update is the same code for all (`training/trainer.py`).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """Of an optimizer; the learning rate comes with each step."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled; matrices only."""
    max_grad_norm: float = 1.0


class Learner(Protocol):
    """A network that learns. With several ranks each method is called by all of them, in the same order.

    Names are those of the network's parameters. Full tensors are float32 on the CPU and handed to rank 0 alone.
    """

    module: nn.Module
    """What forward passes go through: `PolicyModule` or `ValueModule`, wrapped."""

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of ``loss``, summed over the ranks."""
        ...

    def step(self, lr: float) -> float:
        """An optimizer step with the gradient so far, clipped, unless that is not finite; clears the gradient.

        Returns:
            The norm of the gradient before clipping.
        """
        ...

    def discard(self) -> None:
        """Clears the gradient."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Every parameter and persistent buffer (views in one process); tied ones are the same tensor."""
        ...

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state as ``<parameter>/<what>``; empty before the first step."""
        ...

    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Sets the parameters that are named, and the optimizer's whole state; every rank gives all tensors."""
        ...

    def gathered(self) -> AbstractContextManager[None]:
        """While it is open the weights of the head are whole on every rank."""
        ...


def adamw(named: Mapping[str, nn.Parameter], settings: AdamWSettings, **options: Any) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: not on norms, biases and scales."""
    matrices = [p for p in named.values() if p.ndim >= 2]
    vectors = [p for p in named.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,  # each step sets it
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        **options,
    )


def set_lr(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def whole_weights(module: nn.Module, whole: Callable[[Tensor], Tensor], keep: bool) -> dict[str, Tensor]:
    """What a module's ``state_dict`` names, made whole one by one; ``keep``: on this rank."""
    kept: dict[int, Tensor] = {}
    result = {}
    named = dict(module.named_parameters(remove_duplicate=False))
    for name, value in module.state_dict().items():
        tensor = named.get(name, value)
        if id(tensor) not in kept:
            found = whole(tensor)
            kept[id(tensor)] = found if keep else found.new_empty(0)
        result[name] = kept[id(tensor)]
    return result if keep else {}


class TorchLearner:
    """The ``torch`` backend: one process, CPU or one GPU, float32 weights on it.

    Also what backends share whose optimizer holds its state by parameter: they say what is a rank's own part.
    """

    def __init__(self, module: nn.Module, settings: AdamWSettings) -> None:
        self.module = module
        self._settings = settings
        self._parameters = trainable(module)
        self._optimizer = self._fresh_optimizer()

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        return adamw(self._parameters, self._settings, fused=True)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, lr: float) -> float:
        return clipped_step(self._optimizer, self._parameters, lr, self._settings.max_grad_norm)

    def discard(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def weights(self) -> dict[str, Tensor]:
        return whole_weights(self.module, lambda each: each.detach(), keep=True)

    def moments(self) -> dict[str, Tensor]:
        return dict(named_moments(self._optimizer, self._parameters, lambda each: each))

    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        own = self.module.state_dict()
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(self._own(value, own[name]))
        self._optimizer = self._fresh_optimizer()
        self.discard()  # of an update that failed half-way
        set_moments(self._optimizer, self._parameters, moments, self._own)

    def _own(self, value: Tensor, like: Tensor) -> Tensor:
        """Of a whole tensor what belongs into ``like``."""
        return value.to(like.device)

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext()


def clipped_step(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], lr: float, max_norm: float
) -> float:
    """An optimizer step unless the gradient is not finite; its norm before clipping. A missing gradient is 0."""
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    found = torch.nn.utils.clip_grad_norm_(parameters.values(), max_norm)
    norm = float(found.full_tensor() if hasattr(found, "full_tensor") else found)
    if math.isfinite(norm):
        set_lr(optimizer, lr)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def named_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], full: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Of an optimizer that holds its state by parameter; ``full`` makes a shard whole."""
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}/{key}", full(value.detach())


def set_moments(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    moments: Mapping[str, Tensor],
    own: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """The inverse, into an optimizer without state; ``own(value, parameter)`` is this rank's part of a tensor."""
    for name, parameter in parameters.items():
        if f"{name}/{STEP}" in moments:
            state = {key: own(moments[f"{name}/{key}"], parameter).clone() for key in MOMENTS}
            # The fused optimizer wants its counter where the parameter is.
            step = moments[f"{name}/{STEP}"].to(parameter.device, copy=True)
            optimizer.state[parameter] = {STEP: step, **state}
