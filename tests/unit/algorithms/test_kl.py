import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lib.algorithms.kl import (
    KL_ESTIMATORS,
    adaptive_coef,
    importance_corrected,
    k1,
    k2,
    k3,
    kl_estimator,
    straight_through,
)
from grpo_lib.errors import ConfigError

FEW = settings(deadline=None, max_examples=40)
OF_LOGPROBS = [name for name in KL_ESTIMATORS.names() if not KL_ESTIMATORS[name].traits.get("from_logits")]
PLAIN = ("k1", "abs", "k2", "k3")
E = math.e


def value_and_gradient(name: str, x: float) -> tuple[float, float]:
    """At ``logprob - ref_logprob = x``."""
    ref = torch.tensor([-2.0], dtype=torch.float64)
    logprobs = (ref + x).requires_grad_()
    value = kl_estimator(name)(logprobs, ref)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    return value.item(), gradient.item()


LITERALS = [
    ("k1", -3.0, -3.0, 1.0),  # policy minus reference: the other sign would reward drifting
    ("k1", -1.0, -1.0, 1.0),
    ("k1", 0.0, 0.0, 1.0),
    ("k1", 0.5, 0.5, 1.0),
    ("k1", 1.0, 1.0, 1.0),
    ("k1", 30.0, 30.0, 1.0),
    ("abs", -1.0, 1.0, -1.0),
    ("abs", 0.0, 0.0, 0.0),
    ("abs", 0.5, 0.5, 1.0),
    ("abs", 1.0, 1.0, 1.0),
    ("abs", 30.0, 30.0, 1.0),
    ("k2", -3.0, 4.5, -3.0),
    ("k2", -1.0, 0.5, -1.0),
    ("k2", 0.0, 0.0, 0.0),
    ("k2", 0.5, 0.125, 0.5),
    ("k2", 1.0, 0.5, 1.0),
    ("k2", 30.0, 450.0, 30.0),
    ("k3", -1.0, E - 2, 1 - E),
    ("k3", 0.0, 0.0, 0.0),
    ("k3", 0.5, 0.1065306597126334, 0.3934693402873666),  # exp(-0.5) - 0.5
    ("k3", 1.0, 0.36787944117144233, 0.6321205588285577),  # exp(-1) - 1 + 1
    ("k3", 3.0, 2.049787068367864, 0.950212931632136),
    ("k3", 30.0, 10.0, 0.0),  # 29 + exp(-30), clamped
    ("k3", 10.0, 9.000045399929762, 0.9999546000702375),  # just below the clamp
    ("k3", 11.1, 10.0, 0.0),
    ("k3", -2.6, 9.863738035001692, -12.463738035001692),
    ("k3", -2.7, 10.0, 0.0),  # exp(2.7) - 3.7 = 11.2
    ("k3", 50.0, 10.0, 0.0),
    ("k3", -50.0, 10.0, 0.0),
]


@pytest.mark.parametrize(("name", "x", "value", "gradient"), LITERALS)
def test_estimators_by_hand(name: str, x: float, value: float, gradient: float) -> None:
    assert value_and_gradient(name, x) == pytest.approx((value, gradient), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("name", "x", "value", "gradient"), LITERALS)
def test_with_a_plus_the_value_stays_and_the_gradient_is_x(name: str, x: float, value: float, gradient: float) -> None:
    assert value_and_gradient(name + "+", x) == pytest.approx((value, x), rel=1e-12, abs=1e-15)


def test_every_estimator_of_log_probs_has_numbers_by_hand() -> None:
    assert {KL_ESTIMATORS[name].name for name in OF_LOGPROBS} == {each[0] for each in LITERALS} == set(PLAIN)


