"""Who wins on the same prompts, and what speaks against a promotion."""

from typing import Any

import pyarrow as pa
import pytest

from grpo_lib.config_retrain import PromotionConfig
from grpo_lib.errors import DataError
from grpo_lib.retraining.judgement import accuracies, objections
from grpo_lib.retraining.records import Comparison, Row

RULE = PromotionConfig(min_gain=0.01, level=0.05, max_regression=0.02)


def evaluation(right: dict[str, list[bool | None]], mode: str = "sampled") -> pa.Table:
    """Samples by prompt; a prompt's source is its first letter."""
    rows = [(name, name[0], mode, each) for name, samples in right.items() for each in samples]
    names, sources, modes, correct = zip(*rows, strict=True)
    return pa.table(
        {"prompt_id": names, "data_source": sources, "mode": modes, "correct": pa.array(correct, type=pa.bool_())}
    )


def test_accuracies_are_means_over_samples_in_the_same_order_whatever_the_rows_are_in() -> None:
    champion = evaluation({"a1": [True, False], "b1": [False, False], "a2": [True, True]})
    challenger = evaluation({"a2": [True, False], "a1": [True, True], "b1": [False, True]})
    found = accuracies(champion, challenger, "sampled")
    assert found.sources.tolist() == ["a", "a", "b"]
    assert found.champion.tolist() == [0.5, 1.0, 0.0]
    assert found.challenger.tolist() == [1.0, 0.5, 0.5]
    assert found.left_out == 0


def test_a_prompt_that_one_side_has_no_verdict_for_is_left_out_of_both() -> None:
    champion = evaluation({"a1": [True, None], "a2": [None, None], "a3": [False, False]})
    challenger = evaluation({"a1": [True, True], "a2": [True, True], "a3": [None, True]})
    found = accuracies(champion, challenger, "sampled")
    assert found.left_out == 1
    assert found.champion.tolist() == [1.0, 0.0], "over the samples that were judged"
    assert found.challenger.tolist() == [1.0, 1.0]


def test_only_the_mode_that_was_asked_for_counts() -> None:
    champion = pa.concat_tables([evaluation({"a1": [True]}), evaluation({"a1": [False]}, "greedy")])
    challenger = pa.concat_tables([evaluation({"a1": [False]}), evaluation({"a1": [True]}, "greedy")])
    assert accuracies(champion, challenger, "greedy").challenger.tolist() == [1.0]
    assert accuracies(champion, challenger, "sampled").challenger.tolist() == [0.0]


def test_different_prompts_are_no_comparison() -> None:
    with pytest.raises(DataError, match="different prompts \\(2 of them on one side only\\)"):
        accuracies(evaluation({"a1": [True]}), evaluation({"a2": [True]}), "sampled")


def row(gain: float, p_better: float = 1.0, p_worse: float = 1.0) -> Row:
    return Row(
        prompts=100, champion=0.5, challenger=0.5 + gain, gain=gain, low=gain - 0.1, high=gain + 0.1,
        p_better=p_better, p_worse=p_worse,
    )  # fmt: skip


def comparison(overall: Row, **sources: Row) -> Comparison:
    return Comparison(
        mode="sampled", left_out=0, all=overall, sources=sources, champion="x", challenger="y", digests=["0" * 64] * 2
    )


GOOD = row(0.1, p_better=0.001)
CASES: dict[str, tuple[Comparison, list[str]]] = {
    "better everywhere": (comparison(GOOD, a=row(0.1), b=row(0.0)), []),
    "exactly at both bounds": (comparison(row(0.01, p_better=0.05), a=row(-0.02, p_worse=0.3)), []),
    "too small": (comparison(row(0.005, p_better=0.01)), ["gain +0.0050 is below promotion.min_gain=0.01"]),
    "not significant": (comparison(row(0.1, p_better=0.06)), ["p=0.0600 of the gain is above promotion.level=0.05"]),
    "a source loses more than the tolerance, maybe by chance": (
        comparison(GOOD, a=row(0.3), b=row(-0.05, p_worse=0.3)),
        ["source b loses 0.0500, more than promotion.max_regression=0.02"],
    ),
    "a source loses little, and surely": (
        comparison(GOOD, b=row(-0.01, p_worse=0.02)),
        ["source b loses 0.0100, which is significant (p=0.0200)"],
    ),
    "worse": (
        comparison(row(-0.2, p_worse=0.001), a=row(-0.2, p_worse=0.001)),
        [
            "gain -0.2000 is below promotion.min_gain=0.01",
            "p=1.0000 of the gain is above promotion.level=0.05",
            "source a loses 0.2000, more than promotion.max_regression=0.02",
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_part_of_the_rule_objects_with_its_number_and_its_bound(case: str) -> None:
    judged, expected = CASES[case]
    assert objections(judged, RULE) == expected


def test_without_a_bound_no_gain_is_still_no_promotion() -> None:
    rule: Any = RULE.model_copy(update={"min_gain": 0.0})
    assert objections(comparison(row(0.0, p_better=0.01)), rule) == ["gain +0.0000 is below promotion.min_gain=0"]
