import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from grpo_lib.config_reward import RewardConfig
from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.data.schemas import EVALUATION, TOKENS
from grpo_lib.evaluation import evaluate_mode, evaluation_summary
from grpo_lib.generation.base import LENGTH, STOP, Generated, Progress, Request, Sampling
from grpo_lib.models import make_tokenizer
from grpo_lib.rewards.judges import Reward, make_judges, own_reward
from grpo_lib.seeds import row_seeds
from grpo_lib.types import RewardResult, Sample

Row = tuple[str, str, str, bool | None]


def table_of(
    rows: list[Row],
    lengths: list[int] | None = None,
    finish: list[str] | None = None,
    answers: list[str | None] | None = None,
) -> pa.Table:
    """Rows of (mode, data source, prompt id, correct); the reward is 1 or 0.25."""
    count = len(rows)
    columns = {
        "prompt_id": [prompt for _, _, prompt, _ in rows],
        "data_source": [source for _, source, _, _ in rows],
        "mode": [mode for mode, _, _, _ in rows],
        "sample": list(range(count)),
        "prompt": [""] * count,
        "text": [""] * count,
        "reference": [""] * count,
        "response_ids": [[1] * length for length in lengths or [1] * count],
        "finish_reason": finish or ["stop"] * count,
        "value": [None if correct is None else 1.0 if correct else 0.25 for *_, correct in rows],
        "correct": [correct for *_, correct in rows],
        "answer": answers or [None] * count,
        "reason": [None] * count,
    }
    return pa.table(columns, schema=EVALUATION)


def sampled(outcomes: dict[str, list[bool | None]], source: str = "toy") -> list[Row]:
    return [("sampled", source, prompt, each) for prompt, row in outcomes.items() for each in row]


def test_the_commonest_answer_of_the_first_k_samples_counts_in_maj_at_k_overall_and_per_source() -> None:
    rows = [*sampled({"a": [True, False, True], "b": [False, False, True]}, "one"), *sampled({"c": [True] * 3}, "two")]
    answers: list[str | None] = ["7", "5", "7", "1", "1", "4", "9", None, "9"]
    summary = evaluation_summary(table_of(rows, answers=answers), [1, 2, 3])
    # a: 7 wins two to one. b: 1 wins and is wrong. c: 9. With two samples a ties: half a point.
    assert summary["maj_at_3"] == pytest.approx(2 / 3) and summary["maj_at_2"] == pytest.approx(1.5 / 3)
    assert summary["one/maj_at_3"] == pytest.approx(1 / 2) and summary["two/maj_at_3"] == 1.0
    assert "maj_at_1" not in summary


def test_without_answers_there_is_no_majority() -> None:
    summary = evaluation_summary(table_of(sampled({"a": [True, False]})), [1, 2])
    assert not any("maj_at" in name for name in summary)


def test_accuracy_standard_error_and_pass_at_k_by_hand() -> None:
    rows = sampled({"a": [True, False, False, False], "b": [True, True, False, False], "c": [False] * 4})
    summary = evaluation_summary(table_of(rows), [1, 2, 4])
    assert summary == {
        "sampled_accuracy": 0.25,
        # Over prompts: 0.25, 0.5 and 0 have standard deviation 0.25.
        "sampled_accuracy_se": pytest.approx(0.25 / math.sqrt(3)),
        "pass_at_1": pytest.approx(0.25),
        "pass_at_2": pytest.approx((1 / 2 + 5 / 6 + 0) / 3),
        "pass_at_4": pytest.approx(2 / 3),
        "sampled_reward_mean": pytest.approx((3 * 1.0 + 9 * 0.25) / 12),
        "sampled_failed_fraction": 0.0,
        "sampled_length_mean": 1.0,
        "sampled_truncated_fraction": 0.0,
    }


def test_rows_of_a_prompt_need_not_be_adjacent() -> None:
    rows = sampled({"a": [True, False], "b": [True, True]})
    moved = [rows[index] for index in (2, 0, 3, 1)]
    assert evaluation_summary(table_of(moved), [2]) == evaluation_summary(table_of(rows), [2])


