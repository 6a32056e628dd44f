from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest
from torch import Tensor

from grpo_lib.algorithms.filters import FILTERS
from grpo_lib.algorithms.groupings import GROUPINGS
from grpo_lib.data.iteration import Iteration
from grpo_lib.data.schemas import REWARDS, SELECTION, TOKENS
from grpo_lib.data.selection import Filter, selection_table, what_was_seen

Selected = tuple[list[dict[str, Any]], dict[str, float]]


def iteration(
    values: Sequence[float | None],
    *,
    samples: int = 2,
    lengths: list[int] | None = None,
    truncated: tuple[int, ...] = (),
    sources: list[str] | None = None,
) -> Iteration:
    """Prompts one after another, ``samples`` rows each."""
    rows, prompts = len(values), len(values) // samples
    ids = [f"0-{row // samples}-{row % samples}" for row in range(rows)]
    rollouts = {
        "rollout_id": ids,
        "prompt_row": pa.array([row // samples for row in range(rows)], pa.int32()),
        "response_ids": pa.array([[7] * length for length in lengths or [1] * rows], TOKENS),
        "finish_reason": ["length" if row in truncated else "stop" for row in range(rows)],
    }
    rewards = {
        "rollout_id": ids,
        "value": pa.array(values, pa.float64()),
        "reason": pa.array([None if value is not None else "timeout" for value in values], pa.string()),
        "components": pa.array([[] for _ in values], REWARDS.field("components").type),
    }
    return Iteration(
        prompts=pa.table(
            {"dataset_row": pa.array(range(prompts), pa.int64()), "data_source": sources or ["toy"] * prompts}
        ),
        rollouts=pa.table(rollouts),
        rewards=pa.table(rewards, schema=REWARDS),
    )


def built_in(name: str, **options: object) -> Filter:
    return Filter(
        name=name,
        function=FILTERS[name].bind(options, "test"),
        resamples=bool(FILTERS[name].traits.get("resamples")),
    )


def own(name: str, function: Callable[..., Tensor], resamples: bool = False) -> Filter:
    return Filter(name=name, function=function, resamples=resamples)


def select(data: Iteration, *filters: Filter, wanted: int, seed: int = 0, grouping: str = "prompt") -> Selected:
    table, summary = selection_table(data, filters, GROUPINGS[grouping], prompts_wanted=wanted, seed=seed)
    assert table.schema == SELECTION
    assert table.column("rollout_id").equals(data.rollouts.column("rollout_id"))
    return table.to_pylist(), summary


def column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


DYNAMIC = built_in("dynamic_sampling")
MIXED = [1.0, 0.0, 1.0, 1.0, 0.0, 0.5, 0.0, 0.0]
"""Four prompts; the second and the last have equal rewards."""


# --- is the batch full? -----------------------------------------------------------------------------------------------


def test_groups_of_equal_rewards_are_dropped_and_the_batch_is_just_full() -> None:
    rows, summary = select(iteration(MIXED), DYNAMIC, wanted=2)
    assert column(rows, "used") == [True, True, False, False, True, True, False, False]
    assert column(rows, "copies") == [1, 1, 0, 0, 1, 1, 0, 0]
    gone = "dynamic_sampling"
    assert column(rows, "reason") == [None, None, gone, gone, None, None, gone, gone]
    assert summary == {"prompts_kept": 2.0, "prompts_drawn": 4.0, "full": 1.0, "rows_used_fraction": 0.5}


def test_a_batch_that_is_not_full_says_how_many_prompts_are_left() -> None:
    rows, summary = select(iteration(MIXED), DYNAMIC, wanted=3)
    assert column(rows, "used") == [True, True, False, False, True, True, False, False]
    assert (summary["full"], summary["prompts_kept"], summary["prompts_drawn"]) == (0.0, 2.0, 4.0)


def test_of_a_batch_that_is_more_than_full_the_last_prompts_are_cut() -> None:
    values = [1.0, 1.0, 1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 1.0, 0.5, 0.0, 1.0]
    rows, summary = select(iteration(values), DYNAMIC, wanted=2)
    assert column(rows, "used") == [False, False, True, True, True, True] + [False] * 6
    reasons = ["dynamic_sampling", "batch full"]
    assert column(rows, "reason") == [reasons[0]] * 2 + [None] * 4 + [reasons[0]] * 2 + [reasons[1]] * 4
    assert summary == {
        "prompts_kept": 4.0,  # before the cut
        "prompts_drawn": 6.0,
        "full": 1.0,
        "rows_used_fraction": pytest.approx(1 / 3),
    }


def test_without_anything_to_drop_the_first_prompts_make_the_batch() -> None:
    rows, summary = select(iteration([0.0] * 6), built_in("pf_ppo"), wanted=2)
    assert column(rows, "used") == [True] * 4 + [False] * 2
    assert column(rows, "reason") == [None] * 4 + ["batch full"] * 2
    assert summary["full"] == 1.0


def test_a_batch_of_which_nothing_is_left_is_not_full() -> None:
    rows, summary = select(iteration([1.0, 1.0, None, None]), DYNAMIC, DYNAMIC, wanted=1)
    assert column(rows, "used") == [False] * 4
    assert (summary["full"], summary["prompts_kept"], summary["rows_used_fraction"]) == (0.0, 0.0, 0.0)


# --- rewards that could not be computed -------------------------------------------------------------------------------


def test_rows_without_reward_are_not_seen_by_a_filter() -> None:
    # The first group is left with one reward: all its rewards are equal. The second varies among the other two.
    rows, summary = select(iteration([1.0, None, None, 1.0, None, 0.0], samples=3), DYNAMIC, wanted=1)
    assert column(rows, "reason") == ["dynamic_sampling", "no reward", "no reward", None, "no reward", None]
    assert column(rows, "used") == [False, False, False, True, False, True]
    assert summary["prompts_kept"] == 1.0


def test_a_prompt_without_any_reward_is_not_part_of_the_batch() -> None:
    rows, summary = select(iteration([None, None, 1.0, None, 0.0, 1.0]), built_in("pf_ppo"), wanted=2)
    assert (summary["prompts_kept"], summary["full"]) == (2.0, 1.0)
    assert column(rows, "used") == [False, False, True, False, True, True]


# --- several filters --------------------------------------------------------------------------------------------------


def best_of_batch(rewards: Tensor) -> Tensor:
    """Rows of the highest reward of all that are left."""
    return (rewards == rewards.max()).long()


def test_a_filter_sees_what_the_one_before_it_left() -> None:
    data = iteration([1.0, 0.0, 2.0, 2.0])
    best = own("best", best_of_batch)
    first, _ = select(data, DYNAMIC, best, wanted=1)
    assert column(first, "reason") == [None, "best", "dynamic_sampling", "dynamic_sampling"]
    turned, summary = select(data, best, DYNAMIC, wanted=1)
    assert column(turned, "reason") == ["best", "best", "dynamic_sampling", "dynamic_sampling"]
    assert summary["full"] == 0.0


def test_a_filter_gets_the_columns_that_it_names_and_a_seed_of_its_own() -> None:
    seen: list[list[list[float]]] = []
    seeds: list[int] = []

    def curious(group_ids: Tensor, lengths: Tensor, truncated: Tensor, rewards: Tensor, seed: int) -> Tensor:
        seen.append([each.tolist() for each in (group_ids, lengths, truncated, rewards)])
        seeds.append(seed)
        return rewards > 0  # a mask will do

    data = iteration([1.0, None, 3.0, 4.0], lengths=[5, 6, 7, 8], truncated=(2,), sources=["easy", "hard"])
    for seed in (0, 0, 1):
        rows, _ = select(data, own("curious", curious), own("curious", curious), wanted=2, seed=seed)
        assert column(rows, "copies") == [1, 0, 1, 1]
    assert seen == [[[0, 1, 1], [5, 7, 8], [False, True, False], [1.0, 3.0, 4.0]]] * 6
    assert seeds[:2] == seeds[2:4] and len(set(seeds)) == 4  # of the run's seed and the filter's place


def test_groups_are_those_of_the_grouping() -> None:
    data = iteration([1.0, 1.0, 0.0, 0.0, 1.0, 1.0], sources=["a", "a", "b"])
    rows, summary = select(data, DYNAMIC, wanted=2, grouping="data_source")
    assert column(rows, "used") == [True] * 4 + [False] * 2
    assert summary["prompts_kept"] == 2.0


# --- resampling -------------------------------------------------------------------------------------------------------


def test_resampling_says_how_often_a_row_is_learnt_from_and_not_which_rows_belong_to_the_iteration() -> None:
    rows, summary = select(iteration([0.0, 1.0, 0.0, 3.0]), built_in("pf_ppo", power=100.0), wanted=2)
    assert column(rows, "copies") == [0, 0, 0, 4]  # 3^100 to 1
    assert column(rows, "used") == [True] * 4
    assert column(rows, "reason") == ["pf_ppo"] * 3 + [None]
    assert summary["rows_used_fraction"] == 1.0


def test_resampling_comes_last_and_draws_as_many_rows_as_are_left() -> None:
    values = [2.0, 2.0, 1.0, 0.0, 0.0, 9.0, 0.0, 5.0]
    for filters in ([built_in("pf_ppo", power=100.0), DYNAMIC], [DYNAMIC, built_in("pf_ppo", power=100.0)]):
        rows, _ = select(iteration(values), *filters, wanted=2)
        assert column(rows, "used") == [False, False, True, True, True, True, False, False]
        assert column(rows, "copies") == [0, 0, 0, 0, 0, 4, 0, 0]  # not the prompt that was cut
        assert column(rows, "reason")[-2:] == ["batch full"] * 2


def test_as_long_as_the_batch_is_not_full_nothing_is_drawn() -> None:
    rows, summary = select(iteration([0.0, 1.0, 0.0, 3.0]), built_in("pf_ppo", power=100.0), wanted=3)
    assert summary["full"] == 0.0
    assert column(rows, "copies") == [1] * 4 and column(rows, "used") == [True] * 4


def test_draws_follow_from_the_seed() -> None:
    data = iteration([0.3, 0.9, 0.4, 0.7, 0.2, 0.8])

    def copies(seed: int) -> tuple[int, ...]:
        return tuple(column(select(data, built_in("pf_ppo"), wanted=3, seed=seed)[0], "copies"))

    assert copies(4) == copies(4)
    assert len({copies(seed) for seed in range(20)}) > 1


# --- for the error of a batch that is not full ------------------------------------------------------------------------


def test_what_was_seen_names_filters_and_the_rewards_of_equal_groups() -> None:
    data = iteration([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.5, 0.1, 0.1, None, None])
    table, _ = selection_table(data, [DYNAMIC], GROUPINGS["prompt"], prompts_wanted=4, seed=0)
    assert what_was_seen(data, table) == (
        "dropped: 8 rows by 'dynamic_sampling', 2 rows by 'no reward'; "
        "prompts with equal rewards: 2 with every reward 0, 1 with every reward 1, 1 with every reward 0.1"
    )


def test_what_was_seen_of_a_batch_of_which_nothing_was_dropped() -> None:
    data = iteration([1.0, 0.0])
    table, _ = selection_table(data, [DYNAMIC], GROUPINGS["prompt"], prompts_wanted=4, seed=0)
    assert what_was_seen(data, table) == "dropped: nothing; prompts with equal rewards: none"


def test_what_was_seen_of_a_batch_without_any_reward() -> None:
    data = iteration([None, None])
    table, _ = selection_table(data, [DYNAMIC], GROUPINGS["prompt"], prompts_wanted=1, seed=0)
    assert what_was_seen(data, table) == "dropped: 2 rows by 'no reward'; prompts with equal rewards: none"
