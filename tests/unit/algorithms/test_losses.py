import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lib.algorithms.losses import PolicyLoss, ppo_clip

FEW = settings(deadline=None, max_examples=30)
numbers = st.integers(-40, 40).map(lambda n: n / 8)


def loss_of(
    log_ratio: list[float], advantages: list[float], low: float = 0.2, high: float = 0.28, dual: float | None = 3.0
) -> tuple[PolicyLoss, list[float]]:
    """The loss and its gradient with respect to the log-probs."""
    old = torch.linspace(-3, -0.5, len(log_ratio), dtype=torch.float64)
    logprobs = (old + torch.tensor(log_ratio, dtype=torch.float64)).requires_grad_()
    loss = ppo_clip(
        logprobs, old, torch.tensor(advantages, dtype=torch.float64), clip_low=low, clip_high=high, dual_clip=dual
    )
    (gradient,) = torch.autograd.grad(loss.values.sum(), logprobs)
    return loss, gradient.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "high", "low"),
    [
        (1.1, 2.0, -2.2, -2.2, False, False),  # inside the range: -A rho
        (0.9, -2.0, 1.8, 1.8, False, False),
        (1.25, 1.0, -1.25, -1.25, False, False),  # clip-higher: above 1.2, below 1.28
        (1.5, 1.0, -1.28, 0.0, True, False),  # went up enough
        (0.5, 1.0, -0.5, -0.5, False, False),  # went down although it was good: not clipped
        (0.5, -1.0, 0.8, 0.0, False, True),  # went down enough
        (1.5, -1.0, 1.5, 1.5, False, False),  # went up although it was bad: not clipped
        (5.0, -1.0, 3.0, 0.0, True, False),  # dual clip
        (5.0, -2.0, 6.0, 0.0, True, False),
        (5.0, 2.0, -2.56, 0.0, True, False),  # dual clip is for negative advantages only
        (2.9, -1.0, 2.9, 2.9, False, False),  # just below the dual clip
        (7.0, 0.0, 0.0, 0.0, False, False),
    ],
)
def test_every_side_of_the_clip_by_hand(
    ratio: float, advantage: float, value: float, gradient: float, high: bool, low: bool
) -> None:
    loss, gradients = loss_of([math.log(ratio)], [advantage])
    assert loss.values.tolist() == pytest.approx([value], rel=1e-12)
    assert gradients == pytest.approx([gradient], rel=1e-12)
    assert loss.ratio.tolist() == pytest.approx([ratio], rel=1e-12)
    assert (loss.clipped_high.tolist(), loss.clipped_low.tolist()) == ([high], [low])
    assert not loss.ratio.requires_grad


def test_clip_higher_only_moves_the_upper_end() -> None:
    ratios, advantages = [math.log(1.25), math.log(0.75)], [1.0, -1.0]
    narrow, _ = loss_of(ratios, advantages, low=0.2, high=0.2)
    wide, _ = loss_of(ratios, advantages, low=0.2, high=0.28)
    assert narrow.values.tolist() == pytest.approx([-1.2, 0.8])
    assert wide.values.tolist() == pytest.approx([-1.25, 0.8])


def test_without_dual_clip_a_bad_token_that_became_likely_costs_in_full() -> None:
    loss, gradients = loss_of([math.log(5.0)], [-1.0], dual=None)
    assert loss.values.tolist() == pytest.approx([5.0]) and gradients == pytest.approx([5.0])
    assert not loss.clipped_high.any()


def test_extreme_log_ratios_give_finite_losses_and_gradients() -> None:
    loss, gradients = loss_of([50.0, 50.0, -50.0, -50.0], [1.0, -1.0, 1.0, -1.0], dual=None)
    assert loss.values.tolist() == pytest.approx([-1.28, math.exp(20), -math.exp(-20), 0.8], rel=1e-12)
    assert gradients == [0.0, 0.0, 0.0, 0.0]
    assert loss.ratio.tolist() == pytest.approx([math.exp(20), math.exp(20), math.exp(-20), math.exp(-20)], rel=1e-12)


@FEW
@given(
    advantages=st.lists(numbers, min_size=1, max_size=20),
    low=st.floats(0.01, 0.9),
    high=st.floats(0.01, 5),
    dual=st.none() | st.floats(1.01, 10),
)
def test_at_the_old_policy_the_gradient_is_that_of_the_plain_policy_gradient(
    advantages: list[float], low: float, high: float, dual: float | None
) -> None:
    loss, gradients = loss_of([0.0] * len(advantages), advantages, low, high, dual)
    assert gradients == [-advantage for advantage in advantages]
    assert not loss.clipped_high.any() and not loss.clipped_low.any()


@FEW
@given(pairs=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20))
def test_the_flags_say_where_the_gradient_was_cut(pairs: list[tuple[float, float]]) -> None:
    loss, gradients = loss_of([ratio for ratio, _ in pairs], [advantage for _, advantage in pairs])
    cut: Tensor = loss.clipped_high | loss.clipped_low
    for (_, advantage), gradient, flag in zip(pairs, gradients, cut.tolist(), strict=True):
        assert (gradient == 0.0) == (flag or advantage == 0.0)
