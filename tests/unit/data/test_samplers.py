"""Curricula: what is learned of prompts, and which come next."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from grpo_lib.config_rollout import SamplerConfig
from grpo_lib.data.prompts import stand_in
from grpo_lib.data.samplers import (
    PassRate,
    draw,
    effective_fraction,
    make_sampler,
    outcomes_of,
    sampler_digests,
    sampler_weights,
)
from grpo_lib.data.schemas import DATASET, REWARDS
from grpo_lib.errors import ConfigError, DataError

TRAIN = pa.table({"prompt_id": ["a", "b", "c", "d"]})
OWN = """
import numpy as np

class Hardest:
    def __init__(self, *, least=1):
        self.least = least

    def weights(self, state, prompts):
        return np.full(prompts.num_rows, float(self.least))

    def learn(self, state, outcomes):
        return outcomes
"""


def outcomes(rows: list[int], rewards: list[float], correct: list[float | None]) -> pa.Table:
    return pa.table({"dataset_row": rows, "reward": rewards, "correct": pa.array(correct, pa.float64())})


def test_pass_rates_are_mixed_with_what_was_known() -> None:
    sampler = PassRate(memory=0.75)
    state = sampler.learn(None, outcomes([3, 3, 1, 1], [1, 1, 9, 9], [1.0, 0.0, 0.0, 0.0]))
    assert state.to_pydict() == {"dataset_row": [1, 3], "pass_rate": [0.0, 0.5]}
    state = sampler.learn(state, outcomes([0, 3], [1, 1], [1.0, 1.0]))
    assert state.to_pydict() == {"dataset_row": [0, 1, 3], "pass_rate": [1.0, 0.0, 0.75 * 0.5 + 0.25]}


def test_without_correct_a_reward_is_a_pass_from_the_bound_on() -> None:
    state = PassRate(passes=2.0).learn(None, outcomes([5, 5, 5, 5], [2.0, 1.9, 0.0, 3.0], [None, None, None, None]))
    assert state.to_pydict() == {"dataset_row": [5], "pass_rate": [0.5]}


def test_prompts_weigh_most_where_they_are_sometimes_solved_or_unknown() -> None:
    state = pa.table({"dataset_row": [0, 2, 3], "pass_rate": [0.0, 0.5, 0.9]})
    weights = PassRate(floor=0.2).weights(state, TRAIN)
    np.testing.assert_allclose(weights, [0.2, 1.0, 1.0, 0.2 + 0.8 * 0.36])
    np.testing.assert_array_equal(PassRate().weights(None, TRAIN), np.ones(4))


def test_outcomes_are_of_responses_with_a_reward() -> None:
    prompts = pa.table({"dataset_row": pa.array([7, 4], pa.int64())})
    ids = ["x", "y", "z"]
    rollouts = pa.table({"rollout_id": ids, "prompt_row": pa.array([0, 0, 1], pa.int32())})
    rewards = pa.table(
        {
            "rollout_id": ids,
            "value": [0.5, None, 1.5],
            "reason": [None, "broke", None],
            "components": [[("correct", 0.0)], [], [("other", 2.0)]],
        },
        schema=REWARDS,
    )
    expected = {"dataset_row": [7, 4], "reward": [0.5, 1.5], "correct": [0.0, None]}
    assert outcomes_of(prompts, rollouts, rewards).to_pydict() == expected


def test_a_draw_never_repeats_and_its_batches_follow_each_other() -> None:
    weights = np.random.default_rng(0).random(50)
    weights[::5] = 0
    whole = draw(weights, first=0, count=40, seed=3)
    assert sorted(whole) == np.flatnonzero(weights).tolist()
    parts = [draw(weights, first=first, count=10, seed=3) for first in (0, 10, 20, 30)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(draw(weights, first=0, count=40, seed=4), whole)


def test_prompts_are_drawn_in_proportion_to_their_weights() -> None:
    firsts = [draw(np.array([1.0, 2.0, 5.0]), first=0, count=1, seed=seed)[0] for seed in range(4000)]
    np.testing.assert_allclose(np.bincount(firsts) / 4000, [1 / 8, 2 / 8, 5 / 8], atol=0.03)


def test_too_few_prompts_above_zero_are_an_error() -> None:
    with pytest.raises(DataError, match="gives 1 prompts a weight above 0, and 2 are asked for"):
        draw(np.array([0.0, 1.0]), first=0, count=2, seed=0)


def test_how_many_prompts_are_chosen_from() -> None:
    assert effective_fraction(np.ones(8)) == 1.0
    assert effective_fraction(np.array([1.0, 0.0, 0.0, 0.0])) == 0.25
    assert effective_fraction(np.array([3.0, 1.0])) == 16 / 20


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1.0, 1.0], r"gave \(2,\) numbers for 4 prompts"),
        ([1.0, -1.0, 1.0, 1.0], "gave prompt 'b' -1.0; a weight is finite, 0 or more"),
        ([1.0, 1.0, float("nan"), 1.0], "gave prompt 'c' nan"),
    ],
)
def test_weights_that_are_none_are_refused(weights: list[float], said: str) -> None:
    class Wrong(PassRate):
        def weights(self, state: pa.Table | None, prompts: pa.Table) -> np.ndarray:
            return np.array(weights)

    with pytest.raises(DataError, match=said):
        sampler_weights(Wrong(), None, TRAIN)


def test_a_class_of_the_user_s_own_file(tmp_path: Path) -> None:
    file = tmp_path / "own_sampler_file.py"
    file.write_text(OWN)
    config = SamplerConfig(path=str(file), name="Hardest", kwargs={"least": 3})
    np.testing.assert_array_equal(sampler_weights(make_sampler(config, []), None, TRAIN), [3, 3, 3, 3])
    before = sampler_digests(config, [])
    assert len(before) == 1
    file.write_text(OWN + "\n# changed\n")
    assert sampler_digests(config, []) != before
    assert sampler_digests(SamplerConfig(), []) == {}, "a built-in one is this package's"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"name": "pas_rate"}, "unknown sampler 'pas_rate'; did you mean pass_rate"),
        ({"kwargs": {"memroy": 0.5}}, "rollout.sampler.kwargs.memroy.*did you mean memory"),
        ({"kwargs": {"memory": 1.0}}, "rollout.sampler.kwargs.memory=1.0: Input should be less than 1"),
        ({"path": "nowhere.py", "name": "X"}, "there is no file nowhere.py"),
        ({"path": "string", "name": "Formatter"}, "Formatter has no method weights"),
    ],
)
def test_what_can_t_be_a_sampler_is_refused(config: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_sampler(SamplerConfig.model_validate(config), [])


def test_before_a_run_a_sampler_sees_all_columns_and_its_errors_say_whose_they_are() -> None:
    train = stand_in(
        pa.table({"prompt_id": ["a", "b"], "prompt": ["x y", "z"], "reference": ["", ""], "data_source": ["s", "s"]}),
        "train",
    )
    assert train.schema.equals(DATASET)
    assert train.column("prompt_ids").to_pylist() == [[0, 0], [0]]

    class Wrong(PassRate):
        def weights(self, state: pa.Table | None, prompts: pa.Table) -> np.ndarray:
            return prompts["difficulty"].to_numpy()

    with pytest.raises(DataError, match=r"rollout.sampler: Wrong.weights raised KeyError: .*difficulty"):
        sampler_weights(Wrong(), None, train)
