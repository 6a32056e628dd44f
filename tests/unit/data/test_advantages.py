import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lib.algorithms.advantages import ADVANTAGES as ESTIMATORS
from grpo_lib.algorithms.advantages import TokenAdvantages, dr_grpo, gdpo, grpo, remax
from grpo_lib.algorithms.groupings import GROUPINGS
from grpo_lib.algorithms.kl import k1, k2, k3
from grpo_lib.algorithms.metrics import METRICS
from grpo_lib.algorithms.rollout_correction import Importance, Rejection
from grpo_lib.data.advantages import AdvantagePlan, KlInReward, Overlong, advantage_table
from grpo_lib.data.iteration import Iteration
from grpo_lib.data.schemas import ADVANTAGE_EXTRAS, ADVANTAGES, FLOATS, MASK, REWARDS, SELECTION
from grpo_lib.errors import AlgorithmError, DataError, RewardError

Lists = list[list[float]]
GROUPS = [0, 0, 0, 1, 1, 2, 2]
MASKS = [[1, 1], [1], [1, 0, 1], [1], [1, 1], [1], [1, 1]]


# --- tables -----------------------------------------------------------------------------------------------------------


def rollouts(
    groups: list[int], masks: list[list[int]], logprobs: Lists | None, truncated: list[int], versions: list[int] | None
) -> pa.Table:
    order = list(dict.fromkeys(groups))
    columns = {
        "rollout_id": [f"0-{group}-{row}" for row, group in enumerate(groups)],
        "prompt_row": pa.array([order.index(group) for group in groups], pa.int32()),
        "group_id": pa.array(groups, pa.int64()),
        "response_mask": pa.array(masks, MASK),
        "rollout_logprobs": pa.array(logprobs or [[-1.0] * len(mask) for mask in masks], FLOATS),
        "finish_reason": ["length" if row in truncated else "stop" for row in range(len(groups))],
        "policy_version": pa.array(versions or [0] * len(groups), pa.int32()),
    }
    return pa.table(columns)


def reward_table(
    ids: pa.ChunkedArray,
    values: list[float | None],
    parts: list[dict[str, float]] | None,
    scores: Lists | None = None,
) -> pa.Table:
    columns = {
        "rollout_id": ids,
        "value": pa.array(values, pa.float64()),
        "reason": pa.array([None if value is not None else "timeout" for value in values], pa.string()),
        "components": pa.array([list(row.items()) for row in parts or [{} for _ in values]], REWARDS.types[3]),
    }
    table = pa.table(columns, schema=REWARDS)
    return table if scores is None else table.append_column("token_scores", pa.array(scores, FLOATS))


def column(ids: pa.ChunkedArray, **values: Lists | None) -> pa.Table | None:
    ((name, lists),) = values.items()
    return None if lists is None else pa.table({"rollout_id": ids, name: pa.array(lists, FLOATS)})


def selection(ids: pa.ChunkedArray, copies: list[int | None]) -> pa.Table:
    """None: the row is not used; 0: it is, but was not drawn."""
    columns = {
        "rollout_id": ids,
        "used": [each is not None for each in copies],
        "copies": [each or 0 for each in copies],
        "reason": [None if each else "a filter" for each in copies],
    }
    return pa.table(columns, schema=SELECTION)


def iteration(
    groups: list[int],
    masks: list[list[int]],
    values: list[float | None],
    *,
    rollout: Lists | None = None,
    old: Lists | None = None,
    ref: Lists | None = None,
    critic: Lists | None = None,
    squares: Lists | None = None,
    greedy: list[float | None] | None = None,
    copies: list[int | None] | None = None,
    truncated: tuple[int, ...] = (),
    versions: list[int] | None = None,
    sources: list[str] | None = None,
    components: list[dict[str, float]] | None = None,
    scores: Lists | None = None,
) -> Iteration:
    """Groups are prompts, in the order of their first row; ``greedy`` and ``sources`` have one entry a prompt."""
    table = rollouts(groups, masks, rollout, list(truncated), versions)
    ids, count = table.column("rollout_id"), len(set(groups))
    old_table = column(ids, old_logprobs=old)
    if squares is not None and old_table is not None:
        old_table = old_table.append_column("sum_squared_probs", pa.array(squares, FLOATS))
    prompts = {"dataset_row": pa.array(range(count), pa.int64()), "data_source": sources or ["toy"] * count}
    return Iteration(
        prompts=pa.table(prompts),
        rollouts=table,
        rewards=reward_table(ids, values, components, scores),
        old=old_table,
        ref=column(ids, ref_logprobs=ref),
        values=column(ids, values=critic),
        greedy=None if greedy is None else reward_table(pa.chunked_array([["g"] * count]), greedy, None),
        selection=None if copies is None else selection(ids, copies),
    )


def plan(estimator: Callable[..., Any] = dr_grpo, **changes: Any) -> AdvantagePlan:
    standard = AdvantagePlan(
        estimator=estimator,
        grouping=GROUPINGS["prompt"],
        correction={},
        overlong=Overlong(max_length=10, buffer=None, penalty=1.0, mask_truncated=False),
    )
    return replace(standard, **changes)


