import math
import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lib.algorithms.advantages import (
    ADVANTAGES,
    TokenAdvantages,
    dr_grpo,
    gae,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    whiten,
    whiten_rows,
)
from grpo_lib.algorithms.registry import call
from grpo_lib.errors import AlgorithmError, ConfigError
from tests.unit.algorithms.advantage_references import Row, columns, expected, iterations

FEW = settings(deadline=None, max_examples=25)
FEWER = settings(deadline=None, max_examples=12)


@dataclass(frozen=True)
class Case:
    name: str
    options: dict[str, object] = field(default_factory=dict)
    corrected: bool = False

    def __str__(self) -> str:
        shown = [f"{key}={value}" for key, value in self.options.items()] + ["corrected"] * self.corrected
        return " ".join([self.name, *shown])

    def iterations(self, **choices: list[str]) -> st.SearchStrategy[list[Row]]:
        return iterations(smallest_group=2 if self.name == "grpo_passk" else 1, **choices)

    def on(self, batch: SimpleNamespace) -> tuple[Tensor, Tensor | None]:
        """Advantages of every token, and returns."""
        result = call(ADVANTAGES[self.name].bind(self.options, "algorithm.advantage_options"), batch)
        if isinstance(result, TokenAdvantages):
            return result.advantages, result.returns
        assert result.shape == batch.rewards.shape and result.dtype == torch.float64
        return result[batch.row_ids].masked_fill(~batch.mask, 0.0), None

    def advantages(self, rows: list[Row]) -> Tensor:
        return self.on(columns(rows, self.corrected))[0]


OUTCOME = [
    Case("grpo"),
    Case("dr_grpo"),
    Case("rloo"),
    Case("opo"),
    Case("grpo_passk"),
    Case("gpg", {"f_norm": 1.0}),
    Case("gpg", {"f_norm": 2.5}),
]
WHITENED = [
    Case("reinforce_plus_plus", {"gamma": 1.0}),
    Case("reinforce_plus_plus", {"gamma": 0.9}),
    Case("reinforce_plus_plus_baseline"),
    Case("gdpo", {"weights": None}),
    Case("gdpo", {"weights": {"short": 0.3, "right": -2.0}}),
    Case("gae", {"gamma": 1.0, "lam": 0.95}),
    Case("gae", {"gamma": 0.9, "lam": 0.5}),
    Case("gae", {"gamma": 0.97, "lam": 0.0}),
    Case("gae", {"gamma": 0.5, "lam": 1.0}),
]
TOKEN = [Case("remax"), Case("optimal_token_baseline"), Case("optimal_token_baseline", corrected=True)]
ALL = OUTCOME + WHITENED + TOKEN
every = pytest.mark.parametrize("case", ALL, ids=str)


def assert_near(actual: Tensor | list[float], wanted: Tensor | list[float], tolerance: float = 1e-9) -> None:
    """Equal up to rounding of the largest of them."""
    actual, wanted = torch.as_tensor(actual, dtype=torch.float64), torch.as_tensor(wanted, dtype=torch.float64)
    scale = max(1.0, float(wanted.abs().max())) if len(wanted) else 1.0
    torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance * scale)


def flat(tokens: list[list[float]]) -> list[float]:
    return [value for row in tokens for value in row]


def test_every_estimator_is_compared() -> None:
    elsewhere = {"grpo_process"}  # in test_grpo_process.py
    assert {case.name for case in ALL} == {entry.name for entry in ADVANTAGES} - elsewhere


# ------------------------------------------------------------------------------------------------- against formulas


@every
@FEW
@given(data=st.data())
def test_every_estimator_agrees_with_its_formula_token_by_token(case: Case, data: st.DataObject) -> None:
    rows = data.draw(case.iterations())
    advantages, returns = case.on(columns(rows, case.corrected))
    wanted, wanted_returns = expected(case.name, rows, case.corrected, **case.options)
    assert advantages.dtype == torch.float64
    assert_near(advantages, flat(wanted))
    assert (returns is None) == (wanted_returns is None)
    if returns is not None and wanted_returns is not None:
        assert returns.dtype == torch.float64
        assert_near(returns, flat(wanted_returns))


