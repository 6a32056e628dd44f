"""The critic of PPO: a copy of the policy's backbone with a value head, its own optimizer and its own state."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from grpo_lib.algorithms.losses import value_loss
from grpo_lib.config import CriticConfig
from grpo_lib.data.ragged import Ragged
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.logprobs import response_states
from grpo_lib.training.microbatches import MicroBatch, Sequences
from grpo_lib.training.moments import load_moments, save_moments
from grpo_lib.training.scoring import score_tokens

HEAD = "value_head.weight"


class Critic:
    """Predicts, before each response token, the return from there on.

    Args:
        model: the policy to start from, for the critic alone; its language-model head is not used.
        settings: of its optimizer.
        autocast: dtype of the passes through the backbone, or None.
        max_tokens: padded tokens a micro-batch when scoring.
    """

    def __init__(self, model: Any, settings: CriticConfig, *, autocast: torch.dtype | None, max_tokens: int) -> None:
        self.backbone = model.eval().base_model
        self.device = next(model.parameters()).device
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False, device=self.device)
        nn.init.zeros_(self.head.weight)  # every value starts at 0, whatever the backbone
        self.settings = settings
        self.autocast = autocast
        self.max_tokens = max_tokens
        self._optimizer = self._fresh_optimizer()

    def weights(self) -> dict[str, Tensor]:
        """Of backbone and head, by name; views."""
        return self.backbone.state_dict() | {HEAD: self.head.weight.detach()}

    def digest(self) -> str:
        return weights_digest(self.weights())

    def _parameters(self) -> list[nn.Parameter]:
        return [*self.backbone.parameters(), self.head.weight]

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self._parameters(), lr=self.settings.lr, weight_decay=0.0, fused=True)

    def predict(self, batch: MicroBatch) -> Tensor:
        """``float32[n]``, differentiable."""
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            hidden = response_states(self.backbone, batch)
        return torch.nn.functional.linear(hidden.float(), self.head.weight).squeeze(-1)

    def values(self, sequences: Sequences) -> Ragged:
        """``float32[N]`` of all response tokens, without gradient."""
        (result,) = score_tokens(
            lambda batch: (self.predict(batch),),
            sequences,
            device=self.device,
            max_tokens=self.max_tokens,
            autocast=None,
        )
        return result

    def backward(
        self, batch: MicroBatch, taken: Tensor, old: Tensor, returns: Tensor, weights: Tensor
    ) -> tuple[float, Tensor]:
        """Adds a micro-batch's gradient. Of the tokens ``taken bool[n]``: old values, returns and aggregation weights.

        Returns:
            The micro-batch's share of the loss, and the predicted values of the tokens taken.
        """
        values = self.predict(batch)[taken]
        loss = (weights * value_loss(values, old, returns, clip=self.settings.value_clip)).sum()
        loss.backward()
        return float(loss.detach()), values.detach()

    def step(self) -> float:
        """An optimizer step with the gradient so far, unless that is not finite; its norm."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters(), self.settings.max_grad_norm)
        if bool(torch.isfinite(norm)):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def save(self, folder: Path) -> None:
        save_file(
            {name: each.cpu().contiguous() for name, each in self.weights().items()}, folder / "critic.safetensors"
        )
        save_moments(self._optimizer, self._numbered(), folder / "critic_optimizer.safetensors")

    def restore(self, folder: Path) -> None:
        self._load(load_file(folder / "critic.safetensors"))
        load_moments(self._optimizer, self._numbered(), folder / "critic_optimizer.safetensors")

    def _numbered(self) -> dict[str, nn.Parameter]:
        return {str(number): parameter for number, parameter in enumerate(self._parameters())}

    def reset(self, model: Any) -> None:
        """To the policy ``model``, as if made from it."""
        self._load(model.base_model.state_dict() | {HEAD: torch.zeros_like(self.head.weight)})

    def _load(self, weights: dict[str, Tensor]) -> None:
        self.backbone.load_state_dict({name: each for name, each in weights.items() if name != HEAD})
        with torch.no_grad():
            self.head.weight.copy_(weights[HEAD])
        self._optimizer = self._fresh_optimizer()
        self._optimizer.zero_grad(set_to_none=True)  # of an update that failed half-way