def test_greedy_and_sampled_are_told_apart_and_only_sampled_has_pass_at_k() -> None:
    greedy: list[Row] = [("greedy", "toy", "a", True), ("greedy", "toy", "b", False)]
    rows = greedy + sampled({"a": [False, False], "b": [True, False]})
    summary = evaluation_summary(
        table_of(rows, [2, 4, 1, 1, 1, 9], ["stop", "length", "stop", "stop", "stop", "length"]), [1, 2]
    )
    assert (summary["greedy_accuracy"], summary["sampled_accuracy"]) == (0.5, 0.25)
    assert (summary["greedy_length_mean"], summary["sampled_length_mean"]) == (3.0, 3.0)
    assert (summary["greedy_truncated_fraction"], summary["sampled_truncated_fraction"]) == (0.5, 0.25)
    assert (summary["pass_at_1"], summary["pass_at_2"]) == (0.25, 0.5)
    assert "pass_at_1" not in evaluation_summary(table_of(greedy), [1])


def test_a_response_that_could_not_be_judged_is_left_out_and_counted() -> None:
    rows = sampled({"a": [True, None], "b": [True, False], "c": [None, None]})
    summary = evaluation_summary(table_of(rows, [1, 1, 1, 1, 4, 4]), [1, 2])
    assert summary["sampled_accuracy"] == pytest.approx(2 / 3)
    assert summary["sampled_accuracy_se"] == pytest.approx(0.25)  # 1 and 0.5: sqrt(0.125) / sqrt(2)
    assert summary["sampled_failed_fraction"] == 0.5
    assert summary["sampled_reward_mean"] == pytest.approx(2.25 / 3)
    assert summary["pass_at_1"] == pytest.approx(0.75)
    assert summary["pass_at_2"] == 1.0  # of b alone: only it has two samples
    assert summary["sampled_length_mean"] == 2.0  # lengths count whether judged or not


def test_when_nothing_could_be_judged_there_is_no_accuracy() -> None:
    summary = evaluation_summary(table_of(sampled({"a": [None, None]})), [1])
    assert summary == {
        "sampled_failed_fraction": 1.0,
        "sampled_length_mean": 1.0,
        "sampled_truncated_fraction": 0.0,
    }


def test_several_sources_each_get_their_own_numbers() -> None:
    rows = sampled({"a": [True, True]}, "easy") + sampled({"b": [False, False], "c": [True, False]}, "hard")
    summary = evaluation_summary(table_of(rows), [2])
    assert summary["sampled_accuracy"] == 0.5
    assert (summary["easy/sampled_accuracy"], summary["hard/sampled_accuracy"]) == (1.0, 0.25)
    assert (summary["easy/pass_at_2"], summary["hard/pass_at_2"]) == (1.0, 0.5)
    assert summary["pass_at_2"] == pytest.approx(2 / 3)
    assert not any("/" in name for name in evaluation_summary(table_of(rows[:2]), [2]))


class Parrot:
    """An engine that answers each prompt with its first token, once for each sample number, and never ends the last."""

    name = "parrot"

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int, Sampling]] = []

    def generate(self, request: Request, on_progress: Progress | None = None) -> Generated:
        prompts, n = request.prompts, request.n
        self.asked.append((request.seeds.tolist(), n, request.sampling))
        first = prompts.values[prompts.offsets[:-1]].tolist()
        rows = [[token] * (sample + 1) for token in first for sample in range(n)]
        finish = torch.full((len(rows),), STOP, dtype=torch.uint8)
        finish[-1] = LENGTH
        responses = Ragged(
            values=torch.tensor([token for row in rows for token in row], dtype=torch.int32),
            offsets=lengths_to_offsets(torch.tensor([len(row) for row in rows])),
        )
        return Generated(responses=responses, logprobs=torch.zeros(len(responses.values)), finish=finish)


def judge(sample: Sample) -> RewardResult | None:
    if sample.response == "aa":
        return None
    correct = float(sample.response == sample.reference)
    return RewardResult(value=0.5 * correct, components={"correct": correct})


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer([], "abc")


