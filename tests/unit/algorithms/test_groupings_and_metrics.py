from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_lib.algorithms.groupings import GROUPINGS, by_data_source, by_prompt
from grpo_lib.algorithms.metrics import METRICS, best_of_group, group_std, length_of_rewarded
from grpo_lib.algorithms.registry import call
from grpo_lib.data.ragged import repeat_rows

# Rows of a group apart from each other, and names with gaps.
REWARDS = torch.tensor([1.0, 2.0, 0.0, 2.0, -5.0], dtype=torch.float64)
GROUP_IDS = torch.tensor([4, -1, 4, -1, 1000])


def test_prompts_that_an_iteration_holds_twice_are_two_groups() -> None:
    ids = by_prompt(np.array([8, 3, 8], dtype=np.int64))
    assert (ids.tolist(), ids.dtype) == ([0, 1, 2], np.int64)


def test_prompts_of_the_same_source_are_one_group() -> None:
    ids = by_data_source(np.array(["gsm8k", "countdown", "gsm8k", "math"]))
    assert ids.dtype == np.int64
    assert ids[0] == ids[2] and len({int(ids[0]), int(ids[1]), int(ids[3])}) == 3


@pytest.mark.parametrize("name", [entry.name for entry in GROUPINGS])
def test_groupings_give_every_prompt_an_integer(name: str) -> None:
    prompts = SimpleNamespace(
        prompt_id=np.array(["a", "b", "c"]),
        prompt=np.array(["1+1", "2+2", "1+1"]),
        reference=np.array(["2", "4", "2"]),
        data_source=np.array(["x", "y", "x"]),
        dataset_row=np.array([5, 6, 5], dtype=np.int64),
        epoch=np.array([0, 0, 1], dtype=np.int32),
    )
    ids = call(GROUPINGS[name].bind({}, "algorithm.grouping"), prompts)
    assert (ids.shape, ids.dtype) == ((3,), np.int64)


def test_no_prompts_are_no_groups() -> None:
    assert by_prompt(np.array([], dtype=np.int64)).tolist() == []
    assert by_data_source(np.array([], dtype=np.str_)).tolist() == []


def test_group_std_is_the_mean_over_rows() -> None:
    # sqrt(0.5) at two rows of group 4, 0 at two equal ones and at a group of one
    assert group_std(REWARDS, GROUP_IDS) == pytest.approx(2 * 0.5**0.5 / 5, rel=1e-12)


def test_best_of_group_is_the_mean_over_groups() -> None:
    assert best_of_group(REWARDS, GROUP_IDS) == (1 + 2 - 5) / 3


def test_best_of_group_does_not_count_gaps_between_the_names_of_groups() -> None:
    assert best_of_group(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 2, 5])) == 3.0


def test_length_of_rewarded_compares_rows_above_the_mean_of_their_group_with_the_others() -> None:
    # Above: rows 0 (1 > 0.5) of 12 tokens. Others: 6, 2, 4 and 4 tokens, on average 4.
    assert length_of_rewarded(REWARDS, GROUP_IDS, torch.tensor([12, 6, 2, 4, 4])) == 3.0


@pytest.mark.parametrize("reward", [0.1, 0.2, 0.3, 0.7])
@pytest.mark.parametrize("size", [3, 6, 8, 11])
def test_equal_rewards_are_not_above_their_mean_for_its_rounding(reward: float, size: int) -> None:
    rewards = torch.tensor([1.0, 0.0] + [reward] * size, dtype=torch.float64)
    group_ids = torch.tensor([0, 0] + [1] * size)
    # Above is the first row only, of 8 tokens; the others have 2 each.
    assert length_of_rewarded(rewards, group_ids, torch.tensor([8, 2] + [2] * size)) == 4.0


@pytest.mark.parametrize("rewards", [[0.0, 0.0, 0.0], [0.1, 0.1, 0.1], [0.7, 0.7, 0.7]])
def test_length_of_rewarded_is_1_where_no_row_is_above_its_group(rewards: list[float]) -> None:
    assert length_of_rewarded(torch.tensor(rewards), torch.tensor([0, 0, 0]), torch.tensor([1, 2, 3])) == 1.0


def test_length_of_rewarded_stays_finite_beside_empty_responses() -> None:
    assert length_of_rewarded(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([5, 0])) == 5.0


@pytest.mark.parametrize("name", [entry.name for entry in METRICS])
def test_metrics_are_one_finite_number(name: str) -> None:
    lengths = torch.tensor([2, 1, 3, 1, 1])
    offsets = torch.tensor([0, 2, 3, 6, 7, 8])
    columns: dict[str, Tensor] = {
        "rewards": REWARDS,
        "group_ids": GROUP_IDS,
        "lengths": lengths,
        "valid_tokens": lengths,
        "advantages": repeat_rows(REWARDS.float(), offsets),
        "mask": torch.ones(8, dtype=torch.bool),
        "offsets": offsets,
    }
    value = call(METRICS[name].bind({}, "algorithm.metrics"), SimpleNamespace(**columns))
    assert isinstance(value, float) and np.isfinite(value)