@every
@FEWER
@given(data=st.data())
def test_neither_the_order_of_rows_nor_the_names_of_groups_matter(case: Case, data: st.DataObject) -> None:
    rows = data.draw(case.iterations())
    order = data.draw(st.permutations(range(len(rows))))
    moved = case.advantages([replace(rows[i], group=2**40 - 7 * rows[i].group) for i in order])
    starts = columns(rows).offsets.tolist()
    advantages = case.advantages(rows)
    assert_near(moved, torch.cat([advantages[starts[i] : starts[i + 1]] for i in order]))


@every
@FEWER
@given(data=st.data(), masked=st.sampled_from([math.nan, math.inf, 1e30]))
def test_what_stands_at_masked_tokens_reaches_nothing(case: Case, data: st.DataObject, masked: float) -> None:
    rows = data.draw(case.iterations())
    clean, dirty = columns(rows, case.corrected), columns(rows, case.corrected, masked=masked)
    advantages, returns = case.on(dirty)
    assert torch.equal(advantages, case.on(clean)[0])
    assert not bool(advantages[~clean.mask].any())
    assert returns is None or not bool(returns[~clean.mask].any())


@every
def test_estimators_leave_their_columns_as_they_were(case: Case) -> None:
    # All masks are 1: nothing had to be taken out, so nothing was copied on the way.
    row = a_row(reward=1.0, token_rewards=[0.5, 0.25, 0.25], values=[0.1, 0.2, 0.3])
    rows = [row, replace(row, token_rewards=[0.0, 0.0, 0.0], reward=0.0), replace(row, group=1), replace(row, group=1)]
    batch, untouched = columns(rows, case.corrected), columns(rows, case.corrected)
    case.on(batch)
    for name, column in vars(untouched).items():
        if isinstance(column, Tensor):
            assert torch.equal(getattr(batch, name), column), name


# ------------------------------------------------------------------------------------------------ numbers by hand


def a_row(group: int = 0, **fields: object) -> Row:
    """A row with as many valid tokens as ``token_rewards``, unless told otherwise."""
    token_rewards = fields.pop("token_rewards", [0.0])
    assert isinstance(token_rewards, list)
    tokens = len(token_rewards)
    plain: dict[str, object] = {
        "reward": sum(token_rewards),
        "mask": [True] * tokens,
        "greedy_reward": 0.0,
        "components": [0.0, 0.0, 0.0],
        "values": [0.0] * tokens,
        "old_logprobs": [math.log(0.5)] * tokens,
        "sum_squared_probs": [0.5] * tokens,
        "is_weights": [1.0] * tokens,
    }
    return Row(group=group, token_rewards=token_rewards, **(plain | fields))  # type: ignore[arg-type]


def one_group(*rewards: float) -> tuple[Tensor, Tensor]:
    return torch.tensor(rewards, dtype=torch.float64), torch.full((len(rewards),), 5)


def test_grpo_divides_by_the_unbiased_standard_deviation() -> None:
    # mean 2/3, squares 1/9 + 4/9 + 1/9 = 2/3, std sqrt(2/3 / 2) = 0.577350: (1/3) / 0.577351 and -(2/3) / 0.577351
    assert_near(grpo(*one_group(1, 0, 1)), [0.5773492692, -1.1546985384, 0.5773492692], 1e-10)


def test_dr_grpo_only_takes_the_mean_off() -> None:
    assert dr_grpo(*one_group(1, 0, 0, 1)).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_rloo_takes_off_the_mean_of_the_other_rows() -> None:
    # 1 - 2/3, 0 - 3/3, 0 - 3/3, 2 - 1/3
    assert_near(rloo(*one_group(1, 0, 0, 2)), [1 / 3, -1.0, -1.0, 5 / 3], 1e-15)


def test_opo_weighs_rewards_by_length_observations_included() -> None:
    # (3 * 1 + 1 * 0 + 2 * 1) / (3 + 1 + 2) = 5/6
    assert_near(opo(*one_group(1, 0, 1), lengths=torch.tensor([3, 1, 2])), [1 / 6, -5 / 6, 1 / 6], 1e-15)


