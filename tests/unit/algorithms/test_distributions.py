"""Entropy, collision probability and KL over the vocabulary, from logits."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from grpo_lib.algorithms.distributions import full_kl, sum_squared_probs, token_entropy

OFF = -math.inf
LOG3 = math.log(3)
QUARTERS = [0.0, LOG3]
"""Logits of the probabilities 1/4 and 3/4."""


def rows(*logits: list[float]) -> Tensor:
    return torch.tensor(logits, dtype=torch.float64)


def random_logits(seed: int, n: int = 20, size: int = 11, scale: float = 2.0) -> Tensor:
    return torch.randn(n, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def probabilities(logits: list[float]) -> list[float]:
    highest = max(logits)
    total = math.fsum(math.exp(z - highest) for z in logits)
    return [math.exp(z - highest) / total for z in logits]


@pytest.mark.parametrize(
    ("logits", "entropy", "squares"),
    [
        ([0.0, 0.0, 0.0, 0.0], math.log(4), 0.25),
        ([5.0, 5.0], math.log(2), 0.5),
        (QUARTERS, 0.5623351446188083, 0.625),  # (log 4 + 3 log(4/3)) / 4
        ([0.0], 0.0, 1.0),
        ([0.0, OFF], 0.0, 1.0),
        ([OFF, 0.0, LOG3, OFF], 0.5623351446188083, 0.625),
        ([0.0, -1e4], 0.0, 1.0),
        ([1e4, 1e4], math.log(2), 0.5),
    ],
)
def test_entropy_and_collision_probability_by_hand(logits: list[float], entropy: float, squares: float) -> None:
    assert token_entropy(rows(logits)).tolist() == pytest.approx([entropy], rel=1e-12, abs=1e-12)
    assert sum_squared_probs(rows(logits)).tolist() == pytest.approx([squares], rel=1e-12)


@pytest.mark.parametrize(
    ("logits", "ref_logits", "value"),
    [
        (QUARTERS, [0.0, 0.0], 0.13081203594113694),  # log 2 - entropy
        ([0.0, 0.0], QUARTERS, 0.14384103622589045),  # log(4/3) / 2: the other way round it is another
        (QUARTERS, [7.0, 7.0 + LOG3], 0.0),
        ([0.0, OFF], [0.0, 0.0], math.log(2)),
        ([0.0, LOG3, OFF], [LOG3, 0.0, OFF], LOG3 / 2),
        ([0.0, 0.0, OFF], [0.0, 0.0, 5.0], math.log(1 + math.exp(5) / 2)),
        ([0.0, 0.0], [0.0, OFF], math.inf),  # the reference excludes what the policy may say
    ],
)
def test_the_full_kl_by_hand(logits: list[float], ref_logits: list[float], value: float) -> None:
    assert full_kl(rows(logits), rows(ref_logits)).tolist() == pytest.approx([value], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_all_agree_with_sums_over_the_vocabulary(seed: int) -> None:
    logits, ref_logits = random_logits(seed), random_logits(seed + 100)
    entropy, squares, kl = token_entropy(logits), sum_squared_probs(logits), full_kl(logits, ref_logits)
    for row, (z, z_ref) in enumerate(zip(logits.tolist(), ref_logits.tolist(), strict=True)):
        p, q = probabilities(z), probabilities(z_ref)
        of_spec = math.log(math.fsum(map(math.exp, z))) - math.fsum(a * b for a, b in zip(p, z, strict=True))
        assert entropy[row].item() == pytest.approx(of_spec, rel=1e-12)
        assert squares[row].item() == pytest.approx(math.fsum(a * a for a in p), rel=1e-12)
        k1 = [math.log(a / b) for a, b in zip(p, q, strict=True)]
        assert kl[row].item() == pytest.approx(math.fsum(a * x for a, x in zip(p, k1, strict=True)), rel=1e-11)


def test_the_full_kl_of_equal_logits_is_exactly_0_and_else_positive() -> None:
    logits = random_logits(0)
    logits[:, 3] = OFF
    assert full_kl(logits, logits).tolist() == [0.0] * 20
    assert bool((full_kl(random_logits(1), random_logits(2)) > 0).all())
    shifted = full_kl(logits, logits + torch.arange(20)[:, None])
    torch.testing.assert_close(shifted, torch.zeros(20, dtype=torch.float64), rtol=0, atol=1e-13)


def test_the_full_kls_gradient_has_its_closed_form_and_is_0_at_the_reference() -> None:
    logits, ref_logits = random_logits(0).requires_grad_(), random_logits(1)
    logprobs, ref = logits.detach().log_softmax(-1), ref_logits.log_softmax(-1)
    value = full_kl(logits, ref_logits)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    torch.testing.assert_close(gradient, logprobs.exp() * (logprobs - ref - value.detach()[:, None]))
    (at_reference,) = torch.autograd.grad(full_kl(logits, logits.detach()).sum(), logits)
    torch.testing.assert_close(at_reference, torch.zeros_like(logits), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "function",
    [token_entropy, sum_squared_probs, lambda z: full_kl(z, random_logits(9, 3, 5)), lambda z: full_kl(z * 0 + 1, z)],
    ids=["token_entropy", "sum_squared_probs", "full_kl", "full_kl of the reference"],
)
def test_gradients_are_the_derivatives_of_the_values(function: Callable[[Tensor], Tensor]) -> None:
    assert torch.autograd.gradcheck(function, (random_logits(0, 3, 5).requires_grad_(),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_excluded_tokens_make_no_nan_and_have_no_gradient(dtype: torch.dtype) -> None:
    logits, ref_logits = random_logits(0).to(dtype), random_logits(1).to(dtype)
    logits[:, 2] = OFF
    logits[:10, 4:] = OFF
    ref_logits[:, 2] = OFF  # in both; tokens from 4 on are excluded in the policy only
    logits.requires_grad_()
    functions: list[Callable[[Tensor], Tensor]] = [
        token_entropy,
        sum_squared_probs,
        lambda z: full_kl(z, ref_logits),
    ]
    for function in functions:
        value = function(logits)
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        assert bool(value.isfinite().all()) and bool(gradient.isfinite().all())
        assert not gradient[logits.detach() == OFF].any()
        keep = logits.detach()[0] != OFF  # as if the vocabulary had no such tokens
        within = random_logits(0).to(dtype)[:1, keep].requires_grad_()
        if function in functions[:2]:
            (expected,) = torch.autograd.grad(function(within).sum(), within)
            torch.testing.assert_close(gradient[:1, keep], expected)
    at_excluded = full_kl(logits, ref_logits)[0].item()
    p, q = probabilities(logits.tolist()[0]), probabilities(ref_logits.tolist()[0])
    assert at_excluded == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits_give_finite_values_and_gradients(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, -80.0, -50.0], [1e4, 0.0, -1e4], [1e-30, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    ref_logits = torch.tensor([[-80.0, 0.0, 3.0], [-1e4, 0.0, 1e4], [50.0, 0.0, -50.0]], dtype=dtype)
    for value in (token_entropy(logits), sum_squared_probs(logits), full_kl(logits, ref_logits)):
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        assert value.dtype == dtype
        assert bool(value.isfinite().all()) and bool(gradient.isfinite().all())
        assert bool((value >= 0).all())


@pytest.mark.parametrize("function", [token_entropy, sum_squared_probs, lambda z: full_kl(z, z.detach())])
def test_no_tokens_give_no_values(function: Callable[[Tensor], Tensor]) -> None:
    none = torch.zeros(0, 7, requires_grad=True)
    value = function(none)
    (gradient,) = torch.autograd.grad(value.sum(), none)
    assert value.shape == (0,) and gradient.shape == (0, 7)
