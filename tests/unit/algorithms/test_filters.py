import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.algorithms.filters import FILTERS, dynamic_sampling, overlong_penalty, pf_ppo
from grpo_lib.errors import ConfigError

FEW = settings(deadline=None, max_examples=60)
rewards_of_any_size = st.lists(
    st.one_of(st.sampled_from([0.0, 1.0, -1.0, 0.1]), st.floats(-1e6, 1e6)), min_size=1, max_size=30
)
powers = st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0, 100.0])


def doubles(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------ dynamic_sampling


def test_dynamic_sampling_drops_groups_whose_rewards_are_all_equal() -> None:
    rewards = doubles([1.0, 0.5, 0.0, 0.5, 1.0, 0.0, 0.0, 1.0])
    group_ids = torch.tensor([7, -2, 7, -2, 7, 30, 30, 99])
    # Of group 7 all stay, equal ones too; -2 and 30 are constant; 99 is a group of one.
    assert dynamic_sampling(rewards, group_ids).tolist() == [1, 0, 1, 0, 1, 0, 0, 0]


def test_dynamic_sampling_is_not_misled_by_a_mean_that_rounds() -> None:
    assert dynamic_sampling(doubles([0.1] * 6), torch.zeros(6, dtype=torch.int64)).tolist() == [0] * 6
    # The smallest difference there is counts.
    above = math.nextafter(0.1, 1)
    assert dynamic_sampling(doubles([0.1, above]), torch.tensor([0, 0])).tolist() == [1, 1]


def test_dynamic_sampling_of_nothing_is_nothing() -> None:
    copies = dynamic_sampling(doubles([]), torch.tensor([], dtype=torch.int64))
    assert (copies.tolist(), copies.dtype) == ([], torch.int64)


# ---------------------------------------------------------------------------------------------------------- pf_ppo


def expectations(rewards: list[float], power: float) -> list[float]:
    """``B p_i``, ``p_i ~ |R_i|^power``."""
    largest = max(map(abs, rewards))
    if largest == 0:
        return [1.0] * len(rewards)
    weights = [(abs(reward) / largest) ** power for reward in rewards]
    return [len(rewards) * weight / math.fsum(weights) for weight in weights]


def test_pf_ppo_by_hand() -> None:
    # |R|^1 of 4 rows: 1, 1, 2 of 4, so 1, 1 and 2 copies whatever is drawn.
    for seed in range(20):
        assert pf_ppo(doubles([0.0, 1.0, -1.0, 2.0]), seed, power=1.0).tolist() == [0, 1, 1, 2]
    # |R|^2: 1, 1, 4 of 6, so 2/3, 2/3 and 8/3 copies are expected.
    counts = {tuple(pf_ppo(doubles([0.0, 1.0, -1.0, 2.0]), seed).tolist()) for seed in range(40)}
    assert counts == {(0, 1, 1, 2), (0, 1, 0, 3), (0, 0, 1, 3)}


@FEW
@given(rewards=rewards_of_any_size, power=powers, seed=st.integers(0, 2**64))
def test_pf_ppo_draws_as_many_rows_as_there_are_each_within_1_of_its_expectation(
    rewards: list[float], power: float, seed: int
) -> None:
    copies = pf_ppo(doubles(rewards), seed, power=power)
    assert copies.dtype == torch.int64 and int(copies.sum()) == len(rewards)
    for count, expectation in zip(copies.tolist(), expectations(rewards, power), strict=True):
        assert abs(count - expectation) < 1 + 1e-9
        assert count == 0 or expectation > 0
    assert pf_ppo(doubles(rewards), seed, power=power).tolist() == copies.tolist()


def test_pf_ppo_draws_on_average_what_it_should() -> None:
    rewards = [0.3, 0.0, -1.0, 0.2, 0.9, 0.5]
    copies = torch.stack([pf_ppo(doubles(rewards), seed) for seed in range(600)]).double().mean(0)
    assert copies.tolist() == pytest.approx(expectations(rewards, 2.0), abs=0.08)


def test_the_seed_of_pf_ppo_makes_a_difference() -> None:
    rewards = doubles([0.3, 0.1, 0.7, 0.2])
    assert len({tuple(pf_ppo(rewards, seed).tolist()) for seed in range(30)}) > 1


def test_pf_ppo_keeps_every_row_once_where_all_rewards_are_0() -> None:
    assert pf_ppo(doubles([0.0, -0.0, 0.0]), 3).tolist() == [1, 1, 1]
    assert pf_ppo(doubles([]), 3).tolist() == []


def test_pf_ppo_with_power_0_keeps_every_row_once() -> None:
    assert pf_ppo(doubles([0.0, 5.0, -1.0, 1e-9]), 8, power=0.0).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_pf_ppo_asks_only_how_rewards_compare(size: float) -> None:
    # |R|^100 is beyond what a float holds; the ratio of the two is not.
    assert pf_ppo(doubles([size, size, size / 2]), 0, power=100.0).tolist() in ([1, 2, 0], [2, 1, 0])


@pytest.mark.parametrize("rows", [1, 3, 10, 49, 1000])
def test_pf_ppo_never_draws_a_weight_of_0_at_the_ends(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    rewards = doubles([0.0] + [1.0] * rows + [0.0])
    for shift in (0.0, 1 - 2.0**-53):  # the smallest and the largest number that is drawn
        monkeypatch.setattr(torch, "rand", partial(_constant, shift))
        copies = pf_ppo(rewards, 0)
        assert (int(copies[0]), int(copies[-1]), int(copies.sum())) == (0, 0, rows + 2)


def _constant(value: float, *_: object, **__: object) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("power", [-0.1, 100.5, math.inf, "much"])
def test_a_power_out_of_bounds_is_refused(power: object) -> None:
    with pytest.raises(ConfigError, match=r"^algorithm\.filters\.pf_ppo\.power="):
        FILTERS["pf_ppo"].bind({"power": power}, "algorithm.filters.pf_ppo")


# ------------------------------------------------------------------------------------------------ overlong_penalty


@pytest.mark.parametrize(
    ("length", "penalty"),
    [
        (0, 0.0),
        (79, 0.0),
        (80, 0.0),  # L_max - L_cache
        (81, -0.1),  # 1 / 20 of the way to -2
        (90, -1.0),
        (99, -1.9),
        (100, -2.0),  # L_max
        (101, -2.0),
    ],
)
def test_the_overlong_penalty_is_linear_over_the_buffer(length: int, penalty: float) -> None:
    value = float(overlong_penalty(torch.tensor([length]), max_length=100, buffer=20, penalty=2.0))
    assert value == pytest.approx(penalty, abs=1e-12)
    assert value != 0 or math.copysign(1, value) == 1  # not -0.0


def test_the_overlong_penalty_of_a_buffer_of_all_tokens_starts_at_once() -> None:
    values = overlong_penalty(torch.tensor([0, 1, 2, 4]), max_length=4, buffer=4, penalty=1.0)
    assert (values.tolist(), values.dtype) == ([0.0, -0.25, -0.5, -1.0], torch.float64)


# ----------------------------------------------------------------------------------------------------- all filters


@pytest.mark.parametrize("function", [dynamic_sampling, partial(pf_ppo, seed=1)], ids=["dynamic_sampling", "pf_ppo"])
def test_filters_leave_rewards_as_they_were(function: Callable[..., torch.Tensor]) -> None:
    rewards = doubles([1.0, 0.0, -2.0])
    function(rewards) if isinstance(function, partial) else function(rewards, torch.tensor([0, 0, 0]))
    assert rewards.tolist() == [1.0, 0.0, -2.0]