def as_they_are(token_rewards: Tensor) -> TokenAdvantages:
    """An estimator that shows the token rewards."""
    return TokenAdvantages(advantages=token_rewards)


def lists(table: pa.Table, name: str = "advantages") -> Lists:
    found: Lists = table.column(name).to_pylist()
    return found


# --- advantages of rows -----------------------------------------------------------------------------------------------


def test_every_valid_token_of_a_response_gets_its_advantage() -> None:
    data = iteration(GROUPS, MASKS, [1.0, 0.0, 0.5, 1.0, 0.0, 0.25, 0.25])
    table, summary = advantage_table(data, plan())
    assert table.schema == ADVANTAGES
    assert table.column("rollout_id").to_pylist() == data.rollouts.column("rollout_id").to_pylist()
    assert lists(table) == [[0.5, 0.5], [-0.5], [0.0, 0.0, 0.0], [0.5], [-0.5, -0.5], [0.0], [0.0, 0.0]]
    assert lists(table, "response_mask") == MASKS
    assert summary == {
        "abs_mean": pytest.approx(2.0 / 7),
        "min": -0.5,
        "max": 0.5,
        "rows_without_signal_fraction": pytest.approx(2 / 7),  # the third row is 0 in a group that has signal
        "rows_without_reward": 0.0,
        "mismatch/nonfinite_tokens": 0.0,
    }


def test_a_masked_token_has_advantage_0() -> None:
    table, _ = advantage_table(iteration([0, 0], [[1, 0, 1], [0, 1]], [1.0, 0.0]), plan())
    assert lists(table) == [[0.5, 0.0, 0.5], [0.0, -0.5]]


def test_a_row_without_reward_belongs_to_no_statistic_and_its_mask_is_cleared() -> None:
    table, summary = advantage_table(iteration(GROUPS, MASKS, [1.0, None, 0.5, 1.0, 0.0, None, 0.75]), plan())
    # Group 0 has mean 0.75 of two rewards; group 2 is left with one row, whose baseline is 0.
    assert lists(table) == [[0.25, 0.25], [0.0], [-0.25, 0.0, -0.25], [0.5], [-0.5, -0.5], [0.0], [0.75, 0.75]]
    assert lists(table, "response_mask") == [[1, 1], [0], [1, 0, 1], [1], [1, 1], [0], [1, 1]]
    assert summary == {
        "abs_mean": pytest.approx((0.25 + 0.25 + 0.5 + 0.5 + 0.75) / 5),  # over the five rows that have a reward
        "min": -0.5,
        "max": 0.75,
        "rows_without_signal_fraction": 0.0,
        "rows_without_reward": 2.0,
        "mismatch/nonfinite_tokens": 0.0,
    }


def test_a_null_reward_is_not_a_reward_of_0() -> None:
    masks = [[1], [1], [1]]
    with_null, _ = advantage_table(iteration([0, 0, 0], masks, [1.0, None, 0.5]), plan(grpo))
    with_zero, _ = advantage_table(iteration([0, 0, 0], masks, [1.0, 0.0, 0.5]), plan(grpo))
    std = math.sqrt(0.125)
    assert lists(with_null) == [
        [pytest.approx(0.25 / std, rel=1e-5)],
        [0.0],
        [pytest.approx(-0.25 / std, rel=1e-5)],
    ]
    assert lists(with_zero) == [[pytest.approx(1.0, rel=1e-5)], [pytest.approx(-1.0, rel=1e-5)], [0.0]]


def test_statistics_of_positive_advantages_are_not_pulled_to_0_by_rows_without_reward() -> None:
    _, summary = advantage_table(iteration([0, 1], [[1], [1]], [2.0, None]), plan())
    assert (summary["min"], summary["max"], summary["abs_mean"]) == (2.0, 2.0, 2.0)


def test_it_is_an_error_when_no_reward_could_be_computed() -> None:
    with pytest.raises(RewardError, match="none of the 2 rewards of the iteration could be computed"):
        advantage_table(iteration([0, 0], [[1], [1]], [None, None]), plan(grpo))


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("rewards", "reward"),
        ("old", "old_logprobs"),
        ("ref", "ref_logprobs"),
        ("values", "values"),
        ("selection", "filter"),
    ],
)
def test_a_dataset_of_other_rollouts_is_refused_by_name(name: str, stage: str) -> None:
    zeros = [[0.0], [0.0]]
    data = iteration([0, 0], [[1], [1]], [1.0, 0.0], old=zeros, ref=zeros, critic=zeros, copies=[1, 1])
    turned = getattr(data, name).take(pa.array([1, 0]))
    with pytest.raises(DataError, match=f"^{stage}: the rows do not belong to the same rollouts"):
        replace(data, **{name: turned})


