"""Checkpoints of a trainer: what lies in them, and that a restored trainer is the one that was saved."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_lib.errors import ConfigError, CorruptError, ModelError
from grpo_lib.models import load_model
from grpo_lib.training import export
from grpo_lib.training.base import StepMetrics
from grpo_lib.training.checkpoints import restore_trainer, save_trainer, start_trainer
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.tensors import load_tensors
from grpo_lib.training.trainer import Trainer
from tests.tiny_models import tiny_model
from tests.unit.training.trainers import (
    ARCHITECTURES,
    BATCHING,
    LORA,
    assert_same,
    copied,
    make_batch,
    make_objective,
    make_trainer,
    state,
)

EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES)
CRITIC = {"lr": 1e-3, "value_clip": 0.2}
TRAINERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"settings": {"layout": "padded"}},
    "LoRA": {"settings": LORA},
    "critic": {"critic": CRITIC},
    "LoRA and critic": {"settings": LORA, "critic": CRITIC},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16, LoRA and critic": {"dtype": torch.bfloat16, "settings": LORA, "critic": CRITIC},
}
SCHEDULE: dict[str, Any] = {"decay_steps": 6, "schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.1}


def iteration(trainer: Trainer, number: int, architecture: str = "qwen3") -> list[StepMetrics]:
    """Two optimizer steps."""
    batch = make_batch(number, architecture=architecture, values=trainer.critic is not None)
    return trainer.update(batch, make_objective(), replace(BATCHING, mini_batch_groups=2, seed=number))


def trained(steps: int = 1, **options: Any) -> Trainer:
    trainer = make_trainer(**options)
    for number in range(steps):
        iteration(trainer, number, options.get("architecture", "qwen3"))
    return trainer


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_restored_trainer_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    options = TRAINERS[kind] | SCHEDULE
    dtype = options.get("dtype", torch.float32)
    through = trained(3, **options)
    saved, digests = state(through), (through.digest(), through.critic_digest())
    save_trainer(through, tmp_path, dtype)
    assert_same(state(through), saved)
    expected = [iteration(through, number) for number in range(3, 6)]

    resumed = make_trainer(**options)
    iteration(resumed, 9)  # whatever it held before must not matter
    restore_trainer(resumed, tmp_path)
    assert_same(state(resumed), saved)
    assert (resumed.digest(), resumed.critic_digest(), resumed.optimizer_step) == (*digests, 6)
    assert [iteration(resumed, number) for number in range(3, 6)] == expected
    assert_same(state(resumed), state(through))
    assert resumed.digest() == through.digest() != digests[0]
    assert resumed.optimizer_step == 12


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("settings", [{}, LORA], ids=["plain", "LoRA"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_and_moments_of_every_architecture_come_back_exactly(
    tmp_path: Path, architecture: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {"architecture": architecture, "settings": settings, "dtype": dtype, "critic": CRITIC}
    trainer = trained(**options)
    assert trainer.policy.moments()
    save_trainer(trainer, tmp_path, dtype)
    other = make_trainer(**options)
    restore_trainer(other, tmp_path)
    assert_same(state(other), state(trainer))


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_checkpoint_before_the_first_step_has_no_moments(tmp_path: Path, kind: str) -> None:
    options = TRAINERS[kind]
    save_trainer(make_trainer(**options), tmp_path, options.get("dtype", torch.float32))
    trainer = trained(**options)
    restore_trainer(trainer, tmp_path)
    assert (trainer.optimizer_step, trainer.policy.moments()) == (0, {})
    assert_same(state(trainer), state(make_trainer(**options)))


@pytest.mark.parametrize(
    ("kind", "holds_a_training_state"),
    [("plain", False), ("plain", True), ("critic", True), ("LoRA", False), ("LoRA and critic", False)],
)
def test_going_back_to_the_initial_policy_forgets_all_training_state(
    tmp_path: Path, kind: str, holds_a_training_state: bool
) -> None:
    used, fresh = make_trainer(**TRAINERS[kind]), make_trainer(**TRAINERS[kind])
    iteration(used, 1)
    if holds_a_training_state:
        save_trainer(used, tmp_path, torch.float32)
    tiny_model().save_pretrained(tmp_path)
    start_trainer(used, tmp_path)
    assert (used.optimizer_step, used.digest()) == (0, fresh.digest())
    assert (used.policy.moments(), used.critic_digest()) == ({}, fresh.critic_digest())
    for trainer in (used, fresh):
        iteration(trainer, 2)
    assert_same(state(used), state(fresh))


# --- what lies in a checkpoint ----------------------------------------------------------------------------------------


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_policy_is_a_hugging_face_model_in_the_precision_of_its_passes(
    tmp_path: Path, architecture: str, dtype: torch.dtype
) -> None:
    trainer = trained(architecture=architecture, dtype=dtype)
    configuration = trainer.model.config.to_dict()
    save_trainer(trainer, tmp_path, dtype)
    assert trainer.model.config.to_dict() == configuration  # nothing of the export stays in the model that learns
    weights = trainer.weights()
    assert {each.dtype for each in weights.values()} == {torch.float32}

    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert type(model) is type(trainer.model) and model.dtype == dtype
    assert "packed" not in (tmp_path / "config.json").read_text()  # our attention is of our trainer alone
    found = model.state_dict()
    assert_same(dict(found), {name: each.to(dtype) for name, each in weights.items()})
    tied = model.config.tie_word_embeddings
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied

    digest = json.loads((tmp_path / "trainer_state.json").read_text())["export_digest"]
    assert digest == weights_digest(load_model(str(tmp_path), dtype, "cpu").state_dict())
    assert (digest == trainer.digest()) == (dtype == torch.float32)
    assert digest == weights_digest(weights, dtype)


def test_float32_weights_lie_beside_a_model_in_less_precision_only(tmp_path: Path) -> None:
    trainer = trained(dtype=torch.bfloat16)
    for dtype, name in ((torch.float32, "same"), (torch.bfloat16, "less")):
        (tmp_path / name).mkdir()
        save_trainer(trainer, tmp_path / name, dtype)
    assert not (tmp_path / "same" / "weights.safetensors").exists()
    kept = load_tensors(tmp_path / "less", "weights")
    assert_same(kept, trainer.weights())
    assert kept["lm_head.weight"].data_ptr() == kept["model.embed_tokens.weight"].data_ptr()


def test_moments_are_stored_by_the_parameter_s_name(tmp_path: Path) -> None:
    trainer = trained(critic=CRITIC)
    save_trainer(trainer, tmp_path, torch.float32)
    moments = load_tensors(tmp_path, "optimizer")
    names = {name for name, _ in trainer.model.named_parameters()}
    assert set(moments) == {f"model.{name}/{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
    assert {float(value) for name, value in moments.items() if name.endswith("/step")} == {2.0}
    assert any(name.startswith("value_head.weight/") for name in load_tensors(tmp_path, "critic_optimizer"))


# --- what is not whole ------------------------------------------------------------------------------------------------


def test_a_folder_without_a_training_state_is_no_checkpoint(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(CorruptError, match=r"holds no trainer_state\.json, so it is no checkpoint; restore it"):
        restore_trainer(make_trainer(), tmp_path)


def test_a_checkpoint_without_a_critic_can_t_be_restored_into_a_trainer_with_one(tmp_path: Path) -> None:
    save_trainer(make_trainer(), tmp_path, torch.float32)
    with pytest.raises(ConfigError, match="holds no critic; restore it without the section critic"):
        restore_trainer(make_trainer(critic=CRITIC), tmp_path)


def test_a_critic_that_nobody_asks_for_is_left_alone(tmp_path: Path) -> None:
    trainer = trained(critic=CRITIC)
    save_trainer(trainer, tmp_path, torch.float32)
    other = make_trainer()
    restore_trainer(other, tmp_path)
    assert other.digest() == trainer.digest() and other.critic_digest() is None


@pytest.mark.parametrize("lost", ["optimizer", "weights", "critic_optimizer"])
def test_a_file_that_is_missing_is_noticed_and_nothing_else_taken_in_its_place(tmp_path: Path, lost: str) -> None:
    """Moments would be fresh, and weights those of the model in less precision."""
    trainer = trained(critic=CRITIC)
    save_trainer(trainer, tmp_path, torch.bfloat16)
    (tmp_path / f"{lost}.safetensors").unlink()
    with pytest.raises(CorruptError, match=rf"holds 0 of 1 files {lost}\*\.safetensors; restore it from a backup"):
        restore_trainer(trainer, tmp_path)


@pytest.mark.parametrize(("file", "error"), [("optimizer", CorruptError), ("model", ModelError)])
def test_a_file_that_was_cut_is_noticed(tmp_path: Path, file: str, error: type[Exception]) -> None:
    trainer = trained()
    save_trainer(trainer, tmp_path, torch.float32)
    path = tmp_path / f"{file}.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(error, match=str(tmp_path)):
        restore_trainer(trainer, tmp_path)


def flip_a_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def zero_the_first_norm(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    model.save_pretrained(folder)


@pytest.mark.parametrize("damage", [flip_a_bit, zero_the_first_norm])
def test_an_export_that_reads_back_otherwise_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    trainer = trained()

    def load_damaged(path: str, *arguments: Any) -> Any:
        damage(Path(path))
        return load_model(path, *arguments)

    monkeypatch.setattr(export, "load_model", load_damaged)
    with pytest.raises(CorruptError, match=r"reads back with digest \w{16} instead of \w{16}; is the disk full"):
        save_trainer(trainer, tmp_path, torch.float32)
    assert not (tmp_path / "trainer_state.json").exists()


def test_an_export_of_weights_that_do_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer()
    weights = copied(trainer.weights())
    del weights["model.norm.weight"]
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight"):
        export.export_model(trainer.model, weights, torch.float32, tmp_path)


def test_a_generation_config_that_transformers_would_not_write_is_exported_as_it_is(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    model.generation_config.temperature = 0.6  # without do_sample, as some on the hub have it
    export.export_model(model, model.state_dict(), torch.float32, tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["temperature"] == 0.6


def test_a_folder_of_adapters_is_refused_as_a_model(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="grpo export"):
        load_model(str(tmp_path), torch.float32, "cpu")
