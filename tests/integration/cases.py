"""Training as the backends are compared by it: everything follows from a `Case`, in the tests' process and in ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.kl import k3
from grpo_lib.algorithms.losses import LOSSES
from grpo_lib.config import CriticConfig, TrainerConfig
from grpo_lib.data.ragged import repeat_rows
from grpo_lib.training.backends import make_reference_for, make_trainer
from grpo_lib.training.base import Batching, KlTerm, Objective, UpdateBatch
from grpo_lib.training.checkpoints import restore_trainer, save_trainer
from grpo_lib.training.tensors import save_tensors
from grpo_lib.training.trainer import Trainer
from grpo_lib.training.world import World
from tests.tiny_models import random_sequences, tiny_model

TEMPERATURE = 0.8
NONE_ALLOWED = -1e9
"""A ``max_kl`` that no mini-batch keeps to."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained on what. An iteration has a batch of its own, by its number."""

    architecture: str = "qwen3"
    rows: int = 11
    iterations: int = 1
    epochs: int = 1
    groups: int | None = None
    """Of a mini-batch."""
    max_tokens: int = 1000
    aggregation: str = "token-mean"
    loss: str = "ppo_clip"
    options: tuple[tuple[str, float], ...] = ()
    kl: str = "estimated"
    """``estimated``, ``exact``, or ``none``."""
    lora: bool = False
    """Adapters; the exact KL is to the model without them, else to one of its own."""
    critic: bool = False
    """With one iteration in which it learns alone."""
    recompute: bool = False
    layout: str = "padded"
    silent: int | None = None
    """An iteration without any advantage."""
    stopped: int | None = None
    """An iteration that ends before its first step."""
    broken: int | None = None
    """An iteration in which one row's advantages are infinite."""


def train(
    case: Case,
    backend: Mapping[str, Any],
    world: World,
    folder: Path,
    *,
    first: Path | None = None,
    start: int = 0,
    save_at: int | None = None,
) -> list[dict[str, float]]:
    """Trains, and writes what came out into ``folder``.

    Args:
        backend: settings of the trainer.
        first: a checkpoint to begin with.
        start: the first iteration.
        save_at: an iteration before which a checkpoint is written to ``folder/checkpoint``.

    Returns:
        The metrics of each step.
    """
    trainer = _trainer(case, backend, world)
    if first is not None:
        restore_trainer(trainer, first)
    steps = []
    for iteration in range(start, case.iterations):
        if iteration == save_at:
            save(trainer, folder / "checkpoint")
        done = trainer.update(update_batch(case, iteration), _objective(case), _batching(case, iteration))
        steps += [{"optimizer_step": each.optimizer_step, "rows": each.rows, **each.values} for each in done]
    _write(trainer, folder)
    return steps


def save(trainer: Trainer, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    save_trainer(trainer, folder, torch.float32)
    trainer.world.barrier()


def score(case: Case, backend: Mapping[str, Any], world: World, folder: Path) -> None:
    """Everything that a trainer says of responses, with a critic that has learnt a step."""
    trainer = _trainer(case, backend, world)
    batch = update_batch(case, 0)
    trainer.update(batch, _objective(case), _batching(case, 0))
    logprobs, entropy = trainer.logprobs(batch.sequences, TEMPERATURE)
    found = {"logprobs": logprobs, "entropy": entropy, "ref": trainer.ref_logprobs(batch.sequences, TEMPERATURE)}
    found["squares"] = trainer.sum_squared_probs(batch.sequences, TEMPERATURE)
    if trainer.critic is not None:
        found["values"] = trainer.values(batch.sequences)
    if world.rank == 0:
        save_tensors({name: each.values for name, each in found.items()}, folder, "scores")


def _trainer(case: Case, backend: Mapping[str, Any], world: World) -> Trainer:
    # With its usual eps AdamW makes steps of lr out of rounding errors, where the gradient is 0 in exact arithmetic.
    optimizer = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1, "max_grad_norm": 0.5, "schedule": "linear"}
    chosen = {"max_tokens": case.max_tokens, "layout": case.layout, "gradient_checkpointing": case.recompute}
    settings = TrainerConfig.model_validate(
        chosen | {"optimizer": optimizer, "lora": {"rank": 2} if case.lora else None} | dict(backend)
    )
    trainer = make_trainer(
        partial(tiny_model, case.architecture),
        settings,
        decay_steps=10,
        dtype=torch.float32,
        world=world,
        critic=CriticConfig(lr=1e-3, max_grad_norm=0.5) if case.critic else None,
        seed=7,
    )
    if case.kl == "exact":
        load = None if case.lora else partial(_other_model, case.architecture)
        trainer.reference = make_reference_for(trainer, settings, torch.float32, load)
    return trainer


