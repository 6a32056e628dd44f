"""Adapters: what they change, what they leave alone, and what of them is stored."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lib.data.ragged import Ragged
from grpo_lib.errors import ConfigError, MissingPackageError
from grpo_lib.training.checkpoints import restore_trainer, save_trainer
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.modules import PolicyModule
from grpo_lib.training.trainer import Trainer
from tests.tiny_models import random_sequences, tiny_model
from tests.unit.training.test_logprobs import one_row_at_a_time
from tests.unit.training.trainers import (
    ALONE,
    ARCHITECTURES,
    BATCHING,
    EXACT_KL,
    LORA,
    assert_same,
    copied,
    gradients,
    make_batch,
    make_objective,
    make_reference,
    make_trainer,
    parameters,
    state,
)

peft = pytest.importorskip("peft")
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES)
SEQUENCES = random_sequences(3, 7)


def lora(rank: int = 4, alpha: float = 16.0, **more: Any) -> dict[str, Any]:
    return {"lora": {"rank": rank, "alpha": alpha, **more}}


def trained(architecture: str = "qwen3", steps: int = 3, **options: Any) -> Trainer:
    """Far enough from the base that log-probs are others."""
    trainer = make_trainer(architecture, settings=LORA, lr=0.02, **options)
    trainer.update(make_batch(1, architecture=architecture), make_objective(), replace(BATCHING, epochs=steps))
    assert trainer.optimizer_step == steps
    return trainer


def scores(trainer: Trainer) -> Tensor:
    return trainer.logprobs(SEQUENCES, 0.8)[0].values


def plain_scores(model: Any) -> Tensor:
    return one_row_at_a_time(model, SEQUENCES, 0.8)[0].float()


# --- policy and reference ---------------------------------------------------------------------------------------------


@EVERY_ARCHITECTURE
def test_a_fresh_adapter_changes_no_log_prob(architecture: str) -> None:
    fresh = make_trainer(architecture, settings=LORA)
    assert_same(scores(fresh), scores(make_trainer(architecture)))
    assert fresh.adapter is not None and len(fresh.adapter.first) >= 2 * 2 * 4  # of two layers' linear maps
    randoms, zeros = ([v for n, v in fresh.adapter.first.items() if f".lora_{each}." in n] for each in "AB")
    assert all(bool(each.any()) for each in randoms) and not any(bool(each.any()) for each in zeros)


@EVERY_ARCHITECTURE
def test_only_adapters_learn(architecture: str) -> None:
    trainer, fresh = trained(architecture), make_trainer(architecture, settings=LORA)
    moved = {name for name, each in parameters(trainer).items() if not torch.equal(each, parameters(fresh)[name])}
    adapters = {name for name in parameters(trainer) if ".lora_" in name}
    assert moved == adapters and not any("lm_head" in name for name in adapters)
    assert set(gradients(trainer)) == adapters
    assert {name.rsplit("/")[0] for name in trainer.policy.moments()} == {f"model.{name}" for name in adapters}
    assert float((scores(trainer) - scores(fresh)).abs().max()) > 0.05


def test_adapters_are_drawn_by_their_seed_alone() -> None:
    from grpo_lib.training.lora import add_adapter

    def drawn(seed: int) -> dict[str, Tensor]:
        return dict(add_adapter(tiny_model(), rank=4, alpha=8, targets="all-linear", seed=seed).first)

    before = torch.get_rng_state()
    first = drawn(1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert_same(drawn(1), first)
    assert not torch.equal(next(iter(drawn(2).values())), next(iter(first.values())))


@EVERY_ARCHITECTURE
def test_merged_weights_in_a_plain_model_give_the_adapted_model_s_log_probs(architecture: str) -> None:
    trainer, plain = trained(architecture), tiny_model(architecture)
    base = plain_scores(plain)
    assert trainer.weights().keys() == plain.state_dict().keys()
    plain.load_state_dict(trainer.weights(), strict=True)
    torch.testing.assert_close(plain_scores(plain), scores(trainer), rtol=0, atol=1e-5)
    assert float((plain_scores(plain) - base).abs().max()) > 0.05
    assert trainer.digest() != make_trainer(architecture).digest()
    # Of a fresh adapter they are the base's own.
    assert_same(dict(make_trainer(architecture, settings=LORA).weights()), dict(tiny_model(architecture).state_dict()))


def test_alpha_over_rank_scales_an_adapter() -> None:
    changes = []
    for rank, alpha in ((4, 16.0), (4, 8.0), (2, 16.0)):
        trainer = make_trainer(settings=lora(rank, alpha))
        with torch.no_grad():
            for name, each in trainer.model.named_parameters():
                if ".lora_" in name:
                    each.fill_(0.01)
        name = "model.layers.0.mlp.up_proj.weight"
        changes.append(float((trainer.weights()[name] - tiny_model().state_dict()[name]).mean()))
    assert changes == pytest.approx([4 * 4 * 1e-4, 2 * 4 * 1e-4, 8 * 2 * 1e-4], rel=1e-3)  # alpha / rank, rank times


@EVERY_ARCHITECTURE
def test_with_its_adapters_off_the_policy_is_exactly_the_plain_model(architecture: str) -> None:
    trainer = trained(architecture)
    before = scores(trainer)
    trainer.reference = make_reference(trainer, None)
    assert trainer.reference.model is trainer.model
    assert_same(trainer.ref_logprobs(SEQUENCES, 0.8).values, scores(make_trainer(architecture)))
    assert_same(scores(trainer), before)  # they are on again
    assert all(p.requires_grad == (".lora_" in name) for name, p in trainer.model.named_parameters())


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("again", [False, True], ids=["kept", "gradient checkpointing"])
def test_the_exact_kl_to_the_base_with_adapters_off_is_that_to_a_copy_of_the_model(
    architecture: str, again: bool
) -> None:
    found = []
    batch = make_batch(2, architecture=architecture)
    for copy in (None, partial(tiny_model, architecture)):
        trainer = make_trainer(architecture, settings=LORA | {"gradient_checkpointing": again}, lr=0.02)
        trainer.reference = make_reference(trainer, copy)
        steps = trainer.update(batch, make_objective(kl=EXACT_KL), replace(BATCHING, epochs=3, max_tokens=40))
        assert steps[0].values["kl"] == pytest.approx(0, abs=1e-6) and steps[-1].values["kl"] > 1e-3
        found.append((gradients(trainer), parameters(trainer), [step.values for step in steps]))
    for ours, theirs in zip(found[0][:2], found[1][:2], strict=True):
        assert_same(
            {n: each for n, each in ours.items() if ".lora_" in n}, {n: theirs[n] for n in ours if ".lora_" in n}
        )
    assert found[0][2] == found[1][2]


# --- checkpoints ------------------------------------------------------------------------------------------------------


@EVERY_ARCHITECTURE
def test_a_checkpoint_is_an_adapter_that_peft_loads_onto_the_base(architecture: str, tmp_path: Path) -> None:
    trainer = trained(architecture)
    save_trainer(trainer, tmp_path, torch.float32)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".md") == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.safetensors",
        "trainer_state.json",
    ]
    loaded = peft.PeftModel.from_pretrained(tiny_model(architecture), tmp_path).eval()
    torch.testing.assert_close(plain_scores(loaded), scores(trainer), rtol=0, atol=1e-5)
    assert float((plain_scores(loaded) - plain_scores(tiny_model(architecture))).abs().max()) > 0.05


@EVERY_ARCHITECTURE
def test_a_checkpoint_restores_exactly(architecture: str, tmp_path: Path) -> None:
    trainer = trained(architecture)
    save_trainer(trainer, tmp_path, torch.bfloat16)  # adapters stay float32
    other = make_trainer(architecture, settings=LORA)
    restore_trainer(other, tmp_path)
    assert_same(state(other), state(trainer))
    assert_same(scores(other), scores(trainer))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lora(rank=2), r"another rank or other targets than trainer\.lora"),
        (lora(targets=["q_proj"]), r"another rank or other targets than trainer\.lora"),
        (lora(alpha=4.0), r"trainer\.lora\.alpha=16\.0 and not 4\.0"),
        ({}, r"holds an adapter and no whole model; restore it with trainer\.lora as it was"),
    ],
    ids=["rank", "targets", "alpha", "none"],
)
def test_an_adapter_of_another_shape_is_not_restored(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_trainer(trained(), tmp_path, torch.float32)
    other = make_trainer(settings=settings)
    before = copied(other.policy.weights())
    with pytest.raises(ConfigError, match=message):
        restore_trainer(other, tmp_path)
    assert_same(dict(other.policy.weights()), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_whole_model_is_not_restored_into_adapters(dtype: torch.dtype, tmp_path: Path) -> None:
    save_trainer(make_trainer(), tmp_path, dtype)
    with pytest.raises(ConfigError, match=r"holds a whole model and no adapter; restore it without trainer\.lora"):
        restore_trainer(make_trainer(settings=LORA), tmp_path)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "targets", "message"),
    [
        ("llama", ["q_proj", "lm_head"], "names the head, which log-probs are computed from directly; leave it out"),
        ("qwen3", ["lm_head"], "names the head, which log-probs are computed from directly; leave it out"),
        ("llama", ["q_proj", "embed_tokens"], r"model\.embed_tokens is no linear layer but an embedding; leave it out"),
        ("gpt2", ["wte"], r"transformer\.wte is no linear layer but an embedding; leave it out"),
        ("qwen3", ["query"], r"trainer\.lora\.targets=\['query'\]: Target modules \{'query'\} not found"),
        ("qwen3", ["input_layernorm"], r"trainer\.lora\.targets=\['input_layernorm'\]: .*not supported"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_targets_that_can_t_have_an_adapter_are_refused(architecture: str, targets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(architecture, settings=lora(targets=targets))


@pytest.mark.parametrize(("targets", "count"), [(["q_proj", "v_proj"], 4), (r".*\.1\..*_proj", 7), ("all-linear", 14)])
def test_targets_are_names_or_a_pattern(targets: Any, count: int) -> None:
    trainer = make_trainer(settings=lora(targets=targets))
    assert trainer.adapter is not None and len(trainer.adapter.first) == 2 * count


def test_a_missing_peft_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingPackageError, match=r"needs peft.*: pip install 'grpo-pipeline\[lora\]'"):
        make_trainer(settings=LORA)
    make_trainer()  # nothing else needs it


def test_the_reference_of_adapters_computes_no_gradient() -> None:
    trainer = trained()
    reference = make_reference(trainer, None)
    trainer.reference = reference
    assert isinstance(reference.module, PolicyModule)
    found: Ragged = trainer.ref_logprobs(SEQUENCES, 0.8)
    assert not found.values.requires_grad and trainer.world == ALONE
    assert all(p.grad is None for p in trainer.model.parameters())


def test_fresh_adapters_leave_a_negative_zero_of_the_base_as_it_is() -> None:
    trainer, plain = make_trainer(settings=LORA), tiny_model()
    name = "model.layers.0.mlp.up_proj.weight"
    weights = trainer.policy.weights()
    weights[f"model.{name.removesuffix('weight')}base_layer.weight"].view(-1)[3] = -0.0
    plain.state_dict()[name].view(-1)[3] = -0.0
    assert trainer.digest() == weights_digest(plain.state_dict())