def test_grpo_passk_gives_the_best_row_its_margin() -> None:
    # std of 3, 1, 2 is 1: (3 - 2) / 1.000001; of 1, 0, 0, 0: sqrt((9 + 1 + 1 + 1) / 16 / 3) = 0.5: 1 / 0.500001
    assert_near(grpo_passk(*one_group(3, 1, 2)), [1 / 1.000001, 0.0, 0.0], 1e-12)
    assert_near(grpo_passk(*one_group(0, 0, 1, 0)), [0.0, 0.0, 1 / 0.500001, 0.0], 1e-12)
    assert grpo_passk(*one_group(1, 1, 0)).tolist() == [0.0, 0.0, 0.0]  # nothing between the best and the second


def test_gpg_scales_up_when_few_rows_earn_anything() -> None:
    # alpha 4 / 1, mean 0.25: 4 * 0.75 / 2 and 4 * -0.25 / 2
    assert gpg(*one_group(1, 0, 0, 0), f_norm=2.0).tolist() == [1.5, -0.5, -0.5, -0.5]
    # alpha 4 / 3: a reward below 0 is one too. mean 0.25
    assert_near(gpg(*one_group(1, -1, 0, 1)), [1.0, -5 / 3, -1 / 3, 1.0], 1e-15)
    assert gpg(*one_group(0, 0)).tolist() == [0.0, 0.0]  # alpha 2 / max(1, 0)


def test_reinforce_plus_plus_whitens_discounted_returns() -> None:
    rows = [
        # The second token is an observation: the return passes it without a discount.
        a_row(token_rewards=[0.0, 0.0, 1.0], mask=[True, False, True]),
        a_row(token_rewards=[2.0]),
    ]
    batch = columns(rows)
    result = reinforce_plus_plus(batch.token_rewards, batch.mask, batch.offsets, gamma=0.5)
    assert result.returns is not None and result.returns.tolist() == [0.5, 0.0, 1.0, 2.0]
    # mean 7/6; squares 4/9 + 1/36 + 25/36 = 7/6, over 2 is 7/12: -(2/3), -(1/6) and 5/6 over 0.763763
    assert_near(result.advantages, [-0.8728716, 0.0, -0.2182179, 1.0910895], 1e-7)


def test_reinforce_plus_plus_baseline_whitens_over_tokens() -> None:
    rewards, group_ids = one_group(1, 0)
    # 0.5 at three tokens and -0.5 at one: mean 0.25, variance (3/16 + 9/16) / 3 = 0.25
    advantages = reinforce_plus_plus_baseline(rewards, group_ids, torch.tensor([3, 1]))
    assert_near(advantages, [0.5, -1.5], 1e-7)
    # The batch's mean comes off a group of equal rewards too: 0 at two more tokens makes it 1/6.
    # squares 3 (1/3)^2 + (2/3)^2 + 2 (1/6)^2 = 1/3 + 4/9 + 1/18 = 5/6, over 5 is 1/6
    more = torch.tensor([1.0, 0.0, 7.0, 7.0]), torch.tensor([0, 0, 1, 1]), torch.tensor([3, 1, 1, 1])
    wanted = [(1 / 3) * math.sqrt(6), -(2 / 3) * math.sqrt(6), -math.sqrt(6) / 6, -math.sqrt(6) / 6]
    assert_near(reinforce_plus_plus_baseline(*more), wanted, 1e-6)


def test_remax_takes_off_the_greedy_response() -> None:
    rows = [
        a_row(token_rewards=[0.5, 0.0, 1.0], mask=[True, False, True], greedy_reward=0.25),
        a_row(token_rewards=[0.0], greedy_reward=1.0),
    ]
    batch = columns(rows)
    result = remax(batch.token_rewards, batch.mask, batch.offsets, batch.greedy_rewards)
    assert result.advantages.tolist() == [1.25, 0.0, 0.75, -1.0]
    assert result.returns is not None and result.returns.tolist() == [1.5, 0.0, 1.0, 0.0]


