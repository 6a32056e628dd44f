"""How rows are laid out, and whether layers run twice, changes no result."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.errors import ModelError
from grpo_lib.training import backends
from grpo_lib.training import trainer as trainer_module
from grpo_lib.training.backends import use_layout
from grpo_lib.training.microbatches import Sequences
from grpo_lib.training.modules import decoder_layers
from grpo_lib.training.trainer import Trainer
from tests.tiny_models import random_sequences, tiny_model
from tests.unit.training.test_logprobs import one_row_at_a_time, perturbed
from tests.unit.training.trainers import (
    ARCHITECTURES,
    BATCHING,
    EXACT_KL,
    KL,
    LORA,
    OF_THE_CUT,
    assert_same,
    gradients,
    last_gradients,
    make_batch,
    make_objective,
    make_trainer,
    one_by_one,
    parameters,
)

CPU = torch.device("cpu")
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES)
CRITIC = {"lr": 1e-3, "value_clip": 0.2, "max_grad_norm": 1e6}


def with_random_value_head(trainer: Trainer) -> Trainer:
    assert trainer.critic is not None
    head = dict(trainer.critic.learner.module.named_parameters())["value_head.weight"]
    with torch.no_grad():
        head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(2)))
    return trainer


def laid_out(architecture: str, layout: str, max_tokens: int = 10_000, **options: Any) -> Trainer:
    settings = {"layout": layout, "max_tokens": max_tokens}
    made = make_trainer(architecture, settings=settings, critic=CRITIC, eps=1e-2, **options)
    assert made.layout == layout
    return with_random_value_head(made)


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """By 1e-5 of a tensor's largest value, or of 1 where that is less."""
    assert ours.keys() == theirs.keys()
    for name, each in theirs.items():
        scale = max(1.0, float(each.abs().max()))
        torch.testing.assert_close(ours[name], each, rtol=0, atol=1e-5 * scale, msg=name)


def scores(trainer: Trainer, sequences: Sequences) -> list[Tensor]:
    logprobs, entropy = trainer.logprobs(sequences, 0.7)
    squares, values = trainer.sum_squared_probs(sequences, 0.7), trainer.values(sequences)
    return [each.values for each in (logprobs, entropy, values, squares)]


# --- packed rows ------------------------------------------------------------------------------------------------------


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("max_tokens", [10_000, 40])
def test_packed_scores_are_those_of_padded_rows_and_of_one_row_at_a_time(architecture: str, max_tokens: int) -> None:
    sequences = random_sequences(3, 11)
    packed = scores(laid_out(architecture, "packed", max_tokens), sequences)
    padded = scores(laid_out(architecture, "padded", max_tokens), sequences)
    one = laid_out(architecture, "padded")
    rows = [scores(one, sequences.gather(torch.tensor([row]))) for row in range(11)]
    alone = [torch.cat(column) for column in zip(*rows, strict=True)]
    plain, entropy = one_row_at_a_time(tiny_model(architecture), sequences, 0.7)
    torch.testing.assert_close(packed, padded, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed[:2], [plain.float(), entropy.float()], rtol=0, atol=1e-5)
    assert all(float(each.std()) > 1e-3 for each in packed)


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("aggregation", AGGREGATIONS.names())
def test_an_optimizer_step_on_packed_rows_is_that_on_padded_rows_and_on_one_row_at_a_time(
    monkeypatch: pytest.MonkeyPatch, architecture: str, aggregation: str
) -> None:
    batch = make_batch(7, ref=True, architecture=architecture, values=True)
    objective = make_objective(aggregation, kl=KL, entropy_coef=0.01)
    found = []
    for layout, max_tokens in (("packed", 10_000), ("packed", 40), ("padded", 10_000), ("padded", 1)):
        trainer = laid_out(architecture, layout)
        if max_tokens == 1:
            monkeypatch.setattr(trainer_module, "plan_sequences", one_by_one)
        (step,) = trainer.update(batch, objective, replace(BATCHING, max_tokens=max_tokens))
        assert trainer.critic is not None
        # AdamW without a larger eps, as in the critic, makes steps of the gradients that are 0 but for rounding.
        of_critic = last_gradients(trainer.critic.learner)
        found.append((parameters(trainer), trainer.policy.moments(), of_critic, step.values))
        assert (step.values["padded_fraction"] > 0) == (layout == "padded" and max_tokens > 1)
    start = parameters(laid_out(architecture, "packed"))
    assert max(float((found[0][0][name] - start[name]).abs().max()) for name in start) > 1e-4
    for *tensors, metrics in found[1:]:
        for ours, theirs in zip(tensors, found[0][:3], strict=True):
            assert_near(ours, theirs)
        expected = {name: value for name, value in found[0][3].items() if name not in OF_THE_CUT}
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)


