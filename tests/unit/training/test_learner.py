"""The learner of one process, and what all learners share."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_lib.training.learner import AdamWSettings, TorchLearner, adamw, clipped_step, trainable, whole_weights
from grpo_lib.training.modules import PolicyModule
from tests.tiny_models import tiny_model
from tests.unit.training.trainers import ARCHITECTURES, assert_same, copied


class Tiny(nn.Module):
    """A matrix and a vector that learn, a frozen matrix, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.vector = nn.Parameter(torch.tensor([5.0, 6.0]))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.register_buffer("buffer", torch.tensor([7.0]))
        self.register_buffer("passing", torch.tensor([8.0]), persistent=False)


def learner_of(module: nn.Module, **settings: Any) -> TorchLearner:
    return TorchLearner(module, AdamWSettings(**{"max_grad_norm": 100.0, **settings}))


def learn(learner: TorchLearner, steps: int = 1, lr: float = 0.1) -> None:
    for _ in range(steps):
        learner.backward(torch.stack([(p**2).sum() for p in trainable(learner.module).values()]).sum())
        learner.step(lr)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_are_parameters_and_persistent_buffers_by_name() -> None:
    learner = learner_of(Tiny())
    assert list(learner.weights()) == ["matrix", "vector", "frozen", "buffer"]
    assert not any(each.requires_grad for each in learner.weights().values())
    learner.weights()["vector"].zero_()  # views
    assert not bool(dict(learner.module.named_parameters())["vector"].any())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tied_parameters_are_one_tensor_that_is_made_whole_once(architecture: str) -> None:
    model = tiny_model(architecture)
    made: list[Tensor] = []

    def whole(tensor: Tensor) -> Tensor:
        made.append(tensor)
        return tensor.detach().clone()

    weights = whole_weights(PolicyModule(model, None), whole, keep=True)
    state = model.state_dict()
    assert_same(weights, {f"model.{name}": each for name, each in state.items()})
    tied = model.config.tie_word_embeddings
    assert len(made) == len({id(each) for each in made}) == len(state) - tied
    (head,) = [each for name, each in weights.items() if name.endswith("lm_head.weight")]
    (embedding,) = [each for name, each in weights.items() if name.endswith(("embed_tokens.weight", "wte.weight"))]
    assert (head is embedding) == tied

    made.clear()  # a rank that keeps nothing takes part all the same
    assert whole_weights(PolicyModule(model, None), whole, keep=False) == {}
    assert len(made) == len(state) - tied


# --- optimizer --------------------------------------------------------------------------------------------------------


def test_weight_decay_is_for_matrices_that_learn() -> None:
    module = Tiny()
    settings = AdamWSettings(beta1=0.8, beta2=0.95, eps=1e-5, weight_decay=0.25)
    matrices, vectors = adamw(trainable(module), settings).param_groups
    assert [id(p) for p in matrices["params"]] == [id(module.matrix)] and matrices["weight_decay"] == 0.25
    assert [id(p) for p in vectors["params"]] == [id(module.vector)] and vectors["weight_decay"] == 0.0
    assert {(group["betas"], group["eps"], group["lr"]) for group in (matrices, vectors)} == {((0.8, 0.95), 1e-5, 0.0)}
    (only,) = adamw({"vector": module.vector}, settings).param_groups
    assert only["weight_decay"] == 0.0


def test_a_step_is_clipped_and_returns_the_norm_before() -> None:
    module = Tiny()
    optimizer = torch.optim.SGD(trainable(module).values(), lr=0.0)
    module.matrix.grad, module.vector.grad = torch.full((2, 2), 2.0), torch.zeros(2)
    norm = clipped_step(optimizer, trainable(module), lr=0.5, max_norm=1.0)
    assert norm == pytest.approx(4.0)
    torch.testing.assert_close(module.matrix.detach(), torch.tensor([[0.75, 1.75], [2.75, 3.75]]))  # less 0.5 * 2 / 4
    assert module.matrix.grad is None and module.vector.grad is None
    module.matrix.grad = torch.full((2, 2), 0.1)
    assert clipped_step(optimizer, trainable(module), lr=1.0, max_norm=1.0) == pytest.approx(0.2)
    torch.testing.assert_close(module.matrix.detach()[0], torch.tensor([0.65, 1.65]), rtol=1e-4, atol=0)


def test_a_missing_gradient_is_0_and_its_moments_decay() -> None:
    learner = learner_of(Tiny())
    learn(learner)
    before = copied(learner.moments())
    learner.backward((dict(learner.module.named_parameters())["vector"] ** 2).sum())
    learner.step(0.1)
    after = learner.moments()
    torch.testing.assert_close(after["matrix/exp_avg"], 0.9 * before["matrix/exp_avg"])
    assert {float(after[f"{name}/step"]) for name in ("matrix", "vector")} == {2.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_gradient_that_is_not_finite_is_dropped_and_state_kept(bad: float, steps: int) -> None:
    learner, expected = learner_of(Tiny(), weight_decay=0.1), learner_of(Tiny(), weight_decay=0.1)
    for each in (learner, expected):
        learn(each, steps)
    before = copied(learner.weights()), copied(learner.moments())
    vector = dict(learner.module.named_parameters())["vector"]
    learner.backward((vector * torch.tensor([bad, 1.0])).sum())
    norm = learner.step(0.1)
    assert not math.isfinite(norm)
    assert_same((learner.weights(), learner.moments()), before)
    assert all(p.grad is None for p in learner.module.parameters())
    for each in (learner, expected):
        learn(each)
    assert_same((learner.weights(), learner.moments()), (expected.weights(), expected.moments()))


def test_a_discarded_gradient_is_gone() -> None:
    learner, expected = learner_of(Tiny()), learner_of(Tiny())
    learner.backward((dict(learner.module.named_parameters())["matrix"] ** 3).sum())
    learner.discard()
    for each in (learner, expected):
        learn(each)
    assert_same((learner.weights(), learner.moments()), (expected.weights(), expected.moments()))


# --- loading ----------------------------------------------------------------------------------------------------------


def test_loading_sets_what_is_named_all_moments_and_forgets_gradients() -> None:
    learner, other = learner_of(Tiny()), learner_of(Tiny())
    learn(learner, 3)
    weights, moments = copied(learner.weights()), copied(learner.moments())
    learn(other, 1)
    other.backward((dict(other.module.named_parameters())["matrix"] ** 3).sum())
    other.load({"matrix": weights["matrix"]}, moments)
    assert torch.equal(other.weights()["matrix"], weights["matrix"])
    assert not torch.equal(other.weights()["vector"], weights["vector"])
    other.load(weights, moments)
    assert_same(other.moments(), moments)
    for each in (learner, other):
        learn(each, 2)
    assert_same((other.weights(), other.moments()), (learner.weights(), learner.moments()))
    assert not torch.equal(moments["matrix/exp_avg"], other.moments()["matrix/exp_avg"])  # the given ones are copied
    other.load({}, {})
    assert other.moments() == {}