def test_gdpo_normalises_each_component_before_it_adds() -> None:
    _, group_ids = one_group(0, 0)
    components = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 100.0]], dtype=torch.float64)
    names, tokens = ("right", "format", "unused"), torch.tensor([1, 1])
    # Each component is +-1/sqrt(2) whatever its size: (1 - 3) / sqrt(2) = -sqrt(2) and +sqrt(2), whose variance is 4
    advantages = gdpo(components, names, group_ids, tokens, weights={"right": 1.0, "format": 3.0})
    assert_near(advantages, [-math.sqrt(0.5), math.sqrt(0.5)], 1e-6)
    # All with weight 1: (1 - 1 - 1) / sqrt(2) and its negative, whose variance is 1
    advantages = gdpo(components, names, group_ids, tokens)
    assert_near(advantages, [-math.sqrt(0.5), math.sqrt(0.5)], 1e-5)
    # One token more of the first row: -2 sqrt(2) (1, 1, -2) / 3 around the mean, variance 4 * 2 * 6 / 9 / 2 = 8/3
    advantages = gdpo(components, names, group_ids, torch.tensor([2, 1]), weights={"right": 1.0, "format": 3.0})
    assert_near(advantages, [-1 / math.sqrt(3), 2 / math.sqrt(3)], 1e-6)


def baseline_of_two() -> list[Row]:
    # Energies 1 - 2 * 0.5 + 0.5 = 0.5 at both tokens of the first row, so W = 0.5, 1.0; and 1 - 0.5 + 0.5 = 1.
    return [
        a_row(token_rewards=[0.0, 1.0], is_weights=[2.0, 1.0]),
        a_row(token_rewards=[0.0], old_logprobs=[math.log(0.25)]),
    ]


def otb(rows: list[Row], corrected: bool = False) -> list[float]:
    return call(optimal_token_baseline, columns(rows, corrected)).advantages.tolist()


def test_optimal_token_baseline_weighs_returns_position_by_position() -> None:
    # Position 0: (1 * 0.5 + 0 * 1) / (0.5 + 1) = 1/3. Position 1: only the first row still runs.
    assert_near(otb(baseline_of_two()), [2 / 3, 1.0, -1 / 3], 1e-7)


def test_optimal_token_baseline_counts_energy_by_the_squared_importance_weight() -> None:
    # The first energy is 0.5 * 2^2 = 2. Position 0: (1 * 2 + 0 * 1) / 3.
    assert_near(otb(baseline_of_two(), corrected=True), [1 / 3, 1.0, -2 / 3], 1e-7)


def test_optimal_token_baseline_counts_positions_with_observations_and_weighs_without() -> None:
    rows = [
        a_row(token_rewards=[0.0, 0.0, 1.0], mask=[True, False, True]),
        a_row(token_rewards=[0.0, 0.0, 0.0]),
        a_row(group=1, token_rewards=[4.0]),
    ]
    # Energies are 0.5. Position 0: (0.5 * 1 + 0.5 * 0) / 1. Position 1: only the second row has a token there.
    # Position 2: W is 1.0, as the observation adds nothing, and 1.5: 1 / 2.5.
    assert_near(otb(rows), [0.5, 0.0, 0.6, -0.5, 0.0, -0.4, 4.0], 1e-7)


def test_gae_by_hand() -> None:
    rows = [
        # delta = 0 + 0.5 * 0.5 - 0.5 = -0.25 and 1 - 0.5 = 0.5; A = -0.25 + 0.25 * 0.5 = -0.125 and 0.5.
        a_row(token_rewards=[0.0, 0.0, 1.0], mask=[True, False, True], values=[0.5, 9.0, 0.5]),
        a_row(token_rewards=[1.0], values=[0.75]),
    ]
    batch = columns(rows)
    result = gae(batch.token_rewards, batch.values, batch.mask, batch.offsets, gamma=0.5, lam=0.5)
    assert result.returns is not None and result.returns.tolist() == [0.375, 0.0, 1.0, 1.0]
    # -1/8, 4/8, 2/8: mean 5/24; in 24ths -8, 7, 1, squares 114, over 2 and 576: sqrt(57) / 24
    root = math.sqrt(57)
    assert_near(result.advantages, [-8 / root, 0.0, 7 / root, 1 / root], 1e-6)


def test_rows_of_a_group_need_not_be_adjacent() -> None:
    rewards, group_ids = torch.tensor([1.0, 10.0, 3.0, 20.0, 30.0]), torch.tensor([9, -4, 9, -4, -4])
    assert dr_grpo(rewards, group_ids).tolist() == [-1.0, -10.0, 1.0, 0.0, 10.0]
    scaled = [-1 / (math.sqrt(2) + 1e-6), -10 / (10 + 1e-6), 1 / (math.sqrt(2) + 1e-6), 0.0, 10 / (10 + 1e-6)]
    assert_near(grpo(rewards, group_ids), scaled, 1e-12)


