import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lib.algorithms.advantages import ADVANTAGES, dr_grpo, grpo

FEW = settings(deadline=None, max_examples=30)
BOTH = pytest.mark.parametrize("estimator", [grpo, dr_grpo])

# Quarters, so that sums are exact and a rounding error can't hide an error.
scored_groups = st.lists(st.tuples(st.integers(-8, 8).map(lambda n: n / 4), st.integers(0, 3)), min_size=1, max_size=24)


def tensors(rows: list[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    return torch.tensor([reward for reward, _ in rows], dtype=torch.float64), torch.tensor([group for _, group in rows])


def by_formula(rewards: Tensor, group_ids: Tensor, normalised: bool) -> list[float]:
    """(R - mean_g) / (std_g + 1e-6) or R - mean_g, one row after the other."""
    advantages = []
    for reward, group in zip(rewards.tolist(), group_ids.tolist(), strict=True):
        theirs = [r for r, g in zip(rewards.tolist(), group_ids.tolist(), strict=True) if g == group]
        if len(theirs) == 1:
            mean, std = 0.0, 1.0
        elif len(set(theirs)) == 1:
            advantages.append(0.0)
            continue
        else:
            mean = math.fsum(theirs) / len(theirs)
            std = math.sqrt(math.fsum((r - mean) ** 2 for r in theirs) / (len(theirs) - 1))
        advantages.append((reward - mean) / (std + 1e-6) if normalised else reward - mean)
    return advantages


def test_grpo_divides_by_the_unbiased_standard_deviation() -> None:
    # mean 2/3, std sqrt(1/3) = 0.577350: 0.577349 and -1.154699
    advantages = grpo(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([5, 5, 5]))
    assert advantages.tolist() == pytest.approx([0.5773492692, -1.1546985384, 0.5773492692], abs=1e-10)
    assert advantages.dtype == torch.float64


def test_dr_grpo_only_takes_the_mean_off() -> None:
    advantages = dr_grpo(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([3, 3, 3, 3]))
    assert advantages.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_rows_of_a_group_need_not_be_adjacent() -> None:
    rewards, group_ids = torch.tensor([1.0, 10.0, 3.0, 20.0, 30.0]), torch.tensor([9, -4, 9, -4, -4])
    assert dr_grpo(rewards, group_ids).tolist() == [-1.0, -10.0, 1.0, 0.0, 10.0]
    scaled = [-1 / (math.sqrt(2) + 1e-6), -10 / (10 + 1e-6), 1 / (math.sqrt(2) + 1e-6), 0.0, 10 / (10 + 1e-6)]
    assert grpo(rewards, group_ids).tolist() == pytest.approx(scaled, abs=1e-12)


def test_a_group_of_one_has_baseline_0_and_standard_deviation_1() -> None:
    rewards, group_ids = torch.tensor([0.5, 2.0, 0.0]), torch.tensor([0, 1, 2])
    assert dr_grpo(rewards, group_ids).tolist() == [0.5, 2.0, 0.0]
    assert grpo(rewards, group_ids).tolist() == [0.5 / (1 + 1e-6), 2.0 / (1 + 1e-6), 0.0]


@pytest.mark.parametrize(("name", "normalised"), [("grpo", True), ("dr_grpo", False)])
@pytest.mark.parametrize("seed", range(5))
def test_random_batches_agree_with_the_formula_row_by_row(name: str, normalised: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Groups of 1 to many rows, one of them constant.
    group_ids = torch.randint(0, 12, (60,), generator=generator) ** 2
    rewards = torch.randn(60, generator=generator, dtype=torch.float64) * 3 + 1
    rewards[group_ids == group_ids[0]] = 0.1
    group_ids = torch.cat([group_ids, torch.tensor([1000])])
    rewards = torch.cat([rewards, torch.tensor([-0.7], dtype=torch.float64)])
    expected = by_formula(rewards, group_ids, normalised)
    assert ADVANTAGES[name](rewards, group_ids).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@BOTH
@FEW
@given(rows=scored_groups, data=st.data())
def test_the_order_of_rows_does_not_matter(
    estimator: Callable[[Tensor, Tensor], Tensor], rows: list[tuple[float, int]], data: st.DataObject
) -> None:
    rewards, group_ids = tensors(rows)
    order = torch.tensor(data.draw(st.permutations(range(len(rows)))))
    moved = estimator(rewards[order], group_ids[order])
    torch.testing.assert_close(moved, estimator(rewards, group_ids)[order], rtol=1e-12, atol=1e-12)


@BOTH
@FEW
@given(rows=scored_groups)
def test_the_names_of_groups_do_not_matter(
    estimator: Callable[[Tensor, Tensor], Tensor], rows: list[tuple[float, int]]
) -> None:
    rewards, group_ids = tensors(rows)
    renamed = estimator(rewards, 2**40 - 7 * group_ids)
    torch.testing.assert_close(renamed, estimator(rewards, group_ids), rtol=1e-12, atol=1e-12)


@FEW
@given(rows=scored_groups, scale=st.floats(0.5, 20), shift=st.floats(-5, 5))
def test_grpo_does_not_change_when_all_rewards_are_scaled_and_shifted(
    rows: list[tuple[float, int]], scale: float, shift: float
) -> None:
    rewards, group_ids = tensors(rows)
    several = torch.tensor([group_ids.tolist().count(group) > 1 for group in group_ids.tolist()])
    before, after = grpo(rewards, group_ids), grpo(scale * rewards + shift, group_ids)
    # The 1e-6 in the denominator is what remains.
    torch.testing.assert_close(after[several], before[several], rtol=1e-4, atol=1e-9)


@BOTH
@FEW
@given(reward=st.floats(-1e6, 1e6), size=st.integers(2, 11))
def test_equal_rewards_give_exactly_0(estimator: Callable[[Tensor, Tensor], Tensor], reward: float, size: int) -> None:
    rewards = torch.full((size,), reward, dtype=torch.float64)
    assert torch.equal(estimator(rewards, torch.zeros(size, dtype=torch.int64)), torch.zeros(size).double())


@BOTH
def test_rewards_whose_mean_rounds_give_exactly_0(estimator: Callable[[Tensor, Tensor], Tensor]) -> None:
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    assert float(rewards.sum() / 3 - 0.1) != 0.0  # the noise that must not be divided by 1e-6
    assert estimator(rewards, torch.zeros(3, dtype=torch.int64)).tolist() == [0.0, 0.0, 0.0]


@FEW
@given(rows=scored_groups)
def test_advantages_of_a_group_sum_to_0(rows: list[tuple[float, int]]) -> None:
    rewards, group_ids = tensors(rows)
    for group in set(group_ids.tolist()):
        members = group_ids == group
        if int(members.sum()) > 1:
            assert abs(float(dr_grpo(rewards, group_ids)[members].sum())) < 1e-12
            assert abs(float(grpo(rewards, group_ids)[members].sum())) < 1e-9