def test_shards_in_several_pieces_and_group_ids_in_any_order_are_read_right() -> None:
    data = iteration([7, 3, 7, 3], [[1], [1, 1], [1], [1]], [1.0, 4.0, 3.0, 0.0])
    pieces = {
        name: pa.concat_tables([table.slice(0, 1), table.slice(1)])
        for name, table in (("rollouts", data.rollouts), ("rewards", data.rewards))
    }
    table, _ = advantage_table(replace(data, **pieces), plan())
    assert lists(table) == [[-1.0], [2.0, 2.0], [1.0], [-2.0]]


def test_responses_are_compared_with_those_that_the_grouping_says() -> None:
    data = iteration([0, 0, 1, 2], [[1], [1], [1], [1]], [1.0, 2.0, 3.0, 5.0], sources=["easy", "hard", "easy"])
    table, _ = advantage_table(data, plan(grouping=GROUPINGS["data_source"]))
    # easy: rows 0, 1 and 3, mean 8/3; hard: a group of one.
    assert lists(table) == [
        [pytest.approx(-5 / 3, rel=1e-6)],
        [pytest.approx(-2 / 3, rel=1e-6)],
        [3.0],
        [pytest.approx(7 / 3, rel=1e-6)],
    ]


# --- advantages of tokens ---------------------------------------------------------------------------------------------


def test_the_score_stands_on_the_last_token_with_mask_1() -> None:
    masks = [[1, 1, 1], [1, 0], [0, 1, 0, 0], [0, 0], [1]]
    table, _ = advantage_table(iteration([0, 0, 0, 1, 1], masks, [1.0, 2.0, 3.0, 4.0, 5.0]), plan(as_they_are))
    assert lists(table) == [[0.0, 0.0, 1.0], [2.0, 0.0], [0.0, 3.0, 0.0, 0.0], [0.0, 0.0], [5.0]]


def test_the_score_moves_to_the_token_before_when_the_last_one_is_rejected() -> None:
    data = iteration(
        [0, 0], [[1, 1, 1], [1, 1]], [1.0, 2.0], rollout=[[-1, -1, -9], [-1, -1]], old=[[-1] * 3, [-1] * 2]
    )
    correction = {"rejections": [Rejection(kind="token", upper=2.0)]}
    table, _ = advantage_table(data, plan(as_they_are, correction=correction))
    assert lists(table) == [[0.0, 1.0, 0.0], [0.0, 2.0]]
    assert lists(table, "response_mask") == [[1, 1, 0], [1, 1]]


def test_rows_without_reward_are_taken_out_of_token_columns_and_the_others_put_back_in_their_places() -> None:
    data = iteration(
        [0, 0, 1, 1, 1],
        [[1, 1], [1, 1, 1], [1, 0, 1], [1], [1]],
        [3.0, None, 1.0, None, 7.0],
        critic=[[1.0, 2.0], [50.0, 60.0, 70.0], [0.0, 99.0, 0.5], [80.0], [6.25]],
    )
    estimator = ESTIMATORS["gae"].bind({"lam": 0.0}, "test")
    table, summary = advantage_table(data, plan(estimator))
    assert table.schema == pa.schema([*ADVANTAGES, ADVANTAGE_EXTRAS.field("returns")])
    # One step: A = V' - V, and R - V at the end: 1, 1; 0.5, 0.5 (the masked token is passed); 0.75. Their mean is 0.75.
    std = math.sqrt(4 * 0.25**2 / 4)
    high, low = pytest.approx(0.25 / std, rel=1e-6), pytest.approx(-0.25 / std, rel=1e-6)
    assert lists(table) == [[high, high], [0.0, 0.0, 0.0], [low, 0.0, low], [0.0], [0.0]]
    assert lists(table, "returns") == [[2.0, 3.0], [0.0, 0.0, 0.0], [0.5, 0.0, 1.0], [0.0], [7.0]]
    assert lists(table, "response_mask") == [[1, 1], [0, 0, 0], [1, 0, 1], [0], [1]]
    assert (summary["max"], summary["min"]) == (high, low)  # over tokens with mask 1 of rows with a reward
    assert summary["abs_mean"] == pytest.approx(4 * 0.25 / std / 5)
    assert summary["rows_without_reward"] == 2.0


def test_rows_of_groups_of_one_have_signal_where_their_advantage_is_not_0() -> None:
    data = iteration([0, 1, 2], [[1, 1], [1], [0]], [3.0, 1.0, 2.0], critic=[[1.0, 2.0], [0.0], [0.0]])
    _, summary = advantage_table(data, plan(ESTIMATORS["gae"].bind({"lam": 1.0}, "test")))
    assert summary["rows_without_signal_fraction"] == pytest.approx(1 / 3)  # the one without a token


def test_remax_takes_the_reward_of_the_greedy_response_to_the_same_prompt_off() -> None:
    data = iteration(
        [4, 9, 4], [[1, 1], [1, 0, 1], [1]], [1.0, 2.0, 0.0], greedy=[0.25, 3.0], old=[[-1] * 2, [-1] * 3, [-1]]
    )
    table, _ = advantage_table(data, plan(remax))
    assert lists(table) == [[0.75, 0.75], [-1.0, 0.0, -1.0], [-0.25]]


