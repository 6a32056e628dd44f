import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from grpo_lib.errors import RewardError
from grpo_lib.rewards.judges import own_reward
from grpo_lib.rewards.runner import Scores, check_failures
from grpo_lib.rewards.runner import score as score_with
from grpo_lib.types import RewardFunction, RewardResult, Sample


def samples(*responses: str) -> list[Sample]:
    return [
        Sample(prompt="p", response=response, reference="r", data_source="d", response_tokens=1, finish_reason="stop")
        for response in responses
    ]


def score(given: list[Sample], function: RewardFunction, on_progress: Callable[[int], None] | None = None) -> Scores:
    """Scores of a function of this process."""
    return score_with(given, own_reward(function), on_progress)


def scored(*results: Any) -> Scores:
    """Scores of a function that returns these in turn."""
    rest = iter(results)
    return score(samples(*map(str, range(len(results)))), lambda _: next(rest))


def test_values_and_components_keep_the_order_of_the_samples() -> None:
    scores = scored(
        RewardResult(value=1.0, components={"correct": 1.0, "format": 1.0}),
        RewardResult(value=0.1, components={"correct": 0.0}),
        RewardResult(value=0.0),
    )
    assert scores.values == [1.0, 0.1, 0.0]
    assert scores.reasons == [None, None, None]
    assert scores.components == {"correct": [1.0, 0.0, None], "format": [1.0, None, None]}


def test_any_real_number_is_a_reward() -> None:
    scores = scored(1, 0.5, True, np.float32(0.25), np.int64(3))
    assert scores.values == [1.0, 0.5, 1.0, 0.25, 3.0]
    assert [type(value) for value in scores.values] == [float] * 5
    assert scores.components == {}


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (None, "TypeError: reward must be a number, found None"),
        ("1.0", "TypeError: reward must be a number, found str"),
        ([1.0], "TypeError: reward must be a number, found list"),
        (Decimal(1), "TypeError: reward must be a number, found Decimal"),
        (math.nan, "ValueError: reward is nan"),
        (-math.inf, "ValueError: reward is -inf"),
        (10**400, "OverflowError: int too large to convert to float"),
        (RewardResult(value=math.nan), "ValueError: value is nan"),
        (
            RewardResult(value=1.0, components={"cost": 1.0}, spent={"cost": 2.0}),
            "ValueError: 'cost' is a component and in spent; give one of them another name",
        ),
        (RewardResult(value=1.0, components={"correct": math.inf}), "ValueError: component 'correct' is inf"),
        (
            RewardResult(value=1.0, components={"correct": None}),  # type: ignore[dict-item]
            "TypeError: component 'correct' must be a number, found None",
        ),
    ],
)
def test_what_is_no_finite_number_is_null_with_a_reason_and_never_zero(result: Any, reason: str) -> None:
    scores = scored(result)
    assert scores.values == [None]
    assert scores.reasons == [reason]
    assert scores.components == {}


def test_an_exception_makes_one_null_and_the_others_go_on() -> None:
    def judge(sample: Sample) -> float:
        return 1 / float(sample.response)

    scores = score(samples("2", "0", "four"), judge)
    assert scores.values == [0.5, None, None]
    assert scores.reasons == [
        None,
        "ZeroDivisionError: float division by zero",
        "ValueError: could not convert string to float: 'four'",
    ]


def test_a_long_or_unprintable_message_becomes_one_short_line() -> None:
    class AwkwardError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def judge(sample: Sample) -> float:
        raise {"long": ValueError("x\n" * 500), "mute": AwkwardError(), "half": ValueError("\ud800")}[sample.response]

    long, mute, half = score(samples("long", "mute", "half"), judge).reasons
    assert long is not None and len(long) == 200 and "\n" not in long
    assert mute is not None and "AwkwardError" in mute
    assert half == "ValueError: ?"


def test_an_interrupt_is_not_swallowed() -> None:
    def judge(sample: Sample) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(samples("a"), judge)


def test_progress_counts_the_samples_done() -> None:
    done: list[int] = []
    score(samples("a", "b", "c"), lambda _: 1.0, done.append)
    assert done == [1, 2, 3]


def test_failures_up_to_the_bound_pass_and_above_it_stop_the_run() -> None:
    scores = scored(1.0, 1.0, 1.0, None)
    check_failures(scores, 0.25)
    with pytest.raises(RewardError, match=r"1 of 4 rewards failed \(25.0%\), reward.max_failed=0.2 allows 20.0%"):
        check_failures(scores, 0.2)
    check_failures(scored(), 0.0)


def test_a_rollout_that_failed_is_not_judged_and_not_counted_against_the_reward_function() -> None:
    failed = [replace(sample, failure="calculator: division by zero") for sample in samples("a", "b")]
    scores = score([*failed, *samples("c", "d")], lambda sample: None if sample.response == "d" else 1.0)
    assert scores.values == [None, None, 1.0, None]
    assert scores.reasons[:2] == ["calculator: division by zero"] * 2
    assert scores.judged == [False, False, True, True]
    check_failures(scores, 0.5)
    with pytest.raises(RewardError, match=r"1 of 2 rewards failed .* 1 x TypeError.* \(first: sample 3\)"):
        check_failures(scores, 0.4)


def test_the_commonest_reasons_are_named_with_their_count_and_a_sample() -> None:
    with pytest.raises(RewardError) as caught:
        check_failures(scored(1.0, None, math.nan, None, "a", [1]), 0.05)
    message = str(caught.value)
    assert "2 x TypeError: reward must be a number, found None (first: sample 1)" in message
    assert "1 x ValueError: reward is nan (first: sample 2)" in message
    assert "found str (first: sample 4)" in message
    assert "found list" not in message
