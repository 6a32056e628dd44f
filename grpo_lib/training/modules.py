"""The networks that are trained, as modules whose ``forward`` is all that a backend has to wrap.

A backend gathers sharded weights around ``forward`` and hooks its results, so everything that needs weights happens
inside, and results are plain tuples of tensors.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_lib.training.heads import head_of
from grpo_lib.training.logprobs import Head, token_scores
from grpo_lib.training.microbatches import MicroBatch

Scores = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class PolicyModule(nn.Module):
    """A Transformers causal language model that gives what is needed at each response token.

    Args:
        model: in evaluation mode; adapters of LoRA are already in it.
        autocast: dtype of the passes through the backbone; None: that of the weights.
    """

    def __init__(self, model: Any, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast

    def forward(
        self,
        batch: MicroBatch,
        temperature: float,
        reference: tuple[Tensor, Head] | None = None,
        squares: bool = False,
        hidden_only: bool = False,
    ) -> Scores | Tensor:
        """The fields of `TokenScores`, in order; or only the hidden states ``[n, hidden]`` that predict the response.

        Args:
            reference: hidden states and head of another policy: also the exact KL to it.
        """
        hidden = response_states(self.model.base_model, batch, self.autocast)
        if hidden_only:
            return hidden
        head = head_of(self.model)
        scores = token_scores(hidden, head, batch.targets, temperature, reference=reference, squares=squares)
        return scores.logprobs, scores.entropy, scores.kl, scores.ref_logprobs, scores.sum_squared_probs


class ValueModule(nn.Module):
    """The critic's network: the backbone of a causal language model with a value head."""

    def __init__(self, model: Any, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.backbone = model.base_model
        self.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
        nn.init.zeros_(self.value_head.weight)  # every value starts at 0, whatever the backbone
        self.value_head.to(next(model.parameters()).device)
        self.autocast = autocast

    def forward(self, batch: MicroBatch) -> Tensor:
        """``float32[n]``: the value before each response token."""
        hidden = response_states(self.backbone, batch, self.autocast)
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), self.value_head.weight.float()).squeeze(-1)


def first_values(model: Any) -> dict[str, Tensor]:
    """Weights of a new `ValueModule` of ``model``."""
    weights = {f"backbone.{name}": value for name, value in model.base_model.state_dict().items()}
    return weights | {"value_head.weight": torch.zeros(1, model.config.get_text_config().hidden_size)}


def response_states(backbone: Any, batch: MicroBatch, autocast: torch.dtype | None) -> Tensor:
    """Hidden states ``[n, hidden]`` at the positions that predict the response tokens."""
    with torch.autocast(batch.input_ids.device.type, dtype=autocast, enabled=autocast is not None):
        hidden: Tensor = backbone(**batch.model_inputs()).last_hidden_state
    states = batch.predicting(hidden.flatten(0, 1))
    # Norms promote to the weights' float32; a GPU multiplies with the head several times as fast in less.
    return states.to(autocast) if autocast is not None and states.is_cuda else states


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a Transformers model: what is sharded and recomputed one by one."""
    return [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]


def recompute_layers(model: nn.Module) -> None:
    """Gradient checkpointing: a decoder layer keeps its inputs only, and runs again in the backward pass.

    Transformers' own does so in training mode alone, which would switch dropout on.
    """
    for layer in decoder_layers(model):
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