def _other_model(architecture: str) -> Any:
    model, generator = tiny_model(architecture), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def _objective(case: Case) -> Objective:
    loss, options = LOSSES[case.loss], dict(case.options)
    kl = {"none": None, "estimated": KlTerm(coef=0.1, estimator=k3), "exact": KlTerm(coef=0.1, estimator=None)}
    return Objective(
        policy_loss=loss.bind(options, "options"),
        select=loss.bind_helper(options, "options"),
        zero_without_advantage=bool(loss.traits.get("zero_without_advantage", True)),
        aggregation=partial(_aggregated, case.aggregation),
        temperature=TEMPERATURE,
        kl=kl[case.kl],
        entropy_coef=0.0 if case.kl == "none" else 0.01,
    )


def _aggregated(name: str, mask: Tensor, offsets: Tensor) -> Tensor:
    return AGGREGATIONS[name].function(mask, offsets, 12)


def _batching(case: Case, iteration: int) -> Batching:
    return Batching(
        epochs=case.epochs,
        mini_batch_groups=case.groups,
        max_tokens=case.max_tokens,
        seed=3 + iteration,
        max_skipped=2,
        max_kl=NONE_ALLOWED if iteration == case.stopped else None,
        train_policy=not case.critic or iteration > 0,
    )


def update_batch(case: Case, iteration: int) -> UpdateBatch:
    """Groups of 1 to 3 rows of different lengths; some tokens, and one whole row, are masked."""
    rows, generator = case.rows, torch.Generator().manual_seed(10 + iteration)
    sequences = random_sequences(10 + iteration, rows)
    responses = sequences.responses
    drawn = torch.randn(5, len(responses.values), generator=generator)
    mask = (torch.rand(len(responses.values), generator=generator) < 0.85).to(torch.uint8)
    mask[0] = 1
    if rows > 4:
        mask[responses.offsets[4] : responses.offsets[5]] = 0
    group_ids = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 4, 5, 5])[:rows]
    advantages = repeat_rows(torch.randn(rows, generator=generator), responses.offsets) * mask
    if iteration == case.silent:
        advantages = torch.zeros_like(advantages)
    if iteration == case.broken:
        advantages[0] = torch.inf
    return UpdateBatch(
        sequences=sequences,
        mask=responses.with_values(mask),
        old_logprobs=responses.with_values(-2.9 + 0.4 * drawn[0]),
        advantages=responses.with_values(advantages),
        ref_logprobs=responses.with_values(-2.9 + 0.4 * drawn[1]),
        group_ids=group_ids,
        row_seeds=100 + torch.arange(rows),
        values=responses.with_values(0.1 * drawn[2]),
        returns=responses.with_values(drawn[3]),
    )


def _write(trainer: Trainer, folder: Path) -> None:
    """Weights and moments of policy and critic, by their full names."""
    parts = {"policy": trainer.policy} | ({} if trainer.critic is None else {"critic": trainer.critic.learner})
    for name, learner in parts.items():
        weights, moments = learner.weights(), learner.moments()
        if trainer.world.rank == 0:
            save_tensors(weights, folder, f"{name}-weights")
            save_tensors({key: each.clone() for key, each in moments.items()}, folder, f"{name}-moments")