def test_a_group_of_one_has_baseline_0_and_standard_deviation_1() -> None:
    rewards, group_ids = torch.tensor([0.5, 2.0, 0.0]), torch.tensor([0, 1, 2])
    for estimator in (dr_grpo, rloo):
        assert estimator(rewards, group_ids).tolist() == [0.5, 2.0, 0.0]
    assert opo(rewards, group_ids, torch.tensor([3, 1, 2])).tolist() == [0.5, 2.0, 0.0]
    assert gpg(rewards, group_ids).tolist() == [0.75, 3.0, 0.0]  # alpha 3 / 2
    assert grpo(rewards, group_ids).tolist() == [0.5 / (1 + 1e-6), 2.0 / (1 + 1e-6), 0.0]
    # 0.5, 2, 0 have mean 2.5/3 and variance (1/9 + 49/36 + 25/36) / 2 = 13/12
    root = math.sqrt(13 / 12)
    assert_near(
        reinforce_plus_plus_baseline(rewards, group_ids, torch.tensor([1, 1, 1])),
        [-(1 / 3) / root, (7 / 6) / root, -(5 / 6) / root],
        1e-7,
    )
    assert otb([a_row(group=group, token_rewards=[0.0, 2.0]) for group in (0, 1)]) == [2.0, 2.0, 2.0, 2.0]


# ------------------------------------------------------------------------------------------------------ properties

verdicts = st.lists(st.tuples(st.integers(-8, 8).map(lambda n: n / 4), st.integers(0, 3)), min_size=1, max_size=24)


def tensors(rows: list[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    return torch.tensor([reward for reward, _ in rows], dtype=torch.float64), torch.tensor([group for _, group in rows])


def members(group_ids: Tensor) -> list[Tensor]:
    """The rows of each group of several."""
    groups = [group_ids == group for group in set(group_ids.tolist())]
    return [rows for rows in groups if int(rows.sum()) > 1]


@FEW
@given(rows=verdicts, scale=st.floats(0.01, 100), shift=st.floats(-100, 100))
def test_grpo_does_not_change_when_all_rewards_are_scaled_and_shifted(
    rows: list[tuple[float, int]], scale: float, shift: float
) -> None:
    rewards, group_ids = tensors(rows)
    before, after = grpo(rewards, group_ids), grpo(scale * rewards + shift, group_ids)
    for group in members(group_ids):
        # Only the 1e-6 in the denominator tells them apart, and just by this factor.
        std = float(rewards[group].std())
        factor = scale * (std + 1e-6) / (scale * std + 1e-6)
        torch.testing.assert_close(after[group], before[group] * factor, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(after[group], before[group], rtol=1e-3, atol=1e-9)


@FEW
@given(rows=verdicts)
def test_advantages_of_a_group_sum_to_0(rows: list[tuple[float, int]]) -> None:
    rewards, group_ids = tensors(rows)
    for estimator in (grpo, dr_grpo, rloo, gpg):
        advantages = estimator(rewards, group_ids)
        for group in members(group_ids):
            assert abs(float(advantages[group].sum())) < 1e-10


@FEW
@given(rows=verdicts)
def test_rloo_is_dr_grpo_times_n_over_n_minus_1(rows: list[tuple[float, int]]) -> None:
    rewards, group_ids = tensors(rows)
    for group in members(group_ids):
        n = int(group.sum())
        scaled = dr_grpo(rewards, group_ids)[group] * n / (n - 1)
        torch.testing.assert_close(rloo(rewards, group_ids)[group], scaled, rtol=1e-12, atol=1e-12)


@FEW
@given(rows=verdicts, data=st.data())
def test_the_length_weighted_advantages_of_opo_sum_to_0(rows: list[tuple[float, int]], data: st.DataObject) -> None:
    rewards, group_ids = tensors(rows)
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, 50), min_size=len(rows), max_size=len(rows))))
    for group in members(group_ids):
        assert abs(float((opo(rewards, group_ids, lengths) * lengths)[group].sum())) < 1e-9