def test_rows_whose_greedy_response_has_no_reward_are_taken_out() -> None:
    data = iteration([4, 9, 4, 9], [[1, 1], [1], [1], [1]], [1.0, 2.0, 0.0, 5.0], greedy=[0.25, None])
    table, summary = advantage_table(data, plan(remax))
    assert lists(table) == [[0.75, 0.75], [0.0], [-0.25], [0.0]]
    assert lists(table, "response_mask") == [[1, 1], [0], [1], [0]]
    assert (summary["max"], summary["min"], summary["rows_without_reward"]) == (0.75, -0.25, 0.0)
    with pytest.raises(
        AlgorithmError, match="no row of the iteration is left after filters, null rewards and null rewards of greedy"
    ):
        advantage_table(iteration([0, 1], [[1], [1]], [1.0, 2.0], greedy=[None, None]), plan(remax))


def test_the_optimal_baseline_reads_the_old_policy_and_the_weights() -> None:
    data = iteration(
        [0, 0, 0],
        [[1], [1], [1]],
        [1.0, None, 0.0],
        old=[[math.log(0.5)], [0.0], [math.log(0.25)]],
        rollout=[[math.log(0.25)], [0.0], [math.log(0.25)]],
        squares=[[0.5], [0.0], [0.5]],
    )
    importance = Importance(level="token", upper=10.0)
    table, _ = advantage_table(data, plan(ESTIMATORS["otb"].function, correction={"importance": importance}))
    # Energies 1 - 2 pi + sum pi^2 = 0.5 and 1, weights 2 and 1: W = 2 and 1, the baseline 2/3.
    assert lists(table) == [[pytest.approx(1 / 3)], [0.0], [pytest.approx(-2 / 3)]]
    assert lists(table, "is_weights") == [[2.0], [0.0], [1.0]]


# --- KL in the reward -------------------------------------------------------------------------------------------------

OLD = [[-1.0, -2.0], [-1.0, -3.0, -1.0]]
REF = [[-1.5, -1.75], [-2.0, -3.0, -3.0]]  # x = 0.5, -0.25; 1, (masked), 2
KL_MASKS = [[1, 1], [1, 0, 1]]


def in_reward(**changes: Any) -> KlInReward:
    return replace(KlInReward(estimator=k1, coef=0.5), **changes)


def with_kl(**more: Any) -> Iteration:
    return iteration([0, 0], KL_MASKS, [1.0, 0.0], old=OLD, rollout=OLD, ref=REF, **more)


def test_a_kl_in_the_reward_is_taken_off_token_by_token() -> None:
    table, summary = advantage_table(with_kl(), plan(as_they_are, kl=in_reward()))
    assert lists(table) == [[-0.25, 1.125], [-0.5, 0.0, -1.0]]
    assert summary["kl_in_reward"] == pytest.approx((0.5 - 0.25 + 1 + 2) / 4)
    assert (summary["kl_coef"], summary["next_kl_coef"]) == (0.5, 0.5)


def test_the_reward_of_a_row_has_the_kl_of_all_its_tokens_in_it() -> None:
    table, _ = advantage_table(with_kl(), plan(kl=in_reward()))
    # 1 - 0.125 and 0 - 1.5: their mean is -0.3125.
    assert lists(table) == [[1.1875, 1.1875], [-1.1875, 0.0, -1.1875]]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [(k2, [-0.0625, 1 - 0.015625]), (k3, [-0.5 * (math.exp(-0.5) - 0.5), 1 - 0.5 * (math.exp(0.25) - 1.25)])],
)
def test_the_kl_in_the_reward_is_that_of_the_estimator(estimator: Any, expected: list[float]) -> None:
    table, _ = advantage_table(with_kl(), plan(as_they_are, kl=in_reward(estimator=estimator)))
    assert lists(table)[0] == pytest.approx(expected)


def test_without_recomputed_log_probs_the_kl_is_that_of_the_engine_s() -> None:
    data = iteration([0, 0], KL_MASKS, [1.0, 0.0], rollout=OLD, ref=REF)
    table, _ = advantage_table(data, plan(as_they_are, kl=in_reward()))
    assert lists(table) == [[-0.25, 1.125], [-0.5, 0.0, -1.0]]


@pytest.mark.parametrize(
    ("target", "following"),
    [
        (0.5, 0.5 * (1 + 0.2 * 2 / 8)),  # 0.8125 is 62 % too high: a fifth at most
        (1.0, 0.5 * (1 - 0.1875 * 2 / 8)),
        (100.0, 0.5 * (1 - 0.2 * 2 / 8)),
    ],
)
def test_an_adaptive_coefficient_follows_the_kl_for_the_next_iteration(target: float, following: float) -> None:
    adaptive = in_reward(target=target, horizon=8.0)
    table, summary = advantage_table(with_kl(), plan(as_they_are, kl=adaptive))
    assert lists(table) == [[-0.25, 1.125], [-0.5, 0.0, -1.0]]  # of this iteration nothing changes
    assert summary["next_kl_coef"] == pytest.approx(following, rel=1e-12)


