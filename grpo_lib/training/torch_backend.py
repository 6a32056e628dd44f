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

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_lib.algorithms.kl import importance_corrected, straight_through
from grpo_lib.algorithms.losses import PolicyLoss
from grpo_lib.algorithms.registry import call
from grpo_lib.config import OptimizerConfig
from grpo_lib.data.ragged import Ragged, kept_offsets, repeat_rows, segment_sum
from grpo_lib.errors import AlgorithmError, NonFiniteError
from grpo_lib.models import load_model
from grpo_lib.seeds import derive_seed, uniforms
from grpo_lib.training.base import Batching, KlTerm, Objective, StepMetrics, UpdateBatch
from grpo_lib.training.critic import Critic
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.logprobs import TokenKl, token_logprobs, token_logprobs_and_kl, token_sum_squared_probs
from grpo_lib.training.microbatches import MicroBatch, Sequences, bins, micro_batch
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
                values = self._step(batch.gather(rows), objective, batching)
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

    def _step(self, batch: UpdateBatch, objective: Objective, batching: Batching) -> dict[str, float]:
        """One optimizer step on a mini-batch."""
        mask = batch.mask
        weights = mask.with_values(objective.aggregation(mask.values, mask.offsets).float())
        selected = self._select(batch, objective, batching.seed) if objective.select is not None else None
        part = _MiniBatch(batch=batch, weights=weights, selected=selected)
        lengths = batch.sequences.prompts.lengths + batch.sequences.responses.lengths
        active = _rows_with_gradient(batch, objective, self.critic is not None)
        totals = _Totals()
        self._optimizer.zero_grad(set_to_none=False)
        padded = 0
        for indices in bins(lengths[active], batching.max_tokens):
            micro = micro_batch(batch.sequences, active[indices]).to(self.device)
            padded += micro.input_ids.numel()
            self._backward(part, micro, objective, totals)
        if objective.correction is not None and totals.nothing_left:
            raise AlgorithmError(
                f"rollout correction in bypass mode: every token of the mini-batch (optimizer step "
                f"{self.optimizer_step + 1}) is rejected; loosen algorithm.rollout_correction, lower "
                "trainer.optimizer.lr, or make fewer updates an iteration"
            )
        critic = {} if self.critic is None else {"critic_grad_norm": self.critic.step()}
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

    def _select(self, batch: UpdateBatch, objective: Objective, seed: int) -> Ragged:
        """What the loss's helper chooses among all tokens of the mini-batch, ``bool[N]``; costs a forward pass."""
        assert objective.select is not None
        valid = batch.mask.values.bool()
        logprobs, _ = self.logprobs(batch.sequences, objective.temperature)
        columns = _Selecting(
            logprobs=logprobs.values[valid],
            advantages=batch.advantages.values[valid],
            draws=token_draws(batch.row_seeds, batch.mask.offsets, seed)[valid],
        )
        chosen = torch.zeros(len(valid), dtype=torch.bool)
        chosen[valid] = call(objective.select, columns)
        return batch.mask.with_values(chosen)

    def _backward(self, part: "_MiniBatch", micro: MicroBatch, objective: Objective, totals: "_Totals") -> None:
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            if objective.kl is not None and objective.kl.estimator is None:
                scored, exact = token_logprobs_and_kl(self.model, self.reference, micro, objective.temperature)
            else:
                scored, exact = token_logprobs(self.model, micro, objective.temperature), None
        # A masked token must not reach the gradient, not even as 0 * inf: nothing after this sees one.
        batch = part.batch
        taken = batch.mask.gather(micro.rows).values.bool()
        given = taken  # rejection is about the policy: the critic learns from these
        offsets = kept_offsets(taken, micro.offsets)

        def column(rows: Ragged) -> Tensor:
            return rows.gather(micro.rows).values[taken].to(self.device)

        is_weights = None if batch.is_weights is None else column(batch.is_weights)
        if objective.correction is not None:
            ratio = scored.logprobs.detach()[taken.to(self.device)] - column(batch.old_logprobs)
            kept, weights = (
                each if each is None else each.cpu() for each in objective.correction(ratio.cpu(), offsets)
            )
            assert kept is not None
            totals.add("rejected_fraction", ~kept)
            taken = taken.masked_scatter(taken, kept)
            offsets = kept_offsets(taken, micro.offsets)
            is_weights = None if weights is None else weights[kept].to(self.device)
        here = taken.to(self.device)
        tokens = _Tokens(
            logprobs=scored.logprobs[here],
            old_logprobs=column(batch.old_logprobs),
            advantages=column(batch.advantages),
            offsets=offsets.to(self.device),
            selected=None if part.selected is None else column(part.selected),
        )
        loss: PolicyLoss = call(objective.policy_loss, tokens)
        values = loss.values if is_weights is None else loss.values * is_weights
        if objective.kl is not None:
            kl = self._kl(objective.kl, tokens, exact, here, None if exact else column(_given(batch.ref_logprobs)))
            values = values + objective.kl.coef * kl
            totals.add("kl", kl)
        if objective.entropy_coef:
            values = values - objective.entropy_coef * scored.entropy[here]
        total = (column(part.weights) * values).sum()
        total.backward()
        totals.loss += float(total.detach())
        totals.add("entropy", scored.entropy[here])
        totals.add("approx_kl", tokens.old_logprobs - tokens.logprobs)
        totals.add("ratio", loss.ratio)
        totals.add("clip_fraction_high", loss.clipped_high)
        totals.add("clip_fraction_low", loss.clipped_low)
        totals.ratio_range(loss.ratio)
        if is_weights is not None:
            totals.add("is_weight", is_weights)
        if self.critic is not None:
            self._critic_backward(part, micro, given, totals)

    def _critic_backward(self, part: "_MiniBatch", micro: MicroBatch, taken: Tensor, totals: "_Totals") -> None:
        assert self.critic is not None

        def column(rows: Ragged | None) -> Tensor:
            return _given(rows).gather(micro.rows).values[taken].to(self.device)

        returns = column(part.batch.returns)
        loss, values = self.critic.backward(
            micro, taken.to(self.device), column(part.batch.values), returns, column(part.weights)
        )
        totals.value_loss = (totals.value_loss or 0.0) + loss
        totals.add("value", values)
        totals.add("value_error", (values - returns).square())

    def _kl(self, term: KlTerm, tokens: "_Tokens", exact: TokenKl | None, here: Tensor, ref: Tensor | None) -> Tensor:
        """KL penalty of each token, ``[n]``."""
        if exact is None:
            assert term.estimator is not None
            assert ref is not None
            kl = term.estimator(tokens.logprobs, ref)
        else:
            kl = exact.full[here]
            if term.straight_through:
                kl = straight_through(kl, tokens.logprobs, exact.ref_logprobs[here])
        return importance_corrected(kl, tokens.logprobs, tokens.old_logprobs) if term.importance else kl

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        names = {id(p): name for name, p in self._parameters.items()}
        moments = {
            f"{names[id(p)]}/{key}": value.detach().cpu().contiguous()
            for p, state in self._optimizer.state.items()
            for key, value in state.items()
        }
        save_file(moments, folder / "optimizer.safetensors")
        if self.critic is not None:
            self.critic.save(folder)
        state = {"optimizer_step": self.optimizer_step, "optimizer": "AdamW", "digest": self.digest()}
        (folder / "trainer_state.json").write_text(json.dumps(state))

    def restore_weights(self, folder: Path) -> None:
        self.model.load_state_dict(load_model(str(folder), torch.float32, "cpu").state_dict())
        self._optimizer = self._fresh_optimizer()
        self.optimizer_step = 0
        if self.critic is not None:
            self.critic.reset()

    def restore(self, folder: Path) -> None:
        self.restore_weights(folder)
        if self.critic is not None:
            self.critic.restore(folder)
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
    """A mini-batch with what was computed over the whole of it."""

    batch: UpdateBatch
    weights: Ragged
    """Aggregation weight of each token."""
    selected: Ragged | None
    """``bool[N]``."""