@pytest.mark.parametrize("case", OUTCOME, ids=str)
@FEWER
@given(rewards=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3), size=st.integers(2, 11))
def test_equal_rewards_in_a_group_give_exactly_0(case: Case, rewards: list[float], size: int) -> None:
    rows = [
        a_row(group=group, reward=reward, token_rewards=[0.0] * length)
        for length in range(1, size + 1)
        for group, reward in enumerate(rewards)
    ]
    # Beside a group that does have something to tell.
    rows += [a_row(group=-1, reward=0.0), a_row(group=-1, reward=1.0)]
    advantages = case.advantages(rows)
    assert not bool(advantages[:-2].any())
    assert bool(advantages[-2:].any())


@pytest.mark.parametrize("case", OUTCOME, ids=str)
def test_rewards_whose_mean_rounds_give_exactly_0(case: Case) -> None:
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    assert float(rewards.sum() / 3 - 0.1) != 0.0  # the noise that must not be divided by 1e-6
    assert case.advantages([a_row(reward=0.1, token_rewards=[0.0] * n) for n in (1, 2, 5)]).tolist() == [0.0] * 8


@pytest.mark.parametrize("case", [case for case in WHITENED if case.options.get("gamma", 1.0) == 1.0], ids=str)
@FEWER
@given(reward=st.floats(-1e6, 1e6), lengths=st.lists(st.integers(1, 9), min_size=2, max_size=7))
def test_an_iteration_of_equal_rewards_whitens_to_exactly_0(case: Case, reward: float, lengths: list[int]) -> None:
    # The critic is right everywhere, so that gae has nothing to say either.
    rows = [
        a_row(
            token_rewards=[0.0] * (length - 1) + [round(reward)],
            components=[reward, 0.1, 0.7],
            values=[float(round(reward))] * length,
        )
        for length in lengths
    ]
    assert not bool(case.advantages(rows).any())


# Without weights the components of two rows may cancel, up to the 1e-6 under them.
@pytest.mark.parametrize("case", [case for case in WHITENED if case.options != {"weights": None}], ids=str)
@FEWER
@given(rows=iterations(kinds=["verdicts", "normal", "process", "large"]))
def test_whitened_advantages_have_mean_0_and_unbiased_variance_1(case: Case, rows: list[Row]) -> None:
    mask, advantages = columns(rows).mask, case.advantages(rows)
    assume(bool(advantages.any()))
    assert abs(float(advantages[mask].mean())) < 1e-9
    # v / (v + 1e-8) of the variance v before.
    assert float(advantages[mask].var()) == pytest.approx(1.0, abs=1e-3)


@FEW
@given(values=st.lists(st.integers(-99, 99).map(lambda n: n / 8), min_size=2, max_size=20), data=st.data())
def test_whitening_adds_only_1e_8_to_the_unbiased_variance(values: list[float], data: st.DataObject) -> None:
    scale = data.draw(st.sampled_from([1e-5, 1e-3, 1.0, 1e4]))
    before = torch.tensor(values, dtype=torch.float64) * scale
    assume(float(before.max() - before.min()) > 0)
    after = whiten(before, torch.ones(len(values), dtype=torch.bool))
    assert float(after.var()) == pytest.approx(float(before.var() / (before.var() + 1e-8)), rel=1e-9)
    assert abs(float(after.mean())) < 1e-9


@FEW
@given(rows=st.lists(st.tuples(st.integers(-99, 99), st.integers(0, 7)), max_size=12))
def test_whitening_rows_is_whitening_their_tokens(rows: list[tuple[int, int]]) -> None:
    values = torch.tensor([value / 8 for value, _ in rows], dtype=torch.float64)
    tokens = torch.tensor([count for _, count in rows], dtype=torch.int64)
    spread = torch.repeat_interleave(values, tokens)
    by_token = whiten(spread, torch.ones(len(spread), dtype=torch.bool))
    torch.testing.assert_close(torch.repeat_interleave(whiten_rows(values, tokens), tokens), by_token)


def test_a_single_token_whitens_to_0() -> None:
    assert whiten(torch.tensor([3.0, 5.0]), torch.tensor([False, True])).tolist() == [0.0, 0.0]
    assert whiten_rows(torch.tensor([3.0, 5.0]), torch.tensor([0, 1])).tolist() == [0.0, 0.0]