def test_rows_that_do_not_belong_to_the_iteration_move_no_coefficient() -> None:
    """Filters may draw many times the batch; the horizon counts the rows that were learnt from."""
    adaptive = plan(kl=in_reward(target=0.5, horizon=8.0))
    _, alone = advantage_table(with_kl(), adaptive)
    crowd = iteration(
        [0, 0, 1, 1, 2],
        [*KL_MASKS, [1], [1], [1]],
        [1.0, 0.0, 0.0, 0.0, None],
        old=[*OLD, [-9.0], [-9.0], [-9.0]],
        rollout=[*OLD, [-9.0], [-9.0], [-9.0]],
        ref=[*REF, [0.0], [0.0], [0.0]],
        copies=[1, 1, None, None, None],
    )
    _, beside = advantage_table(crowd, adaptive)
    for name in ("kl_in_reward", "kl_coef", "next_kl_coef"):
        assert beside[name] == alone[name], name


def test_rejected_tokens_and_rows_without_reward_pay_no_kl() -> None:
    data = iteration(
        [0, 0, 0],
        [[1, 1], [1, 1], [1]],
        [1.0, 0.0, None],
        old=[[-1.0, -1.0], [-1.0, -1.0], [-1.0]],
        rollout=[[-1.0, -1.0], [-9.0, -1.0], [-1.0]],
        ref=[[-2.0, -1.0], [-8.0, -3.0], [-8.0]],
    )
    correction = {"rejections": [Rejection(kind="token", upper=2.0)]}
    table, summary = advantage_table(data, plan(as_they_are, kl=in_reward(), correction=correction))
    assert lists(table) == [[-0.5, 1.0], [0.0, -1.0], [0.0]]
    assert summary["kl_in_reward"] == pytest.approx((1 + 0 + 2) / 3)


def test_kl_in_the_reward_is_of_the_old_policy_and_in_bypass_mode_of_the_engine() -> None:
    columns = {"rollout": [[-3.0], [-3.0]], "ref": [[-2.0], [-2.0]]}
    _, decoupled = advantage_table(
        iteration([0, 0], [[1], [1]], [1.0, 0.0], old=[[-1.0], [-1.0]], **columns), plan(kl=in_reward())
    )
    _, bypass = advantage_table(iteration([0, 0], [[1], [1]], [1.0, 0.0], **columns), plan(kl=in_reward()))
    assert (decoupled["kl_in_reward"], bypass["kl_in_reward"]) == (1.0, -1.0)


def test_when_every_row_is_truncated_and_masked_the_run_stops_and_says_so() -> None:
    data = iteration([0, 0], [[1], [1, 1]], [1.0, 0.0], truncated=(0, 1))
    masked = Overlong(max_length=10, buffer=None, penalty=1.0, mask_truncated=True)
    with pytest.raises(AlgorithmError, match="no response token of the iteration is left: 2 of 2 rows are truncated"):
        advantage_table(data, plan(overlong=masked))


def test_when_every_log_prob_is_infinite_in_bypass_mode_the_run_stops_and_says_so() -> None:
    data = iteration([0, 0], [[1], [1, 1]], [1.0, 0.0], rollout=[[-math.inf], [-math.inf, math.inf]])
    with pytest.raises(AlgorithmError, match="3 tokens have an infinite log-prob"):
        advantage_table(data, plan())


def test_a_metric_that_is_not_a_number_and_returns_that_are_missing_are_told_by_name() -> None:
    data = iteration([0, 0], [[1], [1]], [1.0, 0.0], critic=[[0.5], [0.5]])

    def without_returns(token_rewards: Tensor, values: Tensor) -> TokenAdvantages:
        return TokenAdvantages(advantages=token_rewards - values)

    with pytest.raises(AlgorithmError, match="reads the critic's values but gives no returns"):
        advantage_table(data, plan(without_returns))

    def broken(rewards: Tensor) -> float:
        return math.nan

    with pytest.raises(AlgorithmError, match=r"algorithm\.metrics: mine gives nan"):
        advantage_table(iteration([0, 0], [[1], [1]], [1.0, 0.0]), plan(metrics=[("mine", broken)]))


# --- length -----------------------------------------------------------------------------------------------------------


def test_a_long_response_loses_reward_by_its_length_masked_tokens_included() -> None:
    masks = [[1] * 6, [1, 0] * 4, [1] * 10]
    soft = Overlong(max_length=10, buffer=4, penalty=1.0, mask_truncated=False)
    table, summary = advantage_table(iteration([0, 0, 0], masks, [1.0, 1.0, 1.0]), plan(overlong=soft))
    # 1, 1 - 0.5, 1 - 1
    assert lists(table) == [[0.5] * 6, [0.0] * 8, [-0.5] * 10]
    assert summary["overlong_penalty_mean"] == -0.5
    half, _ = advantage_table(
        iteration([0, 0, 0], masks, [1.0, 1.0, 1.0]), plan(overlong=replace(soft, penalty=0.5, buffer=2))
    )
    assert [row[0] for row in lists(half)] == [pytest.approx(1 / 6), pytest.approx(1 / 6), pytest.approx(-1 / 3)]


