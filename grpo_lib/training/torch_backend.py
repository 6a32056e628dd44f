"""The `torch` backend: one process, CPU or one GPU, float32 master weights.

The model stays in evaluation mode in updates as well: dropout would make the ratio of a policy to itself differ from 1.
Nothing here draws from a global random state, so weights, optimizer moments and the step are the whole state.
"""

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_lib.config import OptimizerConfig
from grpo_lib.data.ragged import Ragged
from grpo_lib.errors import AlgorithmError, NonFiniteError
from grpo_lib.models import load_model
from grpo_lib.seeds import derive_seed
from grpo_lib.training.base import Batching, Objective, StepMetrics, UpdateBatch
from grpo_lib.training.critic import Critic
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.logprobs import token_logprobs, token_logprobs_and_kl, token_sum_squared_probs
from grpo_lib.training.loss_terms import Totals, critic_backward, micro_batch_loss
from grpo_lib.training.microbatches import MicroBatch, Sequences, bins, micro_batch
from grpo_lib.training.minibatches import MiniBatch, make_mini_batch, mini_batches, rows_with_gradient
from grpo_lib.training.moments import load_moments, save_moments
from grpo_lib.training.schedules import lr_factor
from grpo_lib.training.scoring import score, score_tokens


class TorchTrainer:
    """A Transformers causal LM with AdamW.

    Args:
        model: float32 weights, on the device where it is to run.
        optimizer: settings of AdamW and its schedule.
        decay_steps: optimizer steps until the schedule's end; None with a constant one.
        dtype: of the passes through the model; ``bfloat16`` autocasts, the weights stay float32.
        max_tokens: padded tokens a micro-batch when scoring.
        reference: a frozen model, for the exact KL.
        critic: for estimators that use values.
    """

    def __init__(
        self,
        model: Any,
        optimizer: OptimizerConfig,
        *,
        decay_steps: int | None,
        dtype: torch.dtype,
        max_tokens: int,
        reference: Any = None,
        critic: Critic | None = None,
    ) -> None:
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.autocast = dtype if dtype != torch.float32 else None
        self.max_tokens = max_tokens
        self.reference = reference
        self.critic = critic
        self.optimizer_step = 0
        self._settings = optimizer
        self._lr_factor = partial(
            lr_factor,
            schedule=optimizer.schedule,
            warmup_steps=optimizer.warmup_steps,
            decay_steps=decay_steps,
            final_fraction=optimizer.final_lr_fraction,
        )
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizer = self._fresh_optimizer()

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        settings = self._settings
        matrices = [p for p in self._parameters.values() if p.ndim >= 2]
        vectors = [p for p in self._parameters.values() if p.ndim < 2]  # norms and biases: no decay
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )

    def digest(self) -> str:
        return weights_digest(self.weights())

    def critic_digest(self) -> str | None:
        return None if self.critic is None else self.critic.digest()

    def weights(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def logprobs(self, sequences: Sequences, temperature: float) -> tuple[Ragged, Ragged]:
        return score(self.model, sequences, temperature=temperature, max_tokens=self.max_tokens, autocast=self.autocast)

    def sum_squared_probs(self, sequences: Sequences, temperature: float) -> Ragged:
        (result,) = score_tokens(
            lambda batch: (token_sum_squared_probs(self.model, batch, temperature),),
            sequences,
            device=self.device,
            max_tokens=self.max_tokens,
            autocast=self.autocast,
        )
        return result

    def values(self, sequences: Sequences) -> Ragged:
        assert self.critic is not None, "this trainer has no critic"
        return self.critic.values(sequences)

    def update(self, batch: UpdateBatch, objective: Objective, batching: Batching) -> list[StepMetrics]:
        steps, skipped = [], 0
        for epoch in range(batching.epochs):
            for rows in mini_batches(batch.mask, batch.group_ids, batching, epoch):
                part = batch.gather(rows)
                values = self._step(part, objective, batching, epoch)
                skipped += int(values["skipped"] + values.get("critic_skipped", 0.0))
                if skipped > batching.max_skipped:
                    raise NonFiniteError(
                        f"{skipped} gradients of one iteration were NaN or infinite "
                        f"(trainer.max_skipped={batching.max_skipped}); lower trainer.optimizer.lr and go back to a "
                        "checkpoint, or look at the iteration's rollouts"
                    )
                tokens = int(part.mask.values.sum())
                steps.append(
                    StepMetrics(
                        optimizer_step=self.optimizer_step, epoch=epoch, rows=len(rows), tokens=tokens, values=values
                    )
                )
        return steps

    def _step(self, batch: UpdateBatch, objective: Objective, batching: Batching, epoch: int) -> dict[str, float]:
        """One optimizer step on a mini-batch."""
        seed = derive_seed(batching.seed, "select", epoch)
        part = make_mini_batch(batch, objective, seed, lambda: self.logprobs(batch.sequences, objective.temperature)[0])
        lengths = batch.sequences.prompts.lengths + batch.sequences.responses.lengths
        active = rows_with_gradient(batch, objective, self.critic is not None)
        totals = Totals()
        self._optimizer.zero_grad(set_to_none=False)
        padded = 0
        for indices in bins(lengths[active], batching.max_tokens):
            micro = micro_batch(batch.sequences, active[indices]).to(self.device)
            padded += micro.input_ids.numel()
            self._backward(part, micro, objective, totals)
            if self.critic is not None:
                critic_backward(part, micro, self.critic, totals)
        if totals.nothing_left:
            raise AlgorithmError(
                f"rollout correction in bypass mode: every token that could change the policy (optimizer step "
                f"{self.optimizer_step + 1}) is rejected; loosen algorithm.rollout_correction, lower "
                "trainer.optimizer.lr, or make fewer updates an iteration"
            )
        critic = {}
        if self.critic is not None:
            critic_norm = self.critic.step()
            critic = {"critic_grad_norm": critic_norm, "critic_skipped": float(not math.isfinite(critic_norm))}
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._settings.max_grad_norm)
        finite = bool(torch.isfinite(norm))
        lr = self._settings.lr * self._lr_factor(self.optimizer_step)
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self.optimizer_step += 1
        trained = int(lengths[active].sum())
        return {
            **totals.metrics(),
            **critic,
            "grad_norm": float(norm),
            "lr": lr,
            "skipped": float(not finite),
            "trained_rows": float(len(active)),
            "padded_fraction": 1 - trained / padded if padded else 0.0,
        }

    def _backward(self, part: MiniBatch, micro: MicroBatch, objective: Objective, totals: Totals) -> None:
        """Adds a micro-batch's gradient."""
        exact = None
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            if objective.kl is not None and objective.kl.estimator is None:
                scored, exact = token_logprobs_and_kl(self.model, self.reference, micro, objective.temperature)
            else:
                scored = token_logprobs(self.model, micro, objective.temperature)
        micro_batch_loss(part, micro, scored, exact, objective, totals).backward()

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        save_moments(self._optimizer, self._parameters, folder / "optimizer.safetensors")
        if self.critic is not None:
            self.critic.save(folder)
        state = {"optimizer_step": self.optimizer_step, "optimizer": "AdamW", "digest": self.digest()}
        (folder / "trainer_state.json").write_text(json.dumps(state))

    def restore_weights(self, folder: Path) -> None:
        loaded = load_model(str(folder), torch.float32, "cpu")
        self.model.load_state_dict(loaded.state_dict())
        self._optimizer = self._fresh_optimizer()
        self.optimizer_step = 0
        if self.critic is not None:
            self.critic.reset(loaded)

    def restore(self, folder: Path) -> None:
        self.restore_weights(folder)
        if self.critic is not None:
            self.critic.restore(folder)
        load_moments(self._optimizer, self._parameters, folder / "optimizer.safetensors")
        self.optimizer_step = json.loads((folder / "trainer_state.json").read_text())["optimizer_step"]
