"""Which runs a sweep asks for, which it refuses, and which of them are hopeless."""

import random
from typing import Any

import pytest

from grpo_lib.config_files import make_config, validated
from grpo_lib.errors import ConfigError
from grpo_lib.sweeps import Range, SweepConfig, is_hopeless, trials
from tests.flows.tiny import TINY

BASE = make_config(TINY)


def plan(**values: Any) -> SweepConfig:
    return validated(SweepConfig, {"name": "s"} | values, "sweep")


def test_a_grid_is_every_combination_in_order() -> None:
    asked = trials(BASE, plan(grid={"rollout.samples": [2, 4], "trainer.optimizer.lr": [0.001, 0.01]}))
    assert [each.name for each in asked] == ["s-00", "s-01", "s-02", "s-03"]
    assert [(each.config.rollout.samples, each.config.trainer.optimizer.lr) for each in asked] == [
        (2, 0.001), (2, 0.01), (4, 0.001), (4, 0.01),
    ]  # fmt: skip
    assert all(each.config.name == each.name and each.config.tracking.sweep == "s" for each in asked)
    assert all(each.config.iterations == BASE.iterations for each in asked)


def test_draws_are_the_same_for_a_seed_within_bounds_and_made_for_each_combination() -> None:
    sweep = {
        "grid": {"rollout.samples": [2, 4]},
        "random": {
            "trainer.optimizer.lr": {"low": 1e-5, "high": 1e-3, "log": True},
            "trainer.epochs": {"low": 1, "high": 3, "integer": True},
            "algorithm.advantage": ["grpo", "rloo"],
        },
        "draws": 5,
    }
    first, again, other = (trials(BASE, plan(**sweep, seed=seed)) for seed in (1, 1, 2))
    assert [each.settings for each in first] == [each.settings for each in again] != [each.settings for each in other]
    assert len(first) == 10 and len({each.config.trainer.optimizer.lr for each in first}) == 10
    assert all(1e-5 <= each.config.trainer.optimizer.lr <= 1e-3 for each in first)
    assert {each.config.trainer.epochs for each in first} <= {1, 2, 3}


def test_ranges_are_even_over_logarithms_and_reach_both_whole_ends() -> None:
    source = random.Random(0)
    drawn = [Range(low=1e-4, high=1e-2, log=True).draw(source) for _ in range(4000)]
    assert abs(sum(each < 1e-3 for each in drawn) / 4000 - 0.5) < 0.03
    whole = [Range(low=1, high=3, integer=True).draw(source) for _ in range(3000)]
    assert set(whole) == {1, 2, 3}
    assert all(abs(whole.count(each) / 3000 - 1 / 3) < 0.04 for each in (1, 2, 3))


def test_the_same_settings_twice_are_one_run() -> None:
    assert len(trials(BASE, plan(random={"algorithm.advantage": ["rloo"]}, draws=5))) == 1


def test_options_of_a_function_that_a_run_replaces_are_not_its_options() -> None:
    base = make_config(TINY | {"algorithm": {"loss": "ppo_clip", "loss_options": {"clip_low": 0.1}}})
    first, second = trials(base, plan(grid={"algorithm.loss": ["ppo_clip", "reinforce"]}))
    assert first.config.algorithm.loss_options == {"clip_low": 0.1} and second.config.algorithm.loss_options == {}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "grid and random are empty"),
        ({"grid": {"rollout.samples": []}}, "rollout.samples: no values"),
        ({"grid": {"name": ["a", "b"]}}, "name can't be swept"),
        ({"grid": {"store.uri": ["a"]}}, "store.uri can't be swept"),
        ({"grid": {"seed": [1]}, "random": {"seed": [2]}}, "seed stands in grid and in random"),
        ({"grid": {"seed": list(range(1001))}}, "these are 1001 runs, at most 1000"),
        ({"random": {"seed": {"low": 3, "high": 3}}}, "low=3 must be below high=3"),
        ({"random": {"trainer.optimizer.lr": {"low": 0, "high": 1, "log": True}}}, "needs a number above 0"),
        ({"grid": {"reward.correct": [1, 2]}, "metric": "reward"}, "can't compare runs with other rewards"),
        ({"grid": {"seed": [1]}, "name": "a/b"}, "name='a/b'"),
    ],
)
def test_what_can_not_be_swept_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(**values)
    assert says in str(refused.value)


def test_every_run_is_checked_before_the_first_starts() -> None:
    with pytest.raises(ConfigError, match=r"run s-01 \(rollout.samples=0\): rollout.samples=0"):
        trials(BASE, plan(grid={"rollout.samples": [2, 0]}))
    with pytest.raises(ConfigError, match=r"rollout.sample: no such setting; did you mean rollout.samples"):
        trials(BASE, plan(grid={"rollout.sample": [2]}))
    greedy = make_config(TINY, ["evaluation.samples=0", "evaluation.pass_k=[]"])
    with pytest.raises(ConfigError, match=r"run s-0[01]: metric=sampled_accuracy, but evaluation.samples=0"):
        trials(greedy, plan(grid={"seed": [1]}))


OTHERS = [[(10, 0.2), (20, 0.4)], [(10, 0.4), (20, 0.6)], [(10, 0.6), (20, 0.8)]]  # means by 20: 0.3, 0.5, 0.7


@pytest.mark.parametrize(
    ("own", "others", "after", "hopeless"),
    [
        ([(10, 0.0), (20, 0.49)], OTHERS, 20, True),
        ([(10, 0.0), (20, 0.5)], OTHERS, 20, False),  # not below the median
        ([(10, 0.51), (20, 0.0)], OTHERS, 20, False),  # its best counts
        ([(10, 0.39)], OTHERS, 10, True),  # the others by 10: median 0.4
        ([(10, 0.0)], OTHERS, 20, False),  # too early
        ([(20, 0.0)], OTHERS[:2], 20, False),  # too few others
        ([(30, 0.0)], OTHERS, 20, False),  # nobody is as far
        ([], OTHERS, 1, False),
    ],
)
def test_a_run_is_hopeless_when_its_best_is_below_the_median_of_the_others_means(
    own: Any, others: Any, after: int, hopeless: bool
) -> None:
    assert is_hopeless(own, others, after) is hopeless