def test_a_response_that_was_cut_off_is_out_of_the_loss_and_still_a_baseline() -> None:
    masked = Overlong(max_length=2, buffer=None, penalty=1.0, mask_truncated=True)
    data = iteration([0, 0, 0], [[1], [1, 1], [1]], [1.0, 0.0, 0.5], truncated=(1,))
    table, summary = advantage_table(data, plan(overlong=masked))
    assert lists(table) == [[0.5], [0.0, 0.0], [0.0]]
    assert lists(table, "response_mask") == [[1], [0, 0], [1]]
    assert summary["rows_without_reward"] == 0.0
    kept, _ = advantage_table(data, plan())
    assert lists(kept) == [[0.5], [-0.5, -0.5], [0.0]] and lists(kept, "response_mask") == [[1], [1, 1], [1]]


def test_a_response_that_was_cut_off_has_no_token_for_a_token_estimator() -> None:
    masked = Overlong(max_length=2, buffer=None, penalty=1.0, mask_truncated=True)
    data = iteration([0, 1, 2], [[1], [1, 1], [1, 1]], [1.0, 4.0, 0.5], truncated=(1,))
    table, _ = advantage_table(data, plan(as_they_are, overlong=masked))
    assert lists(table) == [[1.0], [0.0, 0.0], [0.0, 0.5]]


# --- engine and trainer -----------------------------------------------------------------------------------------------


def test_importance_weights_are_a_column_of_their_own_and_change_no_advantage() -> None:
    ratios = [[2.0, 0.5], [1.0, 3.0], [1.5]]
    data = iteration(
        [0, 0, 0],
        [[1, 1], [0, 1], [1]],
        [1.0, 0.0, None],
        rollout=[[-1.0] * len(row) for row in ratios],
        old=[[-1.0 + math.log(each) for each in row] for row in ratios],
    )
    table, summary = advantage_table(data, plan(correction={"importance": Importance(level="token", upper=1.5)}))
    assert table.schema == pa.schema([*ADVANTAGES, ADVANTAGE_EXTRAS.field("is_weights")])
    assert lists(table) == [[0.5, 0.5], [0.0, -0.5], [0.0]]
    assert lists(table, "is_weights") == [pytest.approx([1.5, 0.5]), pytest.approx([0.0, 1.5]), [0.0]]
    assert summary["mismatch/weight_mean"] == pytest.approx((1.5 + 0.5 + 1.5) / 3)
    assert summary["mismatch/above_fraction"] == pytest.approx(2 / 3)


def test_rejection_clears_the_mask_and_leaves_group_statistics_alone() -> None:
    data = iteration(
        [0, 0],
        [[1, 1], [1, 1]],
        [1.0, 0.0],
        rollout=[[-1.0, -1.0], [-1.0, -1.0]],
        old=[[-1.0, -1.0], [-1.0, -1.0 + math.log(5)]],
    )
    correction = {"rejections": [Rejection(kind="sequence", upper=2.0)]}
    table, summary = advantage_table(data, plan(correction=correction))
    assert lists(table) == [[0.5, 0.5], [0.0, 0.0]]
    assert lists(table, "response_mask") == [[1, 1], [0, 0]]
    assert summary["mismatch/sequence_rejected_rows"] == 1.0
    assert summary["mismatch/masked_token_fraction"] == summary["mismatch/masked_row_fraction"] == 0.5


def test_without_a_correction_the_mismatch_is_only_measured() -> None:
    data = iteration([0, 0], [[1, 1], [1]], [1.0, 0.0], rollout=[[-1.0, -1.0], [-1.0]], old=[[-1.5, -2.0], [-1.0]])
    table, summary = advantage_table(data, plan())
    assert table.schema == ADVANTAGES and lists(table, "response_mask") == [[1, 1], [1]]
    assert summary["mismatch/kl"] == pytest.approx(0.5)


@pytest.mark.parametrize("recomputed", [True, False])
@pytest.mark.parametrize("poison", [-math.inf, math.inf, math.nan])
def test_tokens_with_an_infinite_log_prob_of_the_engine_are_dropped_and_counted(
    recomputed: bool, poison: float
) -> None:
    masks = [[1, 1, 1], [1, 0], [1]]
    data = iteration(
        [0, 0, 0],
        masks,
        [1.0, 0.0, None],
        rollout=[[-1.0, poison, -1.0], [-1.0, poison], [poison]],
        old=[[-1.0] * len(mask) for mask in masks] if recomputed else None,
    )
    table, summary = advantage_table(data, plan())
    assert lists(table, "response_mask") == [[1, 0, 1], [1, 0], [0]]
    assert lists(table) == [[0.5, 0.0, 0.5], [-0.5, 0.0], [0.0]]
    assert summary["mismatch/nonfinite_tokens"] == 1.0  # the others do not take part anyway
    assert all(math.isfinite(value) for value in summary.values())


