import math

import pyarrow as pa
import pytest

from grpo_lib.algorithms.advantages import dr_grpo, grpo
from grpo_lib.data.advantages import advantage_table
from grpo_lib.data.schemas import ADVANTAGES, MASK, REWARDS
from grpo_lib.errors import DataError, RewardError

GROUPS = [0, 0, 0, 1, 1, 2, 2]
MASKS = [[1, 1], [1], [1, 0, 1], [1], [1, 1], [1], [1, 1]]


def rollouts(groups: list[int], masks: list[list[int]]) -> pa.Table:
    ids = [f"0-{group}-{row}" for row, group in enumerate(groups)]
    columns = {"rollout_id": ids, "group_id": pa.array(groups, pa.int64()), "response_mask": pa.array(masks, MASK)}
    return pa.table(columns)


def rewards(table: pa.Table, values: list[float | None]) -> pa.Table:
    columns = {
        "rollout_id": table.column("rollout_id"),
        "value": pa.array(values, pa.float64()),
        "reason": pa.array([None if value is not None else "timeout" for value in values], pa.string()),
        "components": pa.array([[] for _ in values], REWARDS.field("components").type),
    }
    return pa.table(columns, schema=REWARDS)


def test_every_valid_token_of_a_response_gets_its_advantage() -> None:
    made = rollouts(GROUPS, MASKS)
    table, summary = advantage_table(made, rewards(made, [1.0, 0.0, 0.5, 1.0, 0.0, 0.25, 0.25]), dr_grpo)
    assert table.schema == ADVANTAGES
    assert table.column("rollout_id").to_pylist() == made.column("rollout_id").to_pylist()
    expected = [[0.5, 0.5], [-0.5], [0.0, 0.0, 0.0], [0.5], [-0.5, -0.5], [0.0], [0.0, 0.0]]
    assert table.column("advantages").to_pylist() == expected
    assert table.column("response_mask").to_pylist() == MASKS
    assert summary == {
        "abs_mean": pytest.approx(2.0 / 7),
        "min": -0.5,
        "max": 0.5,
        "rows_without_signal_fraction": pytest.approx(2 / 7),  # the third row is 0 in a group that has signal
        "rows_without_reward": 0.0,
    }


def test_a_masked_token_has_advantage_0() -> None:
    made = rollouts([0, 0], [[1, 0, 1], [0, 1]])
    table, _ = advantage_table(made, rewards(made, [1.0, 0.0]), dr_grpo)
    assert table.column("advantages").to_pylist() == [[0.5, 0.0, 0.5], [0.0, -0.5]]


def test_a_row_without_reward_belongs_to_no_statistic_and_its_mask_is_cleared() -> None:
    made = rollouts(GROUPS, MASKS)
    table, summary = advantage_table(made, rewards(made, [1.0, None, 0.5, 1.0, 0.0, None, 0.75]), dr_grpo)
    # Group 0 has mean 0.75 of two rewards; group 2 is left with one row, whose baseline is 0.
    expected = [[0.25, 0.25], [0.0], [-0.25, 0.0, -0.25], [0.5], [-0.5, -0.5], [0.0], [0.75, 0.75]]
    assert table.column("advantages").to_pylist() == expected
    assert table.column("response_mask").to_pylist() == [[1, 1], [0], [1, 0, 1], [1], [1, 1], [0], [1, 1]]
    assert summary == {
        "abs_mean": pytest.approx((0.25 + 0.25 + 0.5 + 0.5 + 0.75) / 5),  # over the five rows that have a reward
        "min": -0.5,
        "max": 0.75,
        "rows_without_signal_fraction": 0.0,
        "rows_without_reward": 2.0,
    }


def test_a_null_reward_is_not_a_reward_of_0() -> None:
    made = rollouts([0, 0, 0], [[1], [1], [1]])
    with_null, _ = advantage_table(made, rewards(made, [1.0, None, 0.5]), grpo)
    with_zero, _ = advantage_table(made, rewards(made, [1.0, 0.0, 0.5]), grpo)
    std = math.sqrt(0.125)
    assert with_null.column("advantages").to_pylist() == [
        [pytest.approx(0.25 / std, rel=1e-5)],
        [0.0],
        [pytest.approx(-0.25 / std, rel=1e-5)],
    ]
    assert with_zero.column("advantages").to_pylist() == [
        [pytest.approx(1.0, rel=1e-5)],
        [pytest.approx(-1.0, rel=1e-5)],
        [0.0],
    ]


def test_statistics_of_positive_advantages_are_not_pulled_to_0_by_rows_without_reward() -> None:
    made = rollouts([0, 1], [[1], [1]])
    _, summary = advantage_table(made, rewards(made, [2.0, None]), dr_grpo)
    assert (summary["min"], summary["max"], summary["abs_mean"]) == (2.0, 2.0, 2.0)


def test_it_is_an_error_when_no_reward_could_be_computed() -> None:
    made = rollouts([0, 0], [[1], [1]])
    with pytest.raises(RewardError, match="none of the 2 rewards of the iteration could be computed"):
        advantage_table(made, rewards(made, [None, None]), grpo)


def test_rewards_of_other_rollouts_are_refused() -> None:
    made = rollouts([0, 0], [[1], [1]])
    with pytest.raises(DataError, match="reward: the rows do not belong"):
        advantage_table(made, rewards(made, [1.0, 0.0]).take(pa.array([1, 0])), grpo)


def test_shards_in_several_pieces_and_group_ids_in_any_order_are_read_right() -> None:
    made = rollouts([7, 3, 7, 3], [[1], [1, 1], [1], [1]])
    scored = rewards(made, [1.0, 4.0, 3.0, 0.0])
    pieces = [pa.concat_tables([table.slice(0, 1), table.slice(1)]) for table in (made, scored)]
    table, _ = advantage_table(pieces[0], pieces[1], dr_grpo)
    assert table.column("advantages").to_pylist() == [[-1.0], [2.0, 2.0], [1.0], [-2.0]]