@EVERY_ARCHITECTURE
def test_the_exact_kl_on_packed_rows_is_that_on_padded_rows(architecture: str) -> None:
    batch = make_batch(7, architecture=architecture)
    found = []
    for layout, max_tokens in (("packed", 40), ("padded", 40)):
        trainer = make_trainer(
            architecture,
            settings={"layout": layout},
            reference=lambda: perturbed(tiny_model(architecture)),
        )
        (step,) = trainer.update(batch, make_objective(kl=EXACT_KL), replace(BATCHING, max_tokens=max_tokens))
        found.append((gradients(trainer), step.values["kl"], step.values["loss"]))
    assert found[0][1] > 0.01
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)


def test_a_model_whose_attention_can_t_keep_packed_rows_apart_is_padded_unless_packing_was_asked_for() -> None:
    model = tiny_model()
    model._supports_attention_backend = False
    assert use_layout(model, "auto", None, CPU) == "padded" and model.config._attn_implementation == "sdpa"
    with pytest.raises(
        ModelError, match=r"computes its attention itself, where packed rows would mix: set trainer\.layout=padded"
    ):
        use_layout(model, "packed", None, CPU)
    assert [use_layout(tiny_model(), asked, None, CPU) for asked in ("auto", "padded")] == ["packed", "padded"]


def test_a_device_without_a_kernel_for_packed_rows_gets_padded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(*_: Any) -> None:
        raise RuntimeError("only supports newer devices")

    monkeypatch.setattr(backends, "check_packing", no_kernel)
    model = tiny_model()
    assert use_layout(model, "auto", None, CPU) == "padded" and model.config._attn_implementation == "sdpa"
    with pytest.raises(ModelError, match=r"only supports newer devices; set trainer\.layout=padded"):
        use_layout(tiny_model(), "packed", None, CPU)


# --- gradient checkpointing -------------------------------------------------------------------------------------------


def count_calls(trainer: Trainer) -> Counter[int]:
    """How often the insides of each decoder layer have run: of the policy, then of the critic."""
    calls: Counter[int] = Counter()
    assert trainer.critic is not None
    for number, layer in enumerate([*decoder_layers(trainer.model), *decoder_layers(trainer.critic.learner.module)]):
        inside = dict(layer.named_children())
        inside["mlp"].register_forward_pre_hook(lambda *_, number=number: calls.update([number]))
    return calls


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "LoRA"])
def test_layers_that_run_again_in_the_backward_pass_give_the_same_gradients(
    architecture: str, layout: str, adapters: bool
) -> None:
    batch = make_batch(7, architecture=architecture, values=True)
    found, calls = [], []
    for again in (False, True):
        settings = {"gradient_checkpointing": again, "layout": layout, **(LORA if adapters else {})}
        trainer = make_trainer(
            architecture, settings=settings, critic=CRITIC, reference=lambda: perturbed(tiny_model(architecture))
        )
        counted = count_calls(with_random_value_head(trainer))
        (step,) = trainer.update(batch, make_objective(kl=EXACT_KL), replace(BATCHING, max_tokens=40))
        calls.append(dict(counted))
        assert trainer.critic is not None
        found.append((gradients(trainer), last_gradients(trainer.critic.learner), parameters(trainer), step.values))
        counted.clear()
        trainer.logprobs(batch.sequences, 0.8)
        assert counted == {0: 1, 1: 1}  # without gradient nothing runs again
    times = calls[0][0]
    assert times > 3 and calls == [dict.fromkeys(range(4), times), dict.fromkeys(range(4), 2 * times)]
    assert found[0][0] and all(bool(each.any()) for each in found[0][1].values())
    assert_same(found[1], found[0])


@EVERY_ARCHITECTURE
def test_what_a_layer_computes_is_not_kept_when_it_runs_again(architecture: str) -> None:
    kept = []
    for again in (False, True):
        trainer = make_trainer(architecture, settings={"gradient_checkpointing": again})
        batch = make_batch(7, architecture=architecture)
        sizes: list[int] = []

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            trainer.update(batch, make_objective(), BATCHING)
        kept.append(len(sizes))
    # The hooks of checkpoint come first inside a layer: only its inputs, the embedding and the head reach ours.
    assert kept[1] < kept[0] / 2