@every
@FEWER
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_finite_columns_of_any_size_give_finite_advantages(case: Case, data: st.DataObject, seed: int) -> None:
    rng = random.Random(seed)
    wide, single = [0.0, 1e-300, 1e-30, -1e-8, 0.1, -1.0, 1e6, -1e30, 1e100], [0.0, 1e-30, -0.3, 1e6, -1e30]

    def swollen(row: Row) -> Row:
        return replace(
            row,
            reward=rng.choice(wide),
            token_rewards=rng.choices(wide, k=len(row.mask)),
            components=rng.choices(wide, k=3),
            greedy_reward=rng.choice(wide),
            values=rng.choices(single, k=len(row.mask)),
            is_weights=[abs(weight) for weight in rng.choices(single, k=len(row.mask))],
        )

    rows = [swollen(row) for row in data.draw(case.iterations())]
    advantages, returns = case.on(columns(rows, case.corrected))
    assert bool(advantages.isfinite().all())
    assert returns is None or bool(returns.isfinite().all())


@every
def test_an_empty_iteration_gives_empty_advantages(case: Case) -> None:
    advantages, returns = case.on(columns([], case.corrected))
    assert (advantages.tolist(), returns is None or returns.tolist()) == ([], returns is None or [])


@every
def test_an_iteration_without_a_valid_token_gives_0_everywhere(case: Case) -> None:
    rows = [
        a_row(reward=reward, token_rewards=[0.0, 0.0], mask=[False, False], components=[reward, 0.0, 1.0])
        for reward in (0.0, 1.0)
    ]
    advantages, returns = case.on(columns(rows, case.corrected))
    assert advantages.tolist() == [0.0] * 4
    assert returns is None or returns.tolist() == [0.0] * 4


@every
def test_an_iteration_of_empty_responses_gives_no_advantages(case: Case) -> None:
    rows = [a_row(reward=reward, token_rewards=[]) for reward in (0.0, 1.0)]
    assert case.advantages(rows).tolist() == []


def test_float32_columns_are_computed_in_float64() -> None:
    rewards = torch.tensor([2.0**24, 1.0, 1.0], dtype=torch.float32)  # in float32 the sum loses the ones
    advantages = dr_grpo(rewards, torch.tensor([0, 0, 0]))
    assert_near(advantages, [2**24 - (2**24 + 2) / 3, 1 - (2**24 + 2) / 3, 1 - (2**24 + 2) / 3], 1e-15)


@pytest.mark.parametrize("noise", [-6e-8, 6e-8])
def test_rounding_of_probabilities_near_1_does_not_blow_the_baseline_up(noise: float) -> None:
    # Of a policy that is sure of its token float32 gives sum_v pi^2 = 1 + noise, so an energy that may be negative;
    # a baseline is a weighted mean, so it lies between the returns.
    rows = [
        a_row(token_rewards=[1.0], old_logprobs=[0.0], sum_squared_probs=[1 + noise]),
        a_row(token_rewards=[0.0], old_logprobs=[0.0], sum_squared_probs=[1 - 6e-8]),
        a_row(token_rewards=[0.0], old_logprobs=[0.0], sum_squared_probs=[1.0]),
    ]
    first, second, third = otb(rows)
    assert 0 <= first <= 1
    assert second == third and -1 <= third <= 0


def test_the_weight_of_an_early_token_does_not_drown_in_what_comes_after() -> None:
    # W at position 0 is 1e-6 and 3e-6, so the baseline is 0.25 whatever the weights of later tokens.
    early: dict[str, Any] = {"old_logprobs": [0.0, math.log(0.5)], "is_weights": [1.0, 1e8]}
    rows = [
        a_row(token_rewards=[0.0, 1.0], sum_squared_probs=[1 + 2.0**-20, 0.5], **early),
        a_row(token_rewards=[0.0, 0.0], sum_squared_probs=[1 + 3 * 2.0**-20, 0.5], **early),
    ]
    assert otb(rows, corrected=True)[0] == pytest.approx(1 - 2.0**-20 / (4 * 2.0**-20 + 1e-8), rel=1e-9)