def test_a_batch_that_is_rejected_as_a_whole_is_an_error_that_says_by_what() -> None:
    data = iteration([0, 0], [[1, 1], [1]], [1.0, 0.0], rollout=[[-1.0, -1.0], [-1.0]], old=[[-9.0, -1.0], [-9.0]])
    with pytest.raises(AlgorithmError, match=r"none of the 3 response tokens is left \(veto rejects 2 of 2 rows"):
        advantage_table(data, plan(correction={"veto": 0.01}))


def test_staleness_is_counted_in_policy_versions() -> None:
    data = iteration([0, 0, 1], [[1], [1], [1]], [1.0, 0.0, 0.5], versions=[7, 7, 4])
    _, summary = advantage_table(data, plan(policy_version=8))
    assert (summary["staleness_mean"], summary["staleness_max"]) == (2.0, 4.0)
    assert "staleness_mean" not in advantage_table(data, plan())[1]


# --- what filters left ------------------------------------------------------------------------------------------------


def test_rows_that_the_filters_left_out_belong_to_no_statistic_and_copies_are_passed_on() -> None:
    data = iteration(
        [0, 0, 0, 1, 1], [[1], [1, 1], [1], [1], [1]], [1.0, 0.0, 5.0, 3.0, 2.0], copies=[2, 0, None, 1, None]
    )
    table, summary = advantage_table(data, plan())
    assert table.schema == pa.schema([*ADVANTAGES, ADVANTAGE_EXTRAS.field("copies")])
    # Row 1 was not drawn, but it is a baseline; rows 2 and 4 are not.
    assert lists(table) == [[0.5], [-0.5, -0.5], [0.0], [3.0], [0.0]]
    assert lists(table, "response_mask") == [[1], [1, 1], [0], [1], [0]]
    assert table.column("copies").to_pylist() == [2, 0, 0, 1, 0]
    assert (summary["max"], summary["abs_mean"]) == (3.0, pytest.approx(4 / 3))


def test_rows_that_the_filters_left_out_are_not_compared_with_the_engine() -> None:
    """They are not scored: their log-probs are 0."""
    data = iteration(
        [0, 1], [[1, 1], [1]], [1.0, 2.0], rollout=[[-1.0, -1.0], [-5.0]], old=[[-1.0, -1.0], [0.0]], copies=[1, None]
    )
    table, summary = advantage_table(data, plan(correction={"importance": Importance(level="token", upper=2.0)}))
    assert summary["mismatch/kl"] == 0.0 and summary["mismatch/weight_max"] == 1.0
    assert lists(table, "is_weights") == [[1.0, 1.0], [0.0]]


# --- named components -------------------------------------------------------------------------------------------------


def test_gdpo_reads_the_parts_of_the_reward_by_name() -> None:
    parts = [{"right": 1.0, "form": 0.0}, {"form": 1.0, "right": 0.0}, {"right": 0.0, "form": 3.0, "more": 1.0}]
    data = iteration([0, 0, 0], [[1], [1], [1]], [9.0, 9.0, 9.0], components=parts)
    estimator = ESTIMATORS["gdpo"].bind({"weights": {"right": 1.0, "form": 2.0}}, "test")
    table, _ = advantage_table(data, plan(estimator))
    right = [2 / 3 / math.sqrt(1 / 3), -1 / 3 / math.sqrt(1 / 3), -1 / 3 / math.sqrt(1 / 3)]
    form = [each / math.sqrt(7 / 3) for each in (-4 / 3, -1 / 3, 5 / 3)]
    total = [a + 2 * b for a, b in zip(right, form, strict=True)]
    std = math.sqrt(sum(each**2 for each in total) / 2)  # the sum is 0
    assert [row[0] for row in lists(table)] == pytest.approx([each / std for each in total], rel=1e-4)


def test_parts_of_the_reward_are_read_right_from_a_slice_and_from_several_pieces() -> None:
    parts = [{"b": 9.0}, {"a": 1.0, "b": 0.0}, {"b": 2.0, "a": 0.0}, {"a": 4.0, "b": 1.0}, {"b": 7.0}]
    many = iteration([5, 0, 0, 0, 6], [[1]] * 5, [1.0] * 5, components=parts)
    few = iteration([0, 0, 0], [[1]] * 3, [1.0] * 3, components=parts[1:4])
    estimator = ESTIMATORS["gdpo"].bind({"weights": {"a": 1.0, "b": 0.5}}, "test")
    expected = lists(advantage_table(few, plan(estimator))[0])
    assert len({row[0] for row in expected}) == 3
    piece = many.rewards.slice(1, 3)
    pieces = pa.concat_tables([many.rewards.slice(1, 1), many.rewards.slice(2, 2)])
    for rewards in (piece, pieces):
        rewards = rewards.set_column(0, "rollout_id", few.rollouts.column("rollout_id"))
        assert lists(advantage_table(replace(few, rewards=rewards), plan(estimator))[0]) == expected


