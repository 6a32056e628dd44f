"""Which tokens clip_cov and kl_cov treat differently."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lib.algorithms.losses import LOSSES
from grpo_lib.algorithms.selection import covariance, highest_covariance, random_in_covariance_band

FEW = settings(deadline=None, max_examples=40)


def columns(seed: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, advantages and draws; no two equal."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, advantages = torch.randn(2, n, generator=generator, dtype=torch.float64)
    return -logprobs.exp(), advantages, torch.randperm(n, generator=generator) / max(1, n)


def by_formula(logprobs: Tensor, advantages: Tensor) -> list[float]:
    n = len(logprobs)
    mean_a, mean_lp = math.fsum(advantages.tolist()) / n, math.fsum(logprobs.tolist()) / n
    return [(a - mean_a) * (lp - mean_lp) for a, lp in zip(advantages.tolist(), logprobs.tolist(), strict=True)]


def test_covariance_by_hand() -> None:
    # Means: advantages 0.5, log-probs -2.
    result = covariance(torch.tensor([-1.0, -2.0, -4.0, -1.0]), torch.tensor([2.0, 1.0, -1.0, 0.0]))
    assert result.dtype == torch.float64
    assert result.tolist() == [1.5, 0.0, 3.0, -0.5]


def test_covariance_has_no_gradient_and_is_of_float64_whatever_comes_in() -> None:
    logprobs = (torch.linspace(-3, -1, 5) - 1e4).requires_grad_()
    result = covariance(logprobs, torch.tensor([1.0, 0.0, 0.0, 0.0, -1.0]))
    assert not result.requires_grad
    assert result.tolist() == pytest.approx([-1.0, 0.0, 0.0, 0.0, -1.0], rel=2e-3)


@pytest.mark.parametrize("seed", range(3))
def test_covariance_agrees_with_the_formula(seed: int) -> None:
    logprobs, advantages, _ = columns(seed, 50)
    assert covariance(logprobs, advantages).tolist() == pytest.approx(by_formula(logprobs, advantages), rel=1e-9)


def test_the_band_by_hand() -> None:
    # Covariances 2.5, 0.5, 0, 0.5, 2.5 around the means 0 and -3.
    logprobs = torch.tensor([-0.5, -2.5, -3.0, -3.5, -5.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, 0.0, -1.0, -1.0], dtype=torch.float64)
    assert covariance(logprobs, advantages).tolist() == [2.5, 0.5, 0.0, 0.5, 2.5]
    draws = torch.tensor([0.9, 0.5, 0.1, 0.2, 0.3], dtype=torch.float64)

    def chosen(ratio: float, low: float, high: float) -> list[int]:
        result = random_in_covariance_band(
            logprobs, advantages, draws, clip_cov_ratio=ratio, cov_low=low, cov_high=high
        )
        assert result.dtype == torch.bool
        return result.nonzero()[:, 0].tolist()

    assert chosen(1.0, 1.0, 5.0) == [0, 4]
    assert chosen(0.5, 1.0, 5.0) == [4]  # 0.3 is drawn before 0.9
    assert chosen(0.51, 1.0, 5.0) == [0, 4]  # 1.02 of 2 tokens, rounded up
    assert chosen(0.01, 1.0, 5.0) == [4]
    assert chosen(0.0, 1.0, 5.0) == []
    assert chosen(0.5, 0.1, 1.0) == [3]
    assert chosen(0.75, 0.1, 5.0) == [1, 3, 4]  # the three smallest draws of four; that of token 2 doesn't count
    assert chosen(1.0, 0.5, 2.5) == []  # the band is open at both ends
    assert chosen(1.0, 0.4, 2.5) == [1, 3]
    assert chosen(1.0, 0.5, 2.6) == [0, 4]
    assert chosen(1.0, 6.0, 9.0) == []


@FEW
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(0, 60),
    thousandths=st.integers(0, 1000),
    low=st.floats(-1, 1),
    width=st.floats(0, 3),
)
def test_exactly_the_rounded_up_part_of_the_band_is_taken_and_nothing_outside(
    seed: int, n: int, thousandths: int, low: float, width: float
) -> None:
    logprobs, advantages, draws = columns(seed, n)
    chosen = random_in_covariance_band(
        logprobs, advantages, draws, clip_cov_ratio=thousandths / 1000, cov_low=low, cov_high=low + width
    )
    inside = torch.tensor([low < c < low + width for c in (by_formula(logprobs, advantages) if n else [])]).bool()
    assert int(chosen.sum()) == math.ceil(Fraction(thousandths, 1000) * int(inside.sum()))
    assert not (chosen & ~inside).any()
    left = inside & ~chosen
    if chosen.any() and left.any():
        assert draws[chosen].max() < draws[left].min()


@FEW
@given(seed=st.integers(0, 10_000), n=st.integers(1, 60), data=st.data())
def test_the_choice_follows_the_tokens_wherever_they_stand(seed: int, n: int, data: st.DataObject) -> None:
    logprobs, advantages, draws = columns(seed, n)
    order = torch.tensor(data.draw(st.permutations(range(n))))

    def band(at: Tensor) -> Tensor:
        return random_in_covariance_band(
            logprobs[at], advantages[at], draws[at], clip_cov_ratio=0.3, cov_low=0.05, cov_high=2.0
        )

    def top(at: Tensor) -> Tensor:
        return highest_covariance(logprobs[at], advantages[at], kl_cov_ratio=0.2)

    here = torch.arange(n)
    assert torch.equal(band(order), band(here)[order])
    assert torch.equal(top(order), top(here)[order])


def test_every_token_of_the_band_is_as_likely_to_be_taken() -> None:
    logprobs, advantages, _ = columns(0, 40)
    generator = torch.Generator().manual_seed(1)
    times = torch.zeros(40)
    for _ in range(2000):
        draws = torch.rand(40, generator=generator)
        times += random_in_covariance_band(logprobs, advantages, draws, clip_cov_ratio=0.25, cov_low=-1.0, cov_high=1.0)
    inside = torch.tensor([-1.0 < c < 1.0 for c in by_formula(logprobs, advantages)])
    count = int(inside.sum())
    assert 10 < count < 40 and not times[~inside].any()
    expected = math.ceil(count / 4) / count
    assert (times[inside] / 2000 - expected).abs().max() < 5 * math.sqrt(0.25 / 2000)


@pytest.mark.parametrize(
    ("ratio", "chosen"),
    [
        (0.01, [2]),  # at least one
        (0.25, [2]),
        (0.26, [0, 2]),
        (0.5, [0, 2]),
        (0.75, [0, 1, 2]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_the_top_part_by_covariance_by_hand(ratio: float, chosen: list[int]) -> None:
    logprobs, advantages = torch.tensor([-1.0, -2.0, -4.0, -1.0]), torch.tensor([2.0, 1.0, -1.0, 0.0])
    result = highest_covariance(logprobs, advantages, kl_cov_ratio=ratio)  # of 1.5, 0, 3, -0.5
    assert result.dtype == torch.bool
    assert result.nonzero()[:, 0].tolist() == chosen


def test_tokens_that_tie_with_the_last_of_the_top_part_are_in() -> None:
    # Covariances 1, 1, 0, 0, 1, 1: one token asked for, four are as good.
    logprobs = torch.tensor([-1.0, -1.0, -2.0, -2.0, -3.0, -3.0])
    advantages = torch.tensor([1.0, 1.0, 0.0, 0.0, -1.0, -1.0])
    assert highest_covariance(logprobs, advantages, kl_cov_ratio=0.1).tolist() == [True, True, False, False, True, True]
    assert highest_covariance(logprobs, advantages, kl_cov_ratio=5 / 6).all()


def test_where_all_advantages_are_0_all_tokens_tie() -> None:
    assert highest_covariance(torch.tensor([-1.0, -2.0, -7.0]), torch.zeros(3), kl_cov_ratio=0.1).all()


@FEW
@given(seed=st.integers(0, 10_000), n=st.integers(3, 60), thousandths=st.integers(1, 1000))
def test_the_top_part_is_rounded_up_and_above_the_rest(seed: int, n: int, thousandths: int) -> None:
    logprobs, advantages, _ = columns(seed, n)
    chosen = highest_covariance(logprobs, advantages, kl_cov_ratio=thousandths / 1000)
    assert int(chosen.sum()) == math.ceil(Fraction(thousandths, 1000) * n)
    cov = torch.tensor(by_formula(logprobs, advantages))
    if not chosen.all():
        assert cov[chosen].min() > cov[~chosen].max()


def test_a_decimal_fraction_is_not_rounded_up_for_its_binary_remainder() -> None:
    logprobs, advantages, draws = columns(0, 100)
    assert 0.07 * 100 > 7
    assert int(highest_covariance(logprobs, advantages, kl_cov_ratio=0.07).sum()) == 7
    band = random_in_covariance_band(logprobs, advantages, draws, clip_cov_ratio=0.07, cov_low=-1e9, cov_high=1e9)
    assert int(band.sum()) == 7


def test_no_tokens_give_no_choice() -> None:
    none = torch.zeros(0)
    assert highest_covariance(none, none).shape == (0,)
    assert random_in_covariance_band(none, none, none).shape == (0,)


def test_the_losses_take_their_choice_from_these() -> None:
    assert LOSSES["clip_cov"].helper is random_in_covariance_band
    assert LOSSES["kl_cov"].helper is highest_covariance
    assert [entry.name for entry in LOSSES if entry.helper] == ["clip_cov", "kl_cov"]
