"""From settings to a trainer: the networks, wrapped by the backend that was asked for."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo_lib.errors import ModelError
from grpo_lib.training.attention import check_packing, use_packed_attention
from grpo_lib.training.critic import Critic
from grpo_lib.training.flops import FlopCounter
from grpo_lib.training.heads import check_head
from grpo_lib.training.learner import AdamWSettings, Learner, TorchLearner
from grpo_lib.training.lora import add_adapter
from grpo_lib.training.microbatches import Layout
from grpo_lib.training.modules import PolicyModule, ValueModule, recompute_layers
from grpo_lib.training.reference import Reference
from grpo_lib.training.schedules import lr_factor
from grpo_lib.training.trainer import Trainer
from grpo_lib.training.world import World

if TYPE_CHECKING:  # pydantic is not needed to train
    from grpo_lib.config import CriticConfig, TrainerConfig

Load = Callable[[], Any]
"""Gives a new model: float32, on the device of the world, in evaluation mode."""


def make_trainer(
    load: Load,
    settings: "TrainerConfig",
    *,
    decay_steps: int | None,
    dtype: torch.dtype,
    world: World,
    critic: "CriticConfig | None" = None,
    seed: int = 0,
) -> Trainer:
    """A trainer of the model that ``load`` gives.

    Args:
        decay_steps: optimizer steps until the schedule's end; None with a constant one.
        dtype: of the passes through the backbone; weights stay float32.
        seed: of the adapters.

    Raises:
        ConfigError, MissingPackageError, ModelError: what was asked for can't be.
    """
    model = load()
    check_head(model)
    autocast = None if dtype == torch.float32 else dtype
    layout = use_layout(model, settings.layout, autocast, world.device)
    if settings.gradient_checkpointing:
        recompute_layers(model)
    adapter = None
    if settings.lora is not None:
        lora = settings.lora
        adapter = add_adapter(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=seed)
    optimizer = settings.optimizer
    adamw = AdamWSettings(
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
    )
    flops = FlopCounter.of(model)  # before a backend takes it apart
    policy = make_learner(PolicyModule(model, autocast), settings, adamw, world, autocast)
    return Trainer(
        policy,
        model=model,
        flops=flops,
        adapter=adapter,
        lr=optimizer.lr,
        lr_factor=partial(
            lr_factor,
            schedule=optimizer.schedule,
            warmup_steps=optimizer.warmup_steps,
            decay_steps=decay_steps,
            final_fraction=optimizer.final_lr_fraction,
        ),
        max_tokens=settings.max_tokens,
        layout=layout,
        world=world,
        critic=None if critic is None else _critic(load(), critic, settings, layout, world, autocast),
    )


def use_layout(model: Any, asked: str, autocast: torch.dtype | None, device: torch.device) -> Layout:
    """Prepares a model for packed or padded rows; ``auto`` is packed if its attention can keep packed rows apart.

    Args:
        device: where it will run, which with several ranks is not where it is yet.
    """
    if asked == "padded":
        return "padded"
    before = model.config._attn_implementation
    try:
        use_packed_attention(model)
        if device.type == "cuda" and getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
            raise ModelError(
                f"{type(model).__name__} caps attention scores, which packed rows on a GPU can't: "
                "set trainer.layout=padded"
            )
        check_packing(model, autocast)
    except (ModelError, RuntimeError) as error:  # the latter: a device that has no kernel for it
        if asked == "packed":
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"packed rows can't be computed here: {error}; set trainer.layout=padded") from error
        model.set_attn_implementation(before)
        return "padded"
    return "packed"


def make_learner(
    module: nn.Module, settings: "TrainerConfig", adamw: AdamWSettings, world: World, autocast: torch.dtype | None
) -> Learner:
    """The module with an optimizer, wrapped by the backend."""
    if settings.backend == "torch":
        return TorchLearner(module, adamw)
    if settings.backend == "fsdp2":
        from grpo_lib.training.fsdp2 import Fsdp2Learner

        return Fsdp2Learner(module, adamw, world, autocast)
    from grpo_lib.training.deepspeed import DeepSpeedLearner

    zero = settings.deepspeed
    return DeepSpeedLearner(
        module,
        adamw,
        world,
        stage=zero.stage,
        offload_optimizer=zero.offload_optimizer,
        offload_parameters=zero.offload_parameters,
    )


def make_reference_for(trainer: Trainer, settings: "TrainerConfig", dtype: torch.dtype, load: Load | None) -> Reference:
    """A frozen policy, sharded like the one that learns.

    Args:
        load: gives its model; None: it is the trainer's with the adapters off.
    """
    zero3 = settings.backend == "deepspeed" and settings.deepspeed.stage == 3
    if load is None:
        assert trainer.adapter is not None, "without adapters the reference is a model of its own"
        policy, off = trainer.policy, trainer.adapter.off
        return Reference(
            module=policy.module, model=trainer.model, gathered=policy.gathered, passing=zero3, switched=off
        )
    model, autocast = load(), None if dtype == torch.float32 else dtype
    check_head(model)
    sizes = [each.config.get_text_config().vocab_size for each in (model, trainer.model)]
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"the reference policy has a vocabulary of {sizes[0]:,} tokens, the policy one of {sizes[1]:,}; their "
            "probabilities can't be compared: take a reference with the policy's tokenizer"
        )
    use_layout(model, trainer.layout, autocast, trainer.world.device)
    module: Any = PolicyModule(model.requires_grad_(False), autocast)
    if settings.backend == "fsdp2":
        from grpo_lib.training.fsdp2 import shard, unsharded

        module = shard(module, trainer.world, autocast)
        return Reference(module=module, model=model, gathered=partial(unsharded, module))
    if zero3:
        from grpo_lib.training.deepspeed import gathered_head, shard_frozen

        gathered = partial(gathered_head, model)
        return Reference(module=shard_frozen(module), model=model, gathered=gathered, passing=True)
    return Reference(module=module.to(trainer.world.device), model=model)


def _critic(
    model: Any,
    critic: "CriticConfig",
    settings: "TrainerConfig",
    layout: Layout,
    world: World,
    autocast: torch.dtype | None,
) -> Critic:
    use_layout(model, layout, autocast, world.device)
    if settings.gradient_checkpointing:
        recompute_layers(model)
    adamw = AdamWSettings(max_grad_norm=critic.max_grad_norm)
    learner = make_learner(ValueModule(model, autocast), settings, adamw, world, autocast)
    return Critic(learner=learner, lr=critic.lr, value_clip=critic.value_clip)