@pytest.mark.parametrize(("alias", "name"), [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")])
@pytest.mark.parametrize("plus", ["", "+"])
def test_other_names_mean_the_same(alias: str, name: str, plus: str) -> None:
    assert KL_ESTIMATORS[alias] is KL_ESTIMATORS[name]
    for x in (-1.0, 0.5, 30.0):
        assert value_and_gradient(alias + plus, x) == value_and_gradient(name + plus, x)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("k33", "unknown KL estimator 'k33'; did you mean k3"),
        ("low_var", "did you mean low_var_kl"),
        ("k3++", r"unknown KL estimator 'k3\+\+'; did you mean k3"),
        ("xyz", "known: abs, full, k1, k2, k3, kl, low_var_kl, mse"),
        ("", "known: abs"),
        ("+", "known: abs"),
    ],
)
def test_an_unknown_name_is_an_error_with_a_hint(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        kl_estimator(name)
    assert "each also with +" in str(error.value)


@pytest.mark.parametrize("name", ["full", "full+"])
def test_the_full_kl_of_stored_log_probs_is_an_error_that_names_what_to_take(name: str) -> None:
    with pytest.raises(ConfigError, match=r"needs the logits of both policies.*take k1, k2 or k3") as error:
        kl_estimator(name)
    assert repr(name) in str(error.value)


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


@pytest.mark.parametrize("name", [each + plus for each in PLAIN for plus in ("", "+")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_log_probs_give_finite_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    levels = torch.tensor([-1000.0, -80.0, -50.0, -1.0, -1e-7, 0.0], dtype=dtype)
    logprobs, ref = torch.cartesian_prod(levels, levels).T
    logprobs = logprobs.clone().requires_grad_()
    value = kl_estimator(name)(logprobs, ref)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    assert value.dtype == dtype
    assert bool(value.isfinite().all()) and bool(gradient.isfinite().all())


@pytest.mark.parametrize("name", [each + plus for each in PLAIN for plus in ("", "+")])
def test_no_tokens_give_no_values(name: str) -> None:
    none = torch.zeros(0, requires_grad=True)
    value = kl_estimator(name)(none, torch.zeros(0))
    (gradient,) = torch.autograd.grad(value.sum(), none)
    assert value.shape == gradient.shape == (0,)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_estimators_have_the_gradient_of_their_value(name: str) -> None:
    ref = torch.tensor([-2.0, -1.0, -3.0, -0.5, -40.0, -1.0], dtype=torch.float64)
    x = torch.tensor([0.3, -0.4, 1.5, -2.0, 35.0, -35.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda lp: kl_estimator(name)(lp, ref), ((ref + x).requires_grad_(),))


@pytest.mark.parametrize("name", OF_LOGPROBS)
def test_with_a_plus_the_gradient_is_that_of_k2_bit_for_bit(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, ref, weights = -torch.rand(3, 200, generator=generator, dtype=torch.float64) * 5
    logprobs.requires_grad_()
    plus, plain = kl_estimator(name + "+")(logprobs, ref), kl_estimator(name)(logprobs, ref)
    (gradient,) = torch.autograd.grad((weights * plus).sum(), logprobs)
    (expected,) = torch.autograd.grad((weights * k2(logprobs, ref)).sum(), logprobs)
    assert torch.equal(gradient, expected)
    torch.testing.assert_close(plus, plain, rtol=1e-13, atol=1e-13)


def two_policies() -> tuple[Tensor, Tensor]:
    """Logits over four tokens, with gradient, and log-probs of the reference."""
    logits = torch.tensor([0.5, -0.3, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    return logits, torch.tensor([0.1, 0.4, 0.9, -0.6], dtype=torch.float64).log_softmax(0)


def expected_gradient(name: str) -> Tensor:
    """Of the estimator as a loss, with respect to the logits, on average over tokens that the policy samples."""
    logits, ref = two_policies()
    logprobs = logits.log_softmax(0)
    (gradient,) = torch.autograd.grad((logprobs.detach().exp() * kl_estimator(name)(logprobs, ref)).sum(), logits)
    return gradient


def test_k1_and_k3_have_the_value_of_the_kl_on_average_and_k2_has_not() -> None:
    logits, ref = two_policies()
    policy = logits.detach().log_softmax(0)
    exact = sum(math.exp(p) * (p - q) for p, q in zip(policy.tolist(), ref.tolist(), strict=True))
    for name, unbiased in [("k1", True), ("k3", True), ("k2", False), ("abs", False)]:
        average = (policy.exp() * kl_estimator(name)(policy, ref)).sum().item()
        assert (average == pytest.approx(exact, rel=1e-12)) == unbiased


def test_k2_and_every_plus_have_the_gradient_of_the_kl_on_average_and_k1_and_k3_have_not() -> None:
    logits, ref = two_policies()
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits)
    assert exact.abs().max() > 0.05
    for name in ("k2", "k1+", "abs+", "k2+", "k3+"):
        torch.testing.assert_close(expected_gradient(name), exact, rtol=1e-12, atol=1e-15)
    for name in ("k1", "abs", "k3"):
        assert (expected_gradient(name) - exact).abs().max() > 1e-3
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros_like(exact))  # as a loss k1 does nothing


def test_the_full_kl_is_the_average_of_k1_over_the_vocabulary_and_needs_logits() -> None:
    logits, ref = two_policies()
    entry = KL_ESTIMATORS["full"]
    assert entry.columns == ("logits", "ref_logits") and entry.traits["from_logits"]
    value = entry.function(logits[None], ref[None])
    logprobs = logits.log_softmax(0)
    assert value.tolist() == pytest.approx([(logprobs.exp() * k1(logprobs, ref)).sum().item()], rel=1e-14)


def test_straight_through_keeps_any_value_also_that_of_the_full_kl() -> None:
    logits, ref = two_policies()
    logprobs = logits.log_softmax(0)
    full = KL_ESTIMATORS["full"].function(logits[None], ref[None])
    result = straight_through(full, logprobs[2:3], ref[2:3])
    assert result.tolist() == pytest.approx(full.tolist(), rel=1e-15)
    (gradient,) = torch.autograd.grad(result.sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(k2(logprobs[2:3], ref[2:3]).sum(), logits)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize(
    ("name", "x", "log_ratio", "value", "gradient"),
    [
        ("k1", 0.5, 0.0, 0.5, 1.5),  # (1 + x) rho: at the old policy the unbiased gradient of k1
        ("k1", 0.5, math.log(2), 1.0, 3.0),
        ("k2", 1.0, math.log(0.5), 0.25, 0.75),  # (x + x^2 / 2) rho
        ("k3", 1.0, math.log(2), 2 / E, 2.0),  # (1 - exp(-x) + exp(-x) - 1 + x) rho = x rho
        ("k3+", 1.0, math.log(2), 2 / E, 2 * (1 + 1 / E)),
        ("k2", 0.0, 3.0, 0.0, 0.0),
        ("k1", -1.0, 50.0, -math.exp(20), math.exp(20)),  # beyond the clamp the ratio has no gradient
        ("k1", 2.0, -50.0, 2 * math.exp(-20), math.exp(-20)),
    ],
)
def test_the_importance_corrected_kl_by_hand(
    name: str, x: float, log_ratio: float, value: float, gradient: float
) -> None:
    logprobs = torch.tensor([-1.5], dtype=torch.float64, requires_grad=True)
    kl = kl_estimator(name)(logprobs, logprobs.detach() - x)
    result = importance_corrected(kl, logprobs, logprobs.detach() - log_ratio)
    (slope,) = torch.autograd.grad(result.sum(), logprobs)
    assert result.tolist() == pytest.approx([value], rel=1e-12)
    assert slope.tolist() == pytest.approx([gradient], rel=1e-12)


def test_the_gradient_of_the_importance_corrected_kl_is_its_derivative() -> None:
    old = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    ref = torch.tensor([-1.5, -1.0, -3.1], dtype=torch.float64)
    start = torch.tensor([-0.7, -2.5, -2.9], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda lp: importance_corrected(k3(lp, ref), lp, old), (start,))


def test_corrected_tokens_of_the_old_policy_give_the_kl_of_the_new_one_and_its_gradient() -> None:
    logits, ref = two_policies()
    logprobs = logits.log_softmax(0)
    old = torch.tensor([0.9, -0.2, 0.3, 0.2], dtype=torch.float64).log_softmax(0)
    exact = (logprobs.exp() * (logprobs - ref)).sum()
    average = (old.exp() * importance_corrected(k1(logprobs, ref), logprobs, old)).sum()
    assert average.item() == pytest.approx(exact.item(), rel=1e-12)
    gradients = [torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (average, exact)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("kl", "rows", "coef"),
    [
        (0.1, 100, 0.1),  # on target
        (0.11, 100, 0.101),  # 10 % above, 100 of 1000 rows: 1 % more
        (0.09, 100, 0.099),
        (0.12, 100, 0.102),
        (0.2, 100, 0.102),  # the error is at most 0.2
        (50.0, 100, 0.102),
        (0.08, 100, 0.098),
        (0.0, 100, 0.098),  # and at least -0.2
        (-1.0, 100, 0.098),
        (0.2, 1000, 0.12),
        (0.2, 0, 0.1),
    ],
)
def test_the_adaptive_coefficient_by_hand(kl: float, rows: int, coef: float) -> None:
    assert adaptive_coef(0.1, kl, rows, target=0.1, horizon=1000) == pytest.approx(coef, rel=1e-12)


def test_the_adaptive_coefficient_moves_by_a_factor() -> None:
    assert adaptive_coef(0.0, 9.0, 100, target=0.1, horizon=1000) == 0.0
    assert adaptive_coef(7.0, 0.3, 50, target=0.2, horizon=500) == pytest.approx(7.0 * 1.02, rel=1e-12)