@pytest.fixture
def heldout(tokenizer: Any) -> pa.Table:
    columns = {
        "prompt_id": ["h0", "h1"],
        "data_source": ["toy", "other"],
        "prompt": ["ab", "cb"],
        "prompt_ids": pa.array(tokenizer(["ab", "cb"])["input_ids"], TOKENS),
        "reference": ["a", "cc"],
    }
    return pa.table(columns)


def test_every_sample_is_a_row_with_its_prompt_and_judgement(tokenizer: Any, heldout: pa.Table) -> None:
    engine, sampling = Parrot(), Sampling(temperature=0.5, max_new_tokens=4)
    table = evaluate_mode(
        engine,  # type: ignore[arg-type]
        heldout,
        tokenizer,
        own_reward(judge),
        mode="sampled",
        samples=2,
        sampling=sampling,
        seed=11,
    )
    assert table.schema == EVALUATION
    assert table.column("text").to_pylist() == ["a", "aa", "c", "cc"]
    assert table.column("prompt_id").to_pylist() == ["h0", "h0", "h1", "h1"]
    assert table.column("data_source").to_pylist() == ["toy", "toy", "other", "other"]
    assert table.column("reference").to_pylist() == ["a", "a", "cc", "cc"]
    assert table.column("sample").to_pylist() == [0, 1, 0, 1]
    assert table.column("mode").to_pylist() == ["sampled"] * 4
    assert table.column("correct").to_pylist() == [True, None, False, True]
    assert table.column("value").to_pylist() == [0.5, None, 0.0, 0.5]
    assert table.column("finish_reason").to_pylist() == ["stop", "stop", "stop", "length"]
    assert [reason is None for reason in table.column("reason").to_pylist()] == [True, False, True, True]
    assert engine.asked == [(row_seeds(11, 0, 4).tolist(), 2, sampling)]


def test_a_reward_without_components_counts_as_correct_from_1_on(tokenizer: Any, heldout: pa.Table) -> None:
    values = iter([1.0, 0.99])
    table = evaluate_mode(
        Parrot(),  # type: ignore[arg-type]
        heldout,
        tokenizer,
        own_reward(lambda sample: next(values)),
        mode="greedy",
        samples=1,
        sampling=Sampling(temperature=0.0, max_new_tokens=4),
        seed=0,
    )
    assert table.column("correct").to_pylist() == [True, False]


def test_of_each_row_the_component_counts_or_else_the_value(tokenizer: Any, heldout: pa.Table) -> None:
    def mixed(sample: Sample) -> RewardResult | float:
        return RewardResult(value=0.5, components={"correct": 1.0}) if sample.data_source == "toy" else 1.0

    table = evaluate_mode(
        Parrot(),  # type: ignore[arg-type]
        heldout,
        tokenizer,
        own_reward(mixed),
        mode="greedy",
        samples=1,
        sampling=Sampling(temperature=0.0, max_new_tokens=4),
        seed=0,
    )
    assert table.column("correct").to_pylist() == [True, True]


def test_failures_stop_no_evaluation_and_are_counted_exactly(tokenizer: Any, heldout: pa.Table, tmp_path: Path) -> None:
    file = tmp_path / "fails_at_first.py"
    file.write_text("def reward(sample):\n    return 1.0 if sample.data_source == 'other' else 1 / 0\n")
    settings = RewardConfig.model_validate({"functions": [{"path": str(file), "name": "reward"}], "max_failed": 0.0})
    table = evaluate_mode(
        Parrot(),  # type: ignore[arg-type]
        heldout,
        tokenizer,
        Reward(judges=make_judges(settings.functions, []), settings=settings),
        mode="sampled",
        samples=2,
        sampling=Sampling(temperature=1.0, max_new_tokens=4),
        seed=0,
    )
    assert table.column("correct").to_pylist() == [None, None, True, True]
    assert table.column("reason").to_pylist() == ["ZeroDivisionError: division by zero"] * 2 + [None] * 2
    assert evaluation_summary(table, [])["sampled_failed_fraction"] == 0.5
