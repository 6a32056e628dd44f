"""The `torch` backend: one process, CPU or one GPU, float32 master weights.

The model stays in evaluation mode in updates as well: dropout would make the ratio of a policy to itself differ from 1.
Nothing here draws from a global random state, so weights, optimizer moments and the step are the whole state.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_lib.config import OptimizerConfig
from grpo_lib.data.ragged import Ragged, segment_sum
from grpo_lib.errors import NonFiniteError
from grpo_lib.models import load_model
from grpo_lib.seeds import derive_seed
from grpo_lib.training.base import Batching, Objective, StepMetrics, UpdateBatch
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.logprobs import token_logprobs
from grpo_lib.training.microbatches import MicroBatch, Sequences, bins, micro_batch
from grpo_lib.training.schedules import lr_factor
from grpo_lib.training.scoring import score


class TorchTrainer:
    """A Transformers causal LM with AdamW.

    Args:
        model: float32 weights, on the device where it is to run.
        optimizer: settings of AdamW and its schedule.
        decay_steps: optimizer steps until the schedule's end; None with a constant one.
        dtype: of the passes through the model; ``bfloat16`` autocasts, the weights stay float32.
        max_tokens: padded tokens a micro-batch when scoring.
    """

    def __init__(
        self, model: Any, optimizer: OptimizerConfig, *, decay_steps: int | None, dtype: torch.dtype, max_tokens: int
    ) -> None:
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.autocast = dtype if dtype != torch.float32 else None
        self.max_tokens = max_tokens
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

    def weights(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def logprobs(self, sequences: Sequences, temperature: float) -> tuple[Ragged, Ragged]:
        return score(self.model, sequences, temperature=temperature, max_tokens=self.max_tokens, autocast=self.autocast)

    def update(self, batch: UpdateBatch, objective: Objective, batching: Batching) -> list[StepMetrics]:
        steps, skipped = [], 0
        for epoch in range(batching.epochs):
            for rows in mini_batches(batch.group_ids, batching, epoch):
                values = self._step(batch, rows, objective, batching.max_tokens)
                skipped += int(values["skipped"])
                if skipped > batching.max_skipped:
                    raise NonFiniteError(
                        f"{skipped} gradients of one iteration were NaN or infinite "
                        f"(trainer.max_skipped={batching.max_skipped}); lower trainer.optimizer.lr and go back to a "
                        "checkpoint, or look at the iteration's rollouts"
                    )
                tokens = int(batch.mask.gather(rows).values.sum())
                steps.append(
                    StepMetrics(
                        optimizer_step=self.optimizer_step, epoch=epoch, rows=len(rows), tokens=tokens, values=values
                    )
                )
        return steps

    def _step(self, batch: UpdateBatch, rows: Tensor, objective: Objective, max_tokens: int) -> dict[str, float]:
        """One optimizer step on the mini-batch ``rows``."""
        mask = batch.mask.gather(rows)
        weights = mask.with_values(objective.aggregation(mask.values, mask.offsets).float())
        part = _MiniBatch(
            sequences=batch.sequences.gather(rows),
            mask=mask,
            weights=weights,
            old=batch.old_logprobs.gather(rows),
            advantages=batch.advantages.gather(rows),
            ref=batch.ref_logprobs.gather(rows) if batch.ref_logprobs is not None else None,
        )
        lengths = part.sequences.prompts.lengths + part.sequences.responses.lengths
        active = _rows_with_gradient(part, objective)
        totals = _Totals()
        self._optimizer.zero_grad(set_to_none=False)
        padded = 0
        for indices in bins(lengths[active], max_tokens):
            micro = micro_batch(part.sequences, active[indices]).to(self.device)
            padded += micro.input_ids.numel()
            self._backward(part, micro, objective, totals)
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
            "grad_norm": float(norm),
            "lr": lr,
            "skipped": float(not finite),
            "trained_rows": float(len(active)),
            "padded_fraction": 1 - trained / padded if padded else 0.0,
        }

    def _backward(self, part: "_MiniBatch", micro: MicroBatch, objective: Objective, totals: "_Totals") -> None:
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            scored = token_logprobs(self.model, micro, objective.temperature)
        # A masked token must not reach the gradient, not even as 0 * inf: nothing after this line sees one.
        taken = part.mask.gather(micro.rows).values.to(self.device).bool()
        logprobs, entropy = scored.logprobs[taken], scored.entropy[taken]

        def column(rows: Ragged) -> Tensor:
            return rows.gather(micro.rows).values.to(self.device)[taken]

        old = column(part.old)
        loss = objective.policy_loss(logprobs, old, column(part.advantages))
        values = loss.values
        if part.ref is not None:
            kl = objective.kl(logprobs, column(part.ref))
            values = values + objective.kl_coef * kl
            totals.add("kl", kl)
        if objective.entropy_coef:
            values = values - objective.entropy_coef * entropy
        total = (column(part.weights) * values).sum()
        total.backward()
        totals.loss += float(total.detach())
        totals.add("entropy", entropy)
        totals.add("approx_kl", old - logprobs)
        totals.add("ratio", loss.ratio)
        totals.add("clip_fraction_high", loss.clipped_high)
        totals.add("clip_fraction_low", loss.clipped_low)
        totals.ratio_range(loss.ratio)

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        names = {id(p): name for name, p in self._parameters.items()}
        moments = {
            f"{names[id(p)]}/{key}": value.detach().cpu().contiguous()
            for p, state in self._optimizer.state.items()
            for key, value in state.items()
        }
        save_file(moments, folder / "optimizer.safetensors")
        state = {"optimizer_step": self.optimizer_step, "optimizer": "AdamW", "digest": self.digest()}
        (folder / "trainer_state.json").write_text(json.dumps(state))

    def restore_weights(self, folder: Path) -> None:
        self.model.load_state_dict(load_model(str(folder), torch.float32, "cpu").state_dict())
        self._optimizer = self._fresh_optimizer()
        self.optimizer_step = 0

    def restore(self, folder: Path) -> None:
        self.restore_weights(folder)
        moments = load_file(folder / "optimizer.safetensors")
        for name, parameter in self._parameters.items():
            prefix = f"{name}/"
            self._optimizer.state[parameter] = {
                key.removeprefix(prefix): value.to(parameter.device)
                for key, value in moments.items()
                if key.startswith(prefix)
            }
        self.optimizer_step = json.loads((folder / "trainer_state.json").read_text())["optimizer_step"]


@dataclass(frozen=True, kw_only=True)
class _MiniBatch:
    """Columns of one mini-batch."""

    sequences: Sequences
    mask: Ragged
    weights: Ragged
    """Aggregation weight of each token."""
    old: Ragged
    advantages: Ragged
    ref: Ragged | None


class _Totals:
    """Sums over the micro-batches of a step; means over tokens with mask 1."""

    def __init__(self) -> None:
        self.loss = 0.0
        self._sums: dict[str, float] = {}
        self._tokens: dict[str, float] = {}
        self._lowest, self._highest = float("inf"), float("-inf")

    def add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(values.detach().double().sum())
        self._tokens[name] = self._tokens.get(name, 0.0) + len(values)

    def ratio_range(self, ratio: Tensor) -> None:
        if len(ratio):
            self._lowest = min(self._lowest, float(ratio.min()))
            self._highest = max(self._highest, float(ratio.max()))

    def metrics(self) -> dict[str, float]:
        means = {name: total / max(1.0, self._tokens[name]) for name, total in self._sums.items()}
        if self._highest >= self._lowest:
            means |= {"ratio_min": self._lowest, "ratio_max": self._highest}
        return {"loss": self.loss, **means}


def mini_batches(group_ids: Tensor, batching: Batching, epoch: int) -> list[Tensor]:
    """Row indices of each mini-batch of an epoch: whole groups, shuffled by (seed, epoch)."""
    groups, of_row = torch.unique(group_ids, return_inverse=True)
    size = batching.mini_batch_groups or len(groups)
    generator = torch.Generator().manual_seed(derive_seed(batching.seed, "mini-batches", epoch))
    order = torch.randperm(len(groups), generator=generator)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(groups))
    part = place[of_row] // size
    return [torch.nonzero(part == index).squeeze(1) for index in range(-(-len(groups) // size))]


def _rows_with_gradient(part: _MiniBatch, objective: Objective) -> Tensor:
    """Rows that can change the gradient. Exact: without KL and entropy terms a row of zero advantages adds nothing."""
    if part.ref is not None or objective.entropy_coef:
        signal = part.mask.values != 0
    else:
        signal = (part.mask.values != 0) & (part.advantages.values != 0)
    return torch.nonzero(segment_sum(signal.long(), part.mask.offsets)).squeeze(1)