@FEW
@given(rows=iterations())
def test_the_optimal_baseline_lies_between_the_returns_of_its_position(rows: list[Row]) -> None:
    batch = columns(rows)
    result = call(optimal_token_baseline, batch)
    baseline = (result.returns - result.advantages)[batch.mask]
    scale = max(1.0, float(result.returns.abs().max())) if len(result.returns) else 1.0
    assert bool((baseline <= result.returns.clamp(min=0).max() + 1e-9 * scale).all()) if len(baseline) else True
    assert bool((baseline >= result.returns.clamp(max=0).min() - 1e-9 * scale).all()) if len(baseline) else True


# ---------------------------------------------------------------------------------------------- options and errors


def test_options_have_the_defaults_of_the_papers() -> None:
    defaults = {
        entry.name: {name: option.default for name, option in entry.options.model_fields.items()}
        for entry in ADVANTAGES
        if entry.options.model_fields
    }
    assert defaults == {
        "reinforce_plus_plus": {"gamma": 1.0},
        "gpg": {"f_norm": 1.0},
        "gdpo": {"weights": None},
        "gae": {"gamma": 1.0, "lam": 0.95},
    }


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gae", {"gamma": 0.0}),
        ("gae", {"gamma": 1.01}),
        ("gae", {"lam": -0.1}),
        ("gae", {"lam": 1.1}),
        ("reinforce_plus_plus", {"gamma": math.nan}),
        ("gpg", {"f_norm": 0.0}),
        ("gpg", {"f_norm": math.inf}),
        ("gdpo", {"weights": {"right": math.inf}}),
        ("gdpo", {"weights": ["right"]}),
    ],
)
def test_options_out_of_bounds_are_refused_by_name_and_value(name: str, options: dict[str, object]) -> None:
    option, value = next(iter(options.items()))
    with pytest.raises(ConfigError, match=rf"^options\.{option}") as refused:
        ADVANTAGES[name].bind(options, "options")
    assert str(next(iter(value.values())) if isinstance(value, dict) else value) in str(refused.value)


def test_otb_is_short_for_the_optimal_token_baseline() -> None:
    assert ADVANTAGES["otb"] is ADVANTAGES["optimal_token_baseline"]


def test_estimators_receive_just_the_columns_that_they_name() -> None:
    assert ADVANTAGES["grpo"].columns == ("rewards", "group_ids")
    assert ADVANTAGES["remax"].columns == ("token_rewards", "mask", "offsets", "greedy_rewards")
    only = SimpleNamespace(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([0, 0]))
    assert call(ADVANTAGES["dr_grpo"].bind({}, "options"), only).tolist() == [0.5, -0.5]


def test_grpo_passk_refuses_a_group_of_one() -> None:
    with pytest.raises(AlgorithmError, match=r"^2 groups hold one row.*grpo_passk.*rollout\.samples"):
        grpo_passk(torch.tensor([1.0, 0.0, 2.0, 3.0]), torch.tensor([0, 0, 1, 2]))


@pytest.mark.parametrize("weights", [{"right": 1.0, "wrong": 1.0}, {}])
def test_gdpo_refuses_components_that_the_reward_does_not_give(weights: dict[str, float]) -> None:
    with pytest.raises(AlgorithmError, match=r"the reward gives: right, short") as refused:
        gdpo(torch.ones(2, 2), ("right", "short"), torch.tensor([0, 0]), torch.tensor([1, 1]), weights=weights)
    assert "advantage_options.weights" in str(refused.value)
    assert ("['wrong']" in str(refused.value)) == bool(weights)


def test_gdpo_refuses_a_reward_without_components() -> None:
    with pytest.raises(AlgorithmError, match=r"the reward gives: none"):
        gdpo(torch.ones(0, 2), (), torch.tensor([0, 0]), torch.tensor([1, 1]))


def test_gdpo_refuses_rows_that_lack_a_component_that_counts() -> None:
    components = torch.tensor([[1.0, math.nan, math.nan], [1.0, 2.0, 3.0]])
    batch = (components, ("right", "short"), torch.tensor([0, 0, 0]), torch.tensor([1, 1, 1]))
    with pytest.raises(AlgorithmError, match=r"^2 rows have no component 'right'"):
        gdpo(*batch)
    # One that does not count may be missing. 1, 2, 3 have mean 2 and std 1
    assert_near(gdpo(*batch, weights={"short": 1.0}), [-1.0, 0.0, 1.0], 1e-5)
