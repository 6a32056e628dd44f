import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.algorithms.kl import KL_ESTIMATORS, k3

FEW = settings(deadline=None, max_examples=40)


def value_and_gradient(name: str, x: float) -> tuple[float, float]:
    """At ``logprob - ref_logprob = x``."""
    ref = torch.tensor([-2.0], dtype=torch.float64)
    logprobs = (ref + x).requires_grad_()
    value = KL_ESTIMATORS[name](logprobs, ref)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    return value.item(), gradient.item()


@pytest.mark.parametrize(
    ("name", "x", "value", "gradient"),
    [
        ("k1", 1.0, 1.0, 1.0),
        ("k1", -3.0, -3.0, 1.0),  # policy minus reference: the other sign would reward drifting
        ("k2", 1.0, 0.5, 1.0),
        ("k2", -3.0, 4.5, -3.0),
        ("k3", 0.0, 0.0, 0.0),
        ("k3", 1.0, 0.36787944117144233, 0.6321205588285577),  # exp(-1) - 1 + 1
        ("k3", -1.0, 0.7182818284590451, -1.718281828459045),  # e - 2
        ("k3", 3.0, 2.049787068367864, 0.950212931632136),
        ("k3", -3.0, 10.0, 0.0),  # e^3 - 4 = 16.1, clamped
        ("k3", 50.0, 10.0, 0.0),
        ("k3", -50.0, 10.0, 0.0),
    ],
)
def test_estimators_by_hand(name: str, x: float, value: float, gradient: float) -> None:
    assert value_and_gradient(name, x) == pytest.approx((value, gradient), rel=1e-12, abs=1e-15)


@FEW
@given(x=st.floats(-60, 60), double=st.booleans())
def test_k3_is_never_negative_and_never_above_10(x: float, double: bool) -> None:
    dtype = torch.float64 if double else torch.float32
    value = k3(torch.tensor([x], dtype=dtype), torch.zeros(1, dtype=dtype)).item()
    assert 0.0 <= value <= 10.0
    assert value > 0.0 or abs(x) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_of_tiny_differences_is_not_rounding_noise(dtype: torch.dtype) -> None:
    x = torch.logspace(-12, 0, 2001, dtype=dtype) * torch.tensor([[1.0], [-1.0]], dtype=dtype)
    values = k3(x, torch.zeros_like(x))
    assert bool((values >= 0).all())
    exact = x.double().square() / 2  # k2 is the limit
    near = x.abs() < 1e-3
    assert float((values.double() - exact)[near].abs().max()) < 1e-9


def test_estimators_agree_with_the_exact_divergence_on_average() -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    exact = sum(p * math.log(p / q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
    for name in ("k1", "k3"):
        expected = (policy * KL_ESTIMATORS[name](policy.log(), reference.log())).sum()
        assert expected.item() == pytest.approx(exact, rel=1e-12)
