"""Process supervision (DeepSeekMath, section 4.1.3): scores of steps, from the reward function to the tokens.

All scores of steps in a group are normalised together, ``(r - mean) / (std + 1e-6)``; a token's advantage is the sum
of those of the steps that end at it or later.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.algorithms.advantages import ADVANTAGES, grpo_process
from grpo_lib.algorithms.groupings import GROUPINGS
from grpo_lib.config_reward import RewardConfig
from grpo_lib.data.advantages import AdvantagePlan, Overlong, advantage_table
from grpo_lib.data.iteration import Iteration
from grpo_lib.data.schemas import FLOATS, MASK, TOKENS
from grpo_lib.errors import AlgorithmError
from grpo_lib.rewards.judges import Judge, Reward
from grpo_lib.rewards.scoring import reward_table
from grpo_lib.types import RewardResult, Sample

_ = math.nan  # no step ends at the token


@dataclass(frozen=True)
class Row:
    scores: list[float]
    """Of each token."""
    group: int = 0
    mask: tuple[int, ...] | None = None

    @property
    def taken(self) -> tuple[int, ...]:
        return self.mask or (1,) * len(self.scores)


def process(*rows: Row) -> list[list[float]]:
    """Advantages of each row's tokens."""
    lengths = [len(row.scores) for row in rows]
    made = grpo_process(
        torch.tensor([score for row in rows for score in row.scores], dtype=torch.float64),
        torch.tensor([row.group for row in rows]),
        torch.tensor([bool(each) for row in rows for each in row.taken]),
        torch.tensor([0, *lengths]).cumsum(0),
    )
    assert made.returns is None
    return [part.tolist() for part in made.advantages.split(lengths)]


def near(expected: list[list[float]]) -> object:
    return [pytest.approx(row, abs=1e-6) for row in expected]


# Numbers by hand


def test_a_token_earns_the_normalised_scores_of_the_steps_that_end_at_it_or_later() -> None:
    # 0.9, 0.3 and 0 have mean 0.4 and variance (0.25 + 0.01 + 0.16) / 2 = 0.21: 1.0910872, -0.2182174, -0.8728697
    found = process(Row([_, 0.9, _, 0.3, _]), Row([_, _, 0.0]))
    assert found == near([[0.8728697, 0.8728697, -0.2182174, -0.2182174, 0.0], [-0.8728697] * 3])


def test_steps_count_and_not_rows() -> None:
    # 1, 1, 1, 0 of one row and 0 of another: mean 0.6, variance (3 * 0.16 + 2 * 0.36) / 4 = 0.3, std 0.5477226:
    # 0.4 / 0.5477236 = 0.7302954 and -0.6 / 0.5477236 = -1.0954430
    found = process(Row([1.0, 1.0, 1.0, 0.0]), Row([0.0]))
    assert found == near([[1.0954431, 0.3651477, -0.3651476, -1.0954430], [-1.0954430]])


def test_every_group_is_normalised_by_itself() -> None:
    # 1, 0: mean 0.5, std 0.7071068. 10, 30: mean 20, std 14.1421356
    found = process(Row([1.0], group=7), Row([_, 10.0], group=3), Row([0.0], group=7), Row([30.0, _], group=3))
    assert found == near([[0.7071058], [-0.7071067, -0.7071067], [-0.7071058], [0.7071067, 0.0]])


def test_a_step_that_ends_at_a_masked_token_is_no_step_and_a_masked_token_earns_nothing() -> None:
    # Left are 1 and 0: +-0.7071058.
    found = process(Row([_, 1.0, 50.0, _], mask=(0, 1, 0, 1)), Row([_, _, 0.0], mask=(1, 0, 1)))
    assert found == near([[0.0, 0.7071058, 0.0, 0.0], [-0.7071058, 0.0, -0.7071058]])


# Edges


def test_one_step_of_a_group_has_no_baseline() -> None:
    assert process(Row([_, 0.5, _]), Row([_])) == near([[0.4999995, 0.4999995, 0.0], [0.0]])


def test_equal_scores_have_no_signal() -> None:
    assert process(Row([0.1, 0.1, 0.1]), Row([0.1])) == [[0.0, 0.0, 0.0], [0.0]]


def test_a_response_without_steps_has_no_advantage_and_belongs_to_no_statistic() -> None:
    found = process(Row([1.0]), Row([_, _]), Row([0.0]), Row([]))
    assert found == near([[0.7071058], [0.0, 0.0], [-0.7071058], []])