@dataclass(frozen=True, kw_only=True)
class _Selecting:
    """Columns that a loss's helper may name, of all tokens of a mini-batch with mask 1."""

    logprobs: Tensor
    advantages: Tensor
    draws: Tensor


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """Columns that a policy loss may name, of a micro-batch's tokens with mask 1."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    offsets: Tensor
    selected: Tensor | None


class _Totals:
    """Sums over the micro-batches of a step; means over tokens with mask 1."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.value_loss: float | None = None
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
        if self.value_loss is not None:
            means["value_loss"] = self.value_loss
        return {"loss": self.loss, **means}

    @property
    def nothing_left(self) -> bool:
        """There were tokens, and all were rejected."""
        return self._tokens.get("rejected_fraction", 0) > 0 and self._tokens.get("entropy", 0) == 0


def mini_batches(mask: Ragged, group_ids: Tensor, batching: Batching, epoch: int) -> list[Tensor]:
    """Row indices of each mini-batch of an epoch: whole groups with a token left, shuffled by (seed, epoch).

    Without any token left there is one mini-batch, of all rows.
    """
    live = segment_sum(mask.values.long(), mask.offsets) > 0
    groups, of_row = torch.unique(group_ids, return_inverse=True)
    alive = torch.zeros(len(groups), dtype=torch.bool).index_fill(0, of_row[live], True)
    count = int(alive.sum())
    if count == 0:
        return [torch.arange(len(group_ids))]
    size = batching.mini_batch_groups or count
    generator = torch.Generator().manual_seed(derive_seed(batching.seed, "mini-batches", epoch))
    place = torch.full((len(groups),), -size)
    place[torch.nonzero(alive).squeeze(1)[torch.randperm(count, generator=generator)]] = torch.arange(count)
    part = place[of_row] // size
    return [torch.nonzero(part == index).squeeze(1) for index in range(-(-count // size))]


def token_draws(row_seeds: Tensor, offsets: Tensor, seed: int) -> Tensor:
    """A number in [0, 1) for each token, ``float64[N]``: of its row's seed and its position in the row."""
    position = torch.arange(int(offsets[-1])) - repeat_rows(offsets[:-1], offsets)
    mixed = repeat_rows(row_seeds, offsets).numpy() ^ np.int64(seed)
    return torch.from_numpy(uniforms(mixed, position.numpy()))


def _rows_with_gradient(batch: UpdateBatch, objective: Objective, critic: bool) -> Tensor:
    """Rows that can change the gradient; exact: without KL, entropy and critic, zero advantages add nothing."""
    valid = batch.mask.values != 0
    if objective.kl is None and not objective.entropy_coef and objective.zero_without_advantage and not critic:
        valid = valid & (batch.advantages.values != 0)
    return torch.nonzero(segment_sum(valid.long(), batch.mask.offsets)).squeeze(1)


def _given(rows: Ragged | None) -> Ragged:
    assert rows is not None, "the objective needs a column that the batch does not have"
    return rows
