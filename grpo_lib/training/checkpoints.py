"""Checkpoints: the whole training state as files that any tool reads (safetensors and JSON).

``model.safetensors`` and ``config.json``: the policy in Hugging Face format, in the precision of its passes; or
``adapter_model.safetensors`` and ``adapter_config.json`` of LoRA. ``weights.safetensors``: the policy in float32 where
the model is in less. ``optimizer.safetensors``, ``critic*.safetensors``: moments, and the critic. Everything is whole
and by parameter name, so that any backend with any number of ranks restores what any other saved. Nothing draws from
a random state that lasts, so there is none to save.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from grpo_lib.errors import ConfigError, CorruptError
from grpo_lib.models import load_model
from grpo_lib.storage.keys import StageSpec
from grpo_lib.training.export import export_model
from grpo_lib.training.modules import first_values
from grpo_lib.training.tensors import has_tensors, load_tensors, save_tensors
from grpo_lib.training.trainer import Trainer

CHECKPOINT = StageSpec(name="checkpoint", version=2, reads=("model.dtype",))
STATE = "trainer_state.json"


def save_trainer(trainer: Trainer, folder: Path, dtype: torch.dtype) -> None:
    """Writes the state of ``trainer`` into ``folder``; all ranks call, rank 0 writes."""
    own = {name.removeprefix("model."): each for name, each in trainer.policy.weights().items()}
    moments = trainer.policy.moments()
    critic = None if trainer.critic is None else (trainer.critic.learner.weights(), trainer.critic.learner.moments())
    if trainer.world.rank != 0:
        return
    state = {"optimizer_step": trainer.optimizer_step, "dtype": str(dtype).removeprefix("torch.")}
    if trainer.adapter is not None:
        trainer.adapter.save(own, folder)
    else:
        state["export_digest"] = export_model(trainer.model, own, dtype, folder)
        if dtype != torch.float32:
            save_tensors(own, folder, "weights")
    save_tensors(moments, folder, "optimizer")
    if critic is not None:
        save_tensors(critic[0], folder, "critic")
        save_tensors(critic[1], folder, "critic_optimizer")
    (folder / STATE).write_text(json.dumps(state))


def start_trainer(trainer: Trainer, folder: Path) -> None:
    """Starts anew from a model folder, whatever else lies in it: fresh adapters and optimizer, step 0."""
    if trainer.adapter is not None:
        trainer.load_policy(trainer.adapter.first, {}, 0)
    if trainer.adapter is None or trainer.critic is not None:
        model = load_model(str(folder), torch.float32, "cpu")
        if trainer.adapter is None:
            trainer.load_policy(model.state_dict(), {}, 0)
        if trainer.critic is not None:
            trainer.critic.learner.load(first_values(model), {})


def restore_trainer(trainer: Trainer, folder: Path) -> None:
    """Reads what ``save_trainer`` wrote; exact, from any backend and number of ranks.

    Raises:
        ConfigError: it is of a run with adapters and this one has none, or the other way round; or it has no critic.
        CorruptError: it is not whole.
    """
    path = folder / STATE
    if not path.exists():
        raise CorruptError(f"{folder} holds no {STATE}, so it is no checkpoint; restore it from a backup")
    state = json.loads(path.read_text())
    moments = load_tensors(folder, "optimizer")
    trainer.load_policy(_policy_weights(trainer, folder, state["dtype"]), moments, state["optimizer_step"])
    if trainer.critic is not None:
        if not has_tensors(folder, "critic"):
            raise ConfigError(f"{folder} holds no critic; restore it without the section critic")
        trainer.critic.learner.load(load_tensors(folder, "critic"), load_tensors(folder, "critic_optimizer"))


def _policy_weights(trainer: Trainer, folder: Path, dtype: str) -> dict[str, Tensor]:
    if trainer.adapter is not None:
        return trainer.adapter.load(folder)
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} holds an adapter and no whole model; restore it with trainer.lora as it was")
    if dtype != "float32":
        return load_tensors(folder, "weights")
    return dict(load_model(str(folder), torch.float32, "cpu").state_dict())