def test_a_group_without_steps_beside_one_with_steps_has_no_advantage() -> None:
    assert process(Row([_, _], group=1), Row([1.0]), Row([0.0])) == near([[0.0, 0.0], [0.7071058], [-0.7071058]])


def test_an_iteration_without_steps_is_an_error_that_says_what_is_missing() -> None:
    for rows in ([Row([_, _])], [Row([1.0], mask=(0,))]):
        with pytest.raises(AlgorithmError, match="grpo_process needs a reward that gives step_scores or token_scores"):
            process(*rows)


# Against the formula, and in any order


def by_formula(rows: Sequence[Row]) -> list[list[float]]:
    """In plain Python, token by token."""
    found = []
    for row in rows:
        theirs = [
            score
            for other in rows
            if other.group == row.group
            for score, taken in zip(other.scores, other.taken, strict=True)
            if taken and not math.isnan(score)
        ]
        mean, std = 0.0, 1.0
        if len(theirs) > 1:
            mean, std = statistics.fmean(theirs), statistics.stdev(theirs)
        found.append(
            [
                math.fsum(
                    (row.scores[end] - mean) / (std + 1e-6)
                    for end in range(token, len(row.scores))
                    if row.taken[end] and not math.isnan(row.scores[end])
                )
                if row.taken[token]
                else 0.0
                for token in range(len(row.scores))
            ]
        )
    return found


def drawn(seed: int) -> list[Row]:
    rng = random.Random(seed)
    rows = [Row([1.0], group=rng.choice([0, 5]))]
    for _row in range(rng.randrange(8)):
        tokens = rng.randrange(7)
        scores = [rng.gauss(0, 1) if rng.random() < 0.4 else math.nan for _token in range(tokens)]
        mask = tuple(int(rng.random() < 0.8) for _token in range(tokens))
        rows.append(Row(scores, group=rng.choice([0, 5, -2]), mask=mask or None))
    return rows


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_it_agrees_with_the_formula_token_by_token(seed: int) -> None:
    rows = drawn(seed)
    assert process(*rows) == [pytest.approx(row, abs=1e-9) for row in by_formula(rows)]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_the_order_of_rows_does_not_matter(seed: int) -> None:
    rows = drawn(seed)
    order = random.Random(seed + 1).sample(range(len(rows)), len(rows))
    found, moved = process(*rows), process(*(rows[place] for place in order))
    assert moved == [pytest.approx(found[place], abs=1e-12) for place in order]


# From a process reward model to the tokens

WORDS = ["", "one ", "and ", "two.", " So ", "three", "."]  # 0 ends the sequence, and is not in the text


def words(ids: Sequence[int]) -> str:
    return "".join(WORDS[each] for each in ids)


def letters(ids: Sequence[int]) -> str:
    """A token is a byte: some characters take several."""
    return bytes(ids).decode("utf-8", "replace")


def from_function(
    responses: list[list[int]], decode: object, steps: dict[str, list[tuple[int, float]] | None], weight: float = 1.0
) -> tuple[pa.Table, pa.Table]:
    """Rewards, and the advantages made of them, of a group of responses; None: the function fails on it."""

    def judge(sample: Sample) -> RewardResult:
        found = steps[sample.response]
        if found is None:
            raise ValueError("can't score it")
        return RewardResult(value=99.0, step_scores=found)

    function = Judge(
        name="prm", weight=weight, data_sources=None, kind="sample", function=judge, place="", options={},
        isolated=False, digest="",
    )  # fmt: skip
    reward = Reward(judges=[function], settings=RewardConfig.model_validate({"functions": [{"name": "prm"}]}))
    count = len(responses)
    assert callable(decode)
    prompts = pa.table(
        {
            "dataset_row": pa.array([0], pa.int64()),
            "data_source": ["toy"],
            "prompt_id": ["p"],
            "prompt": ["p"],
            "reference": ["r"],
        }
    )
    rollouts = pa.table(
        {
            "rollout_id": [f"0-0-{place}" for place in range(count)],
            "prompt_row": pa.array([0] * count, pa.int32()),
            "group_id": pa.array([0] * count, pa.int64()),
            "response_ids": pa.array(responses, TOKENS),
            "response_mask": pa.array([[1] * len(each) for each in responses], MASK),
            "rollout_logprobs": pa.array([[-1.0] * len(each) for each in responses], FLOATS),
            "finish_reason": ["stop"] * count,
            "policy_version": pa.array([0] * count, pa.int32()),
            "text": [decode(each) for each in responses],
        }
    )
    rewards, _scores = reward_table(prompts, rollouts, reward, decode=decode)
    plan = AdvantagePlan(
        estimator=ADVANTAGES["grpo_process"].bind({}, "options"),
        grouping=GROUPINGS["prompt"],
        correction={},
        overlong=Overlong(max_length=100, buffer=None, penalty=1.0, mask_truncated=False),
    )
    table, _numbers = advantage_table(Iteration(prompts=prompts, rollouts=rollouts, rewards=rewards), plan)
    return rewards, table