def test_a_row_without_a_part_that_counts_is_an_error_unless_it_has_no_reward_at_all() -> None:
    parts = [{"a": 1.0, "b": 0.0}, {}, {"a": 0.0, "b": 1.0}]
    table, _ = advantage_table(iteration([0, 0, 0], [[1]] * 3, [1.0, None, 0.0], components=parts), plan(gdpo))
    assert lists(table, "response_mask") == [[1], [0], [1]]
    with pytest.raises(AlgorithmError, match="1 rows have no component 'a'; the reward function must give it"):
        advantage_table(iteration([0, 0, 0], [[1]] * 3, [1.0, 0.5, 0.0], components=parts), plan(gdpo))
    with pytest.raises(AlgorithmError, match="the reward gives: none"):
        advantage_table(iteration([0, 0], [[1]] * 2, [1.0, 0.0]), plan(gdpo))


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_are_added_by_name_and_see_what_the_estimator_saw() -> None:
    def advantage_of_first(advantages: Tensor, mask: Tensor, valid_tokens: Tensor) -> float:
        return float(advantages[mask][0]) * int(valid_tokens[-1])

    named: list[tuple[str, Callable[..., float]]] = [(name, METRICS[name].function) for name in METRICS.names()]
    data = iteration(
        [0, 0, 0, 1, 1], [[1, 1, 1], [1], [1, 1, 1], [1], [1, 0, 1]], [1.0, 0.0, None, 0.5, 2.0], versions=[0] * 5
    )
    _, summary = advantage_table(data, plan(metrics=[*named, ("own", advantage_of_first)]))
    stds = [math.sqrt(0.5), math.sqrt(1.125)]
    assert {name: value for name, value in summary.items() if name.startswith("metric/")} == {
        "metric/group_std": pytest.approx((2 * stds[0] + 2 * stds[1]) / 4),
        "metric/best_of_group": 1.5,
        "metric/length_of_rewarded": 3.0,  # (3 + 3) / 2 over (1 + 1) / 2
        "metric/own": 1.0,
    }


# --- whatever the batch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [entry.name for entry in ESTIMATORS])
@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 100_000))
def test_nothing_is_ever_nan_and_masked_tokens_are_0(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*probabilities: float) -> int:
        return int(torch.multinomial(torch.tensor(probabilities, dtype=torch.float64), 1, generator=generator))

    def number() -> float:
        return float(torch.randn((), generator=generator))

    groups = [row // 4 for row in range(16)]
    masks = [[int(draw(0.2, 0.8)) for _ in range(1 + draw(*[1.0] * 6))] for _ in groups]

    def tokens(odd: float = 0.0) -> Lists:
        return [[-abs(number()) if draw(odd, 1 - odd) else -math.inf for _ in mask] for mask in masks]

    copies: list[int | None] | None = None
    if draw(1, 1):
        copies = [[None, 0, 1, 2][draw(0.1, 0.2, 0.5, 0.2)] for _ in groups]
    data = iteration(
        groups,
        masks,
        [[None, 0.0, 1.0, 0.1][draw(0.1, 0.4, 0.4, 0.1)] for _ in groups],
        rollout=tokens(odd=0.1),
        old=tokens(),
        ref=tokens(),
        critic=tokens(),
        squares=[[0.3] * len(mask) for mask in masks],
        greedy=[[None, 0.5][draw(0.2, 0.8)] for _ in range(4)],
        copies=copies,
        truncated=tuple(row for row in range(16) if draw(0.8, 0.2)),
        components=[{"a": number(), "b": float(draw(1, 1))} for _ in groups],
        scores=[[number() if draw(1, 1) else math.nan for _ in mask] for mask in masks],
    )
    chosen = plan(
        ESTIMATORS[name].function,
        kl=KlInReward(estimator=k3, coef=0.1, target=0.1),
        overlong=Overlong(max_length=6, buffer=3, penalty=1.0, mask_truncated=bool(draw(1, 1))),
        correction={"importance": Importance(level="token", upper=2.0), "veto": 0.05},
        metrics=[(each.name, each.function) for each in METRICS],
        policy_version=3,
    )
    try:
        table, summary = advantage_table(data, chosen)
    except (AlgorithmError, RewardError):
        reject()  # nothing is left, or a group of one for pass@k: refused, not wrong
    given_mask = torch.tensor([each for mask in masks for each in mask])
    mask = torch.tensor([each for row in lists(table, "response_mask") for each in row])
    assert bool((mask <= given_mask).all())
    for column_name in set(table.column_names) & {"advantages", "returns", "is_weights"}:
        values = torch.tensor([each for row in lists(table, column_name) for each in row])
        assert bool(values.isfinite().all()), column_name
        assert not bool(values[mask == 0].any()), column_name
    assert all(math.isfinite(value) for value in summary.values()), summary
