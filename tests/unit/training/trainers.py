"""Trainers of tiny models in this process, batches for them, and what tests look at in them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.kl import k3
from grpo_lib.algorithms.losses import ppo_clip
from grpo_lib.config import CriticConfig, OptimizerConfig, TrainerConfig
from grpo_lib.data.ragged import repeat_rows
from grpo_lib.training import backends
from grpo_lib.training.base import Batching, KlTerm, Objective, UpdateBatch
from grpo_lib.training.microbatches import Sequences
from grpo_lib.training.reference import Reference
from grpo_lib.training.trainer import Trainer
from grpo_lib.training.world import World
from tests.tiny_models import random_sequences, tiny_model

ALONE = World.alone(torch.device("cpu"))
ARCHITECTURES = ("qwen3", "llama", "gemma", "gpt2")
ROWS = 12
GROUPS = (5, 3, 5, 8, 8, 1, 8, 3, 8, 5, 3, 8)
KL = KlTerm(coef=0.1, estimator=k3)
EXACT_KL = KlTerm(coef=0.1, estimator=None)
BATCHING = Batching(epochs=1, mini_batch_groups=None, max_tokens=10_000, seed=3, max_skipped=0)
LORA = {"lora": {"rank": 4, "alpha": 16.0}}
_LAST: WeakKeyDictionary[Any, dict[str, Tensor]] = WeakKeyDictionary()


def make_settings(settings: Mapping[str, Any] | None = None, **optimizer: Any) -> TrainerConfig:
    chosen = OptimizerConfig(**{"lr": 1e-3, "max_grad_norm": 1e6, **optimizer})
    return TrainerConfig(**{"max_tokens": 10_000, "optimizer": chosen, **(settings or {})})


def make_trainer(
    architecture: str = "qwen3",
    *,
    settings: Mapping[str, Any] | None = None,
    decay_steps: int | None = 100,
    dtype: torch.dtype = torch.float32,
    world: World = ALONE,
    critic: Mapping[str, Any] | None = None,
    reference: Callable[[], Any] | None = None,
    **optimizer: Any,
) -> Trainer:
    """A trainer of the same tiny model each time.

    Args:
        settings: of the trainer, but for its ``optimizer``'s.
        critic: settings of one, if there shall be one.
        reference: gives a model, if it shall have one of its own.
    """
    config = make_settings(settings, **optimizer)
    trainer = backends.make_trainer(
        partial(tiny_model, architecture),
        config,
        decay_steps=decay_steps,
        dtype=dtype,
        world=world,
        critic=None if critic is None else CriticConfig(**critic),
    )
    if reference is not None:
        trainer.reference = make_reference(trainer, reference, settings, dtype)
    _record_gradients(trainer.policy)
    if trainer.critic is not None:
        _record_gradients(trainer.critic.learner)
    return trainer


def make_reference(
    trainer: Trainer,
    load: Callable[[], Any] | None,
    settings: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Reference:
    return backends.make_reference_for(trainer, make_settings(settings), dtype, load)


def _record_gradients(learner: Any) -> None:
    """A step ends with clearing them."""
    clear = learner._optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        named = learner.module.named_parameters()
        _LAST[learner] = {name: p.grad.clone() for name, p in named if p.grad is not None}
        clear(set_to_none)

    learner._optimizer.zero_grad = zero_grad


def last_gradients(learner: Any) -> dict[str, Tensor]:
    """Of the last step, as clipped."""
    return _LAST[learner]


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Of the policy's last step, as clipped, by the names of the model's parameters."""
    return {name.removeprefix("model."): each for name, each in last_gradients(trainer.policy).items()}


def parameters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in tensors.items()}


def state(trainer: Trainer) -> tuple[Any, ...]:
    """All that a trainer of one process holds between steps, copied."""
    learners = [trainer.policy] if trainer.critic is None else [trainer.policy, trainer.critic.learner]
    return trainer.optimizer_step, *((copied(each.weights()), copied(each.moments())) for each in learners)


def assert_same(ours: Any, theirs: Any) -> None:
    """Bit for bit."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def make_objective(aggregation: str = "token-mean", **changes: Any) -> Objective:
    standard = Objective(
        policy_loss=partial(ppo_clip, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
        aggregation=lambda mask, offsets: AGGREGATIONS[aggregation].function(mask, offsets, 12),
        temperature=0.8,
    )
    return replace(standard, **changes)


OF_THE_CUT = {"model_tokens", "model_tflop", "padded_fraction"}
"""Metrics that depend on which rows a micro-batch has together."""


def one_by_one(sequences: Sequences, max_tokens: int, layout: str, ranks: int, rows: Tensor) -> list[list[Tensor]]:
    """A micro-batch for each row, as `plan_sequences` would give them."""
    return [list(rows.split(1))]


def make_batch(
    seed: int = 0, *, ref: bool = False, noise: float = 0.2, architecture: str = "qwen3", values: bool = False
) -> UpdateBatch:
    """Groups of 1 to 5 rows; some tokens, and one whole row, are masked; group 3 has no signal.

    Args:
        ref: with log-probs of a reference.
        noise: by which the old log-probs differ from those of the model.
        values: with values and returns.
    """
    generator = torch.Generator().manual_seed(seed)
    sequences = random_sequences(seed, ROWS)
    offsets = sequences.responses.offsets
    tokens = int(offsets[-1])
    mask = (torch.rand(tokens, generator=generator) < 0.85).to(torch.uint8)
    mask[offsets[0]] = 1
    mask[offsets[4] : offsets[5]] = 0
    group_ids = torch.tensor(GROUPS)
    advantages = torch.randn(ROWS, generator=generator)
    advantages[group_ids == 3] = 0
    scored, _ = make_trainer(architecture).logprobs(sequences, 0.8)
    old = scored.values + noise * torch.randn(tokens, generator=generator)
    reference = scored.values + 0.5 * torch.randn(tokens, generator=generator)
    critic = torch.randn(2, tokens, generator=generator)
    return UpdateBatch(
        sequences=sequences,
        mask=scored.with_values(mask),
        old_logprobs=scored.with_values(old),
        advantages=scored.with_values(repeat_rows(advantages, offsets) * mask),
        ref_logprobs=scored.with_values(reference) if ref else None,
        group_ids=group_ids,
        row_seeds=100 + torch.arange(ROWS),
        values=scored.with_values(0.1 * critic[0]) if values else None,
        returns=scored.with_values(critic[1]) if values else None,
    )


def only_group(batch: UpdateBatch, group: int) -> UpdateBatch:
    return batch.gather(torch.nonzero(batch.group_ids == group).squeeze(1))


def with_infinite_advantages(batch: UpdateBatch, group: int) -> UpdateBatch:
    bad = repeat_rows(batch.group_ids == group, batch.advantages.offsets)
    return replace(batch, advantages=batch.advantages.with_values(batch.advantages.values.masked_fill(bad, math.inf)))


def perturbed(model: Any) -> Any:
    """The model with other weights."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model