def of(table: pa.Table, column: str) -> list[list[float]]:
    found: list[list[float]] = table.column(column).to_pylist()
    return found


def test_scores_of_a_process_reward_model_reach_the_tokens_of_their_steps() -> None:
    long, short, failed = [1, 2, 3, 4, 5, 6, 0], [1, 3, 0], [5, 0]
    steps: dict[str, list[tuple[int, float]] | None] = {
        "one and two. So three.": [(12, 0.9), (22, 0.3)],
        "one two.": [(8, 0.0)],
        "three": None,
    }
    rewards, table = from_function([long, failed, short], words, steps)
    scores = [[None if math.isnan(each) else round(each, 6) for each in row] for row in of(rewards, "token_scores")]
    assert scores == [[None, None, 0.9, None, None, 0.3, None], [None, None], [None, 0.0, None]]
    assert rewards.column("value").to_pylist() == [99.0, None, 99.0]
    # As above: 1.0910872, -0.2182174 and -0.8728697; the row without a reward counts nowhere, nor does the 99.
    assert of(table, "advantages") == near(
        [[0.8728697] * 3 + [-0.2182174] * 3 + [0.0], [0.0, 0.0], [-0.8728697, -0.8728697, 0.0]]
    )
    assert of(table, "response_mask") == [[1] * 7, [0, 0], [1] * 3]


def test_the_weight_of_the_function_scales_its_scores_and_not_the_advantages() -> None:
    steps: dict[str, list[tuple[int, float]] | None] = {"one two.": [(4, 1.0), (8, 0.0)], "three": [(5, 0.5)]}
    rewards, table = from_function([[1, 3], [5]], words, steps, weight=4.0)
    assert of(rewards, "token_scores") == [[4.0, 0.0], [2.0]]
    # 4, 0, 2: mean 2, standard deviation 2
    assert of(table, "advantages") == near([[0.0, -1.0], [0.0]])


def test_a_step_that_ends_inside_a_token_or_a_character_comes_to_the_token_that_completes_it() -> None:
    inside: dict[str, list[tuple[int, float]] | None] = {"one two.": [(2, 1.0), (5, 0.0)]}
    rewards, table = from_function([[1, 3]], words, inside)
    assert of(rewards, "token_scores") == [[1.0, 0.0]]
    assert of(table, "advantages") == near([[0.0, -0.7071058]])

    text = "é=1."  # five bytes
    accented: dict[str, list[tuple[int, float]] | None] = {text: [(1, 0.0), (4, 1.0)]}
    rewards, table = from_function([list(text.encode())], letters, accented)
    scores = of(rewards, "token_scores")[0]
    assert [place for place, score in enumerate(scores) if not math.isnan(score)] == [1, 4]
    assert of(table, "advantages") == near([[0.0, 0.0, 0.7071058, 0.7071058, 0.7071058]])


def test_two_steps_that_end_in_one_token_are_one_step_of_their_sum() -> None:
    steps: dict[str, list[tuple[int, float]] | None] = {"three": [(2, 0.25), (5, 0.5)], "two.": [(4, 0.25)]}
    rewards, table = from_function([[5], [3]], words, steps)
    assert of(rewards, "token_scores") == [[0.75], [0.25]]
    # 0.75, 0.25: mean 0.5, standard deviation 0.3535534
    assert of(table, "advantages") == near([[0.7071048], [-0.7071048]])


def test_a_response_without_a_step_is_kept_with_no_advantage() -> None:
    steps: dict[str, list[tuple[int, float]] | None] = {"": [], "three": [(5, 1.0)], "two.": [(4, 0.0)]}
    rewards, table = from_function([[0], [5, 0], [3]], words, steps)
    assert rewards.column("value").to_pylist() == [99.0, 99.0, 99.0]
    assert of(table, "advantages") == near([[0.0], [0.7071058, 0.0], [-0.7071058]])
    assert of(table, "response_mask") == [[1], [1, 1], [1]]
