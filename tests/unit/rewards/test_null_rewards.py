"""Rows whose reward is null: the others' advantages are as if these had never been generated, and they get no loss."""

import math
from typing import Any

import pyarrow as pa
import pytest

from grpo_lib.algorithms.advantages import ADVANTAGES as ESTIMATORS
from grpo_lib.algorithms.groupings import GROUPINGS
from grpo_lib.data.advantages import AdvantagePlan, Overlong, advantage_table
from grpo_lib.data.iteration import Iteration
from grpo_lib.data.schemas import FLOATS, MASK, REWARDS, TOKENS
from grpo_lib.errors import AlgorithmError, RewardError
from grpo_lib.rewards.judges import own_reward
from grpo_lib.rewards.scoring import reward_table
from grpo_lib.types import RewardResult, Sample

Row = tuple[int, int, float | None]
"""Group, tokens, reward."""

# Of the first group one row of four is null, of the second all but one, of the third all, of the last none.
ROWS: list[Row] = [
    (0, 2, 1.0),
    (0, 1, None),
    (0, 3, 0.0),
    (0, 1, 0.5),
    (1, 1, None),
    (1, 1, 2.0),
    (1, 2, None),
    (2, 1, None),
    (2, 1, None),
    (3, 1, 1.0),
    (3, 2, 0.0),
]
VALID = [row for row in ROWS if row[2] is not None]


def tables(rows: list[Row]) -> tuple[pa.Table, pa.Table]:
    """Prompts and rollouts."""
    groups = sorted({group for group, _, _ in rows})
    count = len(groups)
    prompts = {
        "dataset_row": pa.array(range(count), pa.int64()),
        "data_source": ["toy"] * count,
        "prompt_id": [f"p{group}" for group in groups],
        "prompt": ["p"] * count,
        "reference": ["r"] * count,
    }
    rollouts = {
        "rollout_id": [f"0-{group}-{place}" for place, (group, _, _) in enumerate(rows)],
        "prompt_row": pa.array([groups.index(group) for group, _, _ in rows], pa.int32()),
        "group_id": pa.array([group for group, _, _ in rows], pa.int64()),
        "response_ids": pa.array([[7] * tokens for _, tokens, _ in rows], TOKENS),
        "response_mask": pa.array([[1] * tokens for _, tokens, _ in rows], MASK),
        "rollout_logprobs": pa.array([[-1.0] * tokens for _, tokens, _ in rows], FLOATS),
        "finish_reason": ["stop"] * len(rows),
        "policy_version": pa.array([0] * len(rows), pa.int32()),
        "text": ["nothing" if value is None else str(value) for _, _, value in rows],
    }
    return pa.table(prompts), pa.table(rollouts)


def iteration(rows: list[Row]) -> Iteration:
    """With rewards whose components and token scores are null, too, where the value is."""
    prompts, rollouts = tables(rows)
    values = [value for _, _, value in rows]
    parts = [[] if value is None else [("a", value), ("b", 1.0 - value)] for value in values]
    columns = {
        "rollout_id": rollouts.column("rollout_id"),
        "value": pa.array(values, pa.float64()),
        "reason": pa.array(["ValueError: no" if value is None else None for value in values], pa.string()),
        "components": pa.array(parts, REWARDS.field("components").type),
    }
    rewards = pa.table(columns, schema=REWARDS)
    assert rewards.column("value").null_count == values.count(None)
    steps = [[math.nan] * (tokens - 1) + [math.nan if value is None else value] for _, tokens, value in rows]
    rewards = rewards.append_column("token_scores", pa.array(steps, FLOATS))
    return Iteration(prompts=prompts, rollouts=rollouts, rewards=rewards)


def without_steps(data: Iteration) -> Iteration:
    return Iteration(prompts=data.prompts, rollouts=data.rollouts, rewards=data.rewards.drop_columns(["token_scores"]))


def plan(name: str, **options: object) -> AdvantagePlan:
    return AdvantagePlan(
        estimator=ESTIMATORS[name].bind(options, "algorithm.advantage_options"),
        grouping=GROUPINGS["prompt"],
        correction={},
        overlong=Overlong(max_length=100, buffer=None, penalty=1.0, mask_truncated=False),
    )


def advantages(rows: list[Row], name: str, **options: object) -> list[list[float]]:
    table, _ = advantage_table(without_steps(iteration(rows)), plan(name, **options))
    return table.column("advantages").to_pylist()


def of_rows(first: float, third: float, fourth: float, alone: float, better: float, worse: float) -> list[Any]:
    """The rows that have a reward with their advantage at each token; the others with zeros."""
    return [
        *([first] * 2, [0.0], [third] * 3, [fourth]),
        *([0.0], [alone], [0.0] * 2),
        *([0.0], [0.0]),
        *([better], [worse] * 2),
    ]


def near(expected: list[list[float]]) -> list[Any]:
    return [pytest.approx(row, abs=1e-6) for row in expected]


# Numbers by hand

