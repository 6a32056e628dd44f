"""Rewards as a dataset: what each function said, scores of steps at their tokens, and what need not be judged again."""

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from grpo_lib.config_reward import RewardConfig
from grpo_lib.data.columns import ragged_column
from grpo_lib.rewards.judges import Judge, Reward
from grpo_lib.rewards.scoring import judged_before, reward_table, step_tokens
from grpo_lib.types import RewardFunction, RewardResult, Sample

WORDS = ["", "one ", "and ", "two.", " So ", "three", ".", "é"]


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[each] for each in ids)


def tables(*responses: Sequence[int]) -> tuple[pa.Table, pa.Table]:
    prompts = pa.table(
        {"prompt_id": ["a"], "prompt": ["p"], "reference": ["r"], "data_source": ["d"], "metadata": ['{"level": 3}']}
    )
    rollouts = pa.table(
        {
            "rollout_id": [f"0-0-{place}" for place in range(len(responses))],
            "prompt_row": pa.array([0] * len(responses), pa.int32()),
            "response_ids": pa.array([list(each) for each in responses], pa.list_(pa.int32())),
            "finish_reason": ["stop"] * len(responses),
            "text": [decode(each) for each in responses],
        }
    )
    return prompts, rollouts


def reward_of(*functions: tuple[str, float, RewardFunction]) -> Reward:
    """Functions of this process, with names and weights."""
    judges = [
        Judge(
            name=name, weight=weight, data_sources=None, kind="sample", function=function, place="", options={},
            isolated=False, digest=f"digest of {name}",
        )
        for name, weight, function in functions
    ]  # fmt: skip
    settings = RewardConfig.model_validate(
        {"functions": [{"name": name} for name, _, _ in functions], "max_failed": 1.0}
    )
    return Reward(judges=judges, settings=settings)


def test_scores_of_steps_come_to_the_token_that_ends_the_step() -> None:
    ids = [1, 2, 3, 4, 5, 6]  # "one and two. So three."
    assert step_tokens(ids, decode(ids), [12, 22], decode) == [2, 5]
    assert step_tokens(ids, decode(ids), [1, 4, 5], decode) == [0, 0, 1]

    def judge(sample: Sample) -> RewardResult:
        return RewardResult(value=1.0, step_scores=[(12, 0.25), (22, -0.5)])

    table, _ = reward_table(*tables(ids, [1, 2, 3, 4, 5, 6]), reward_of(("steps", 2.0, judge)), decode=decode)
    scores = ragged_column(table, "token_scores")
    expected = [math.nan, math.nan, 0.5, math.nan, math.nan, -1.0]
    np.testing.assert_array_equal(scores.values.numpy(), np.array(expected * 2, dtype=np.float32))
    assert table.column("value").to_pylist() == [2.0, 2.0]


def test_scores_of_tokens_add_up_over_functions() -> None:
    def tokens(sample: Sample) -> RewardResult:
        return RewardResult(value=0.0, token_scores=[1.0] * sample.response_tokens)

    def step(sample: Sample) -> RewardResult:
        return RewardResult(value=0.0, step_scores=[(len(sample.response), 10.0)])

    table, _ = reward_table(*tables([1, 3]), reward_of(("a", 1.0, tokens), ("b", 0.5, step)), decode=decode)
    assert table.column("token_scores").to_pylist() == [[1.0, 6.0]]


def test_wrong_scores_make_the_reward_null() -> None:
    def judge(sample: Sample) -> RewardResult:
        if sample.response_tokens == 1:
            return RewardResult(value=0.0, token_scores=[1.0, 2.0])
        return RewardResult(value=0.0, step_scores=[(999, 1.0)])

    table, _ = reward_table(*tables([1], [1, 2]), reward_of(("a", 1.0, judge)), decode=decode)
    assert table.column("reason").to_pylist() == [
        "ValueError: gives 2 token_scores for 1 tokens",
        "ValueError: a step ends at 999, the response has 8 characters",
    ]


def test_metadata_reaches_the_function() -> None:
    table, _ = reward_table(*tables([1]), reward_of(("level", 1.0, lambda sample: sample.metadata["level"])))
    assert table.column("value").to_pylist() == [3.0]


def test_only_what_was_not_judged_before_is_judged() -> None:
    seen: list[str] = []

    def judge(sample: Sample) -> float | None:
        seen.append(sample.response)
        return None if sample.response == "one " else float(sample.response_tokens)

    first, _ = reward_table(*tables([1], [1, 2]), reward_of(("a", 1.0, judge)), decode=decode)
    assert seen == ["one ", "one and "]
    seen.clear()
    known = judged_before([first])
    both = reward_of(("a", 3.0, judge), ("b", 1.0, lambda sample: 0.5))
    second, scores = reward_table(*tables([1], [1, 2], [3]), both, known=known, decode=decode)
    assert seen == ["one ", "two."], "what failed is tried again, and what is new"
    assert second.column("value").to_pylist() == [None, 6.5, 3.5]
    assert scores.components["a"] == [None, 2.0, 1.0]
    (verdict,) = [each for each in second.column("verdicts").to_pylist()[1] if each["name"] == "b"]
    assert (verdict["value"], verdict["function"]) == (0.5, "digest of b")