# GRPO: 1, 0, 0.5 have mean 0.5 and standard deviation 0.5; 1, 0 have 0.5 and 0.707107; of one row it is 0 and 1.
#     0.5 / 0.500001 = 0.999998 and 0.5 / 0.707108 = 0.707106
# RLOO: 1 - 0.25, 0 - 0.75, 0.5 - 0.5; 1 - 0 and 0 - 1; of one row there is nothing to leave out
# OPO: (2 * 1 + 3 * 0 + 1 * 0.5) / 6 = 5/12 and (1 * 1 + 2 * 0) / 3 = 1/3
# GPG: six rows have a reward and four of them one that is not 0: 1.5 times R - mean
# REINFORCE++: the tokens have 1, 1, 0, 0, 0, 0.5, 2, 1, 0, 0: mean 0.55, variance (7.25 - 3.025) / 9 = 0.469444,
#     standard deviation 0.685160
# REINFORCE++ with a baseline: 0.5 (twice), -0.5 (3 times), 0, 2, 0.5, -0.5 (twice): mean 0.1, variance
#     (6 - 0.1) / 9 = 0.655556, standard deviation 0.809664
BY_HAND = {
    "grpo": of_rows(0.999998, -0.999998, 0.0, 1.999998, 0.7071058, -0.7071058),
    "dr_grpo": of_rows(0.5, -0.5, 0.0, 2.0, 0.5, -0.5),
    "rloo": of_rows(0.75, -0.75, 0.0, 2.0, 1.0, -1.0),
    "opo": of_rows(7 / 12, -5 / 12, 1 / 12, 2.0, 2 / 3, -1 / 3),
    "gpg": of_rows(0.75, -0.75, 0.0, 3.0, 0.75, -0.75),
    "reinforce_plus_plus": of_rows(0.6567807, -0.8027319, -0.0729756, 2.1162933, 0.6567807, -0.8027319),
    "reinforce_plus_plus_baseline": of_rows(0.4940322, -0.7410483, -0.1235081, 2.3466530, 0.4940322, -0.7410483),
}
MASK_BY_HAND = [[1, 1], [0], [1, 1, 1], [1], [0], [1], [0, 0], [0], [0], [1], [1, 1]]


@pytest.mark.parametrize("name", BY_HAND)
def test_null_rows_leave_the_statistics_and_the_loss(name: str) -> None:
    table, summary = advantage_table(without_steps(iteration(ROWS)), plan(name))
    assert table.column("advantages").to_pylist() == near(BY_HAND[name])
    assert table.column("response_mask").to_pylist() == MASK_BY_HAND
    assert table.column("rollout_id").to_pylist()[5] == "0-1-5"
    assert summary["rows_without_reward"] == 5.0


@pytest.mark.parametrize("name", [*BY_HAND, "grpo_process", "gdpo"])
def test_the_others_are_as_if_null_rows_had_never_been_generated(name: str) -> None:
    with_nulls, _ = advantage_table(iteration(ROWS), plan(name))
    without, _ = advantage_table(iteration(VALID), plan(name))
    kept = [row for row, (_, _, value) in enumerate(ROWS) if value is not None]
    assert with_nulls.take(pa.array(kept)).column("advantages").to_pylist() == near(
        without.column("advantages").to_pylist()
    )


def test_a_null_is_not_a_0() -> None:
    zeros: list[Row] = [(group, tokens, value or 0.0) for group, tokens, value in ROWS]
    for name in BY_HAND:
        assert advantages(zeros, name) != near(BY_HAND[name]), name


# Groups that nulls leave small


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", 0.4999995),
        ("dr_grpo", 0.5),
        ("rloo", 0.5),
        ("opo", 0.5),
        ("gpg", 0.5),
        ("reinforce_plus_plus", 0.0),
        ("reinforce_plus_plus_baseline", 0.0),
    ],
)
def test_a_row_that_is_left_alone_has_no_baseline(name: str, expected: float) -> None:
    found = advantages([(0, 1, None), (0, 2, 0.5), (0, 1, None)], name)
    assert found == near([[0.0], [expected] * 2, [0.0]])


@pytest.mark.parametrize("name", BY_HAND)
def test_rewards_that_are_equal_but_for_nulls_have_no_signal(name: str) -> None:
    found = advantages([(0, 1, 0.7), (0, 2, None), (0, 1, 0.7)], name)
    assert found == [[0.0], [0.0, 0.0], [0.0]]


@pytest.mark.parametrize("name", BY_HAND)
def test_an_iteration_of_nulls_stops_with_the_reason(name: str) -> None:
    with pytest.raises(RewardError, match="none of the 2 rewards of the iteration could be computed"):
        advantages([(0, 1, None), (1, 1, None)], name)


def test_an_estimator_that_needs_two_rows_says_what_nulls_left() -> None:
    with pytest.raises(AlgorithmError, match=r"1 groups hold one row with a reward.*what makes rewards fail"):
        advantages([(0, 1, None), (0, 1, 1.0), (1, 1, 1.0), (1, 1, 0.0)], "grpo_passk")
    found = advantages([(0, 1, None), (0, 1, 1.0), (0, 1, 0.0)], "grpo_passk")
    assert found == near([[0.0], [1.4142116], [0.0]])  # (1 - 0) / 0.7071078


# From the function to the advantage


def test_a_function_that_fails_costs_its_own_rows_alone() -> None:
    def judge(sample: Sample) -> RewardResult:
        return RewardResult(value=float(sample.response), components={"correct": 1.0})  # fails on "nothing"

    prompts, rollouts = tables(ROWS)
    rewards, _ = reward_table(prompts, rollouts, own_reward(judge))
    assert rewards.column("value").to_pylist() == [value for _, _, value in ROWS]
    assert set(rewards.column("reason").to_pylist()) == {
        None,
        "ValueError: could not convert string to float: 'nothing'",
    }
    table, _ = advantage_table(Iteration(prompts=prompts, rollouts=rollouts, rewards=rewards), plan("grpo"))
    assert table.column("advantages").to_pylist() == near(BY_HAND["grpo"])
    assert table.column("response_mask").to_pylist() == MASK_BY_HAND
