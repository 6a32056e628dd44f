import math
from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.algorithms.evaluation import maj_at_k, mean_at_n, pass_at_k, standard_error

FEW = settings(deadline=None, max_examples=60)
NONE = -1
"""The code of a sample without an answer."""

# ---- mean@n


def test_mean_at_n_is_the_mean_over_the_samples_of_each_prompt() -> None:
    correct = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.5])
    means = mean_at_n(correct, torch.tensor([0, 3, 5, 6]))
    assert means.dtype == torch.float64
    assert means.tolist() == pytest.approx([1 / 3, 1.0, 0.5], abs=1e-15)


def test_mean_at_n_takes_verdicts_of_any_type() -> None:
    offsets = torch.tensor([0, 2, 4])
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float32):
        assert mean_at_n(torch.tensor([1, 0, 1, 1], dtype=dtype), offsets).tolist() == [0.5, 1.0]


def test_mean_at_n_of_no_prompts_is_empty() -> None:
    assert mean_at_n(torch.zeros(0), torch.tensor([0])).tolist() == []


@FEW
@given(rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=6))
def test_mean_at_n_is_pass_at_1(rows: list[list[int]]) -> None:
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows]).tolist()])
    means = mean_at_n(torch.tensor([value for row in rows for value in row]), offsets).tolist()
    assert means == pytest.approx([sum(row) / len(row) for row in rows], abs=1e-15)
    once = pass_at_k(np.array([len(row) for row in rows]), np.array([sum(row) for row in rows]), 1)
    assert means == pytest.approx(once.tolist(), abs=1e-15)


# ---- pass@k


@pytest.mark.parametrize(
    ("samples", "correct", "k", "expected"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (4, 2, 2, 5 / 6),
        (5, 2, 3, 0.9),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (4, 3, 2, 1.0),  # fewer than k wrong ones: some sample is right
        (4, 0, 4, 0.0),
        (4, 4, 1, 1.0),
        (1, 1, 1, 1.0),
    ],
)
def test_pass_at_k_by_hand(samples: int, correct: int, k: int, expected: float) -> None:
    assert pass_at_k(np.array([samples]), np.array([correct]), k).tolist() == pytest.approx([expected], abs=1e-15)


def test_pass_at_k_is_the_fraction_of_subsets_with_a_right_sample() -> None:
    cases = [(n, c, k) for n in range(1, 8) for c in range(n + 1) for k in range(1, n + 1)]
    for n, c, k in cases:
        subsets = list(combinations(range(n), k))
        hits = sum(any(sample < c for sample in subset) for subset in subsets)
        assert pass_at_k(np.array([n]), np.array([c]), k)[0] == pytest.approx(hits / len(subsets), abs=1e-12)


def test_prompts_may_have_different_numbers_of_samples() -> None:
    assert pass_at_k(np.array([4, 5]), np.array([1, 2]), 2).tolist() == pytest.approx([0.5, 0.7])


def test_large_numbers_of_samples_do_not_overflow() -> None:
    exact = 1 - math.comb(9_000, 100) / math.comb(10_000, 100)
    assert pass_at_k(np.array([10_000]), np.array([1_000]), 100)[0] == pytest.approx(exact, rel=1e-10)


def test_fewer_samples_than_k_are_refused() -> None:
    with pytest.raises(AssertionError, match="pass@3 needs at least 3 samples"):
        pass_at_k(np.array([4, 2]), np.array([1, 1]), 3)


@FEW
@given(n=st.integers(1, 40), data=st.data())
def test_pass_at_k_grows_with_k_and_with_right_samples(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    value = pass_at_k(np.array([n]), np.array([c]), k)[0]
    assert 0.0 <= value <= 1.0
    assert value == pytest.approx(float(1 - Fraction(math.comb(n - c, k), math.comb(n, k))), abs=1e-12)
    if k < n:
        assert pass_at_k(np.array([n]), np.array([c]), k + 1)[0] >= value - 1e-15
    if c < n:
        assert pass_at_k(np.array([n]), np.array([c + 1]), k)[0] >= value - 1e-15


# ---- maj@k


def majority(prompts: list[int], answers: list[int], correct: list[bool], k: int) -> list[float]:
    return maj_at_k(
        np.array(prompts, dtype=np.int64), np.array(answers, dtype=np.int64), np.array(correct, dtype=np.bool_), k
    ).tolist()


def by_voting(prompts: list[int], answers: list[int], correct: list[bool], k: int) -> list[float]:
    """One prompt after the other: the mean verdict of the answers with the most votes among the first k samples."""
    result = []
    for prompt in range(max(prompts, default=-1) + 1):
        samples = [(a, c) for p, a, c in zip(prompts, answers, correct, strict=True) if p == prompt][:k]
        votes = Counter(answer for answer, _ in samples if answer >= 0)
        most = max(votes.values(), default=0)
        winners = [answer for answer, count in votes.items() if count == most]
        verdicts = [next(c for a, c in samples if a == winner) for winner in winners]
        result.append(sum(verdicts) / len(verdicts) if verdicts else 0.0)
    return result


@pytest.mark.parametrize(
    ("answers", "right", "k", "expected"),
    [
        ([7, 7, 5], {7}, 3, 1.0),
        ([7, 7, 5], {5}, 3, 0.0),  # the majority is wrong
        ([5, 7, 7], {5}, 1, 1.0),  # only the first votes
        ([5, 7, 7], {5}, 2, 0.5),  # a tie of two
        ([5, 7, 7], {5}, 3, 0.0),
        ([5, 7, 9], {9}, 3, 1 / 3),  # a tie of three
        ([5, 7, 9], {5, 9}, 3, 2 / 3),
        ([5, 5, 7, 7, 9], {5}, 5, 0.5),  # the third place takes no part
        ([7, 5], {7}, 8, 0.5),  # fewer samples than k
        ([7], {7}, 8, 1.0),
        ([NONE, NONE, 7], {7}, 3, 1.0),  # no answer is no vote
        ([NONE, NONE, 7], {7}, 2, 0.0),  # but it is one of the first k
        ([NONE, NONE], {7}, 2, 0.0),
        ([-9, -2, 7, NONE], {7}, 4, 1.0),  # any negative code
        ([0, 0, 1], {0}, 3, 1.0),  # 0 is a code like any other
    ],
)
def test_the_majority_by_hand(answers: list[int], right: set[int], k: int, expected: float) -> None:
    correct = [answer in right for answer in answers]
    assert majority([0] * len(answers), answers, correct, k) == pytest.approx([expected], abs=1e-15)


def test_prompts_vote_apart_and_the_same_code_may_be_right_for_one_only() -> None:
    prompts, answers = [0, 1, 0, 1, 0, 1], [7, 7, 7, 5, 5, 5]
    correct = [True, False, True, True, False, True]
    assert majority(prompts, answers, correct, 3) == [1.0, 1.0]
    assert majority(prompts, answers, correct, 2) == [1.0, 0.5]


def test_the_order_of_samples_within_a_prompt_says_which_are_the_first_k() -> None:
    # Prompt 1's samples in order: 5 (wrong), 7, 7 (right).
    prompts, answers, correct = [1, 0, 1, 0, 1], [5, 3, 7, 3, 7], [False, True, True, True, True]
    assert majority(prompts, answers, correct, 1) == [1.0, 0.0]
    assert majority(prompts, answers, correct, 2) == [1.0, 0.5]
    assert majority(prompts, answers, correct, 3) == [1.0, 1.0]
    turned = [values[::-1] for values in (prompts, answers, correct)]
    assert majority(*turned, 1) == [1.0, 1.0]  # type: ignore[arg-type]


def test_prompts_without_samples_or_answers_score_0() -> None:
    assert majority([0, 2, 2], [4, NONE, NONE], [True, False, False], 2) == [1.0, 0.0, 0.0]
    assert majority([], [], [], 3) == []


@FEW
@given(
    samples=st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 3)), max_size=30),
    right=st.sets(st.tuples(st.integers(0, 4), st.integers(0, 3))),
    k=st.integers(1, 8),
)
def test_the_majority_is_what_voting_prompt_by_prompt_gives(
    samples: list[tuple[int, int]], right: set[tuple[int, int]], k: int
) -> None:
    prompts, answers = [p for p, _ in samples], [a for _, a in samples]
    correct = [sample in right for sample in samples]
    assert majority(prompts, answers, correct, k) == pytest.approx(by_voting(prompts, answers, correct, k), abs=1e-12)


@FEW
@given(
    samples=st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 3)), min_size=1, max_size=20),
    right=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3))),
    k=st.integers(1, 6),
    shift=st.integers(1, 10**12),
)
def test_the_codes_and_what_stands_between_a_prompts_samples_do_not_matter(
    samples: list[tuple[int, int]], right: set[tuple[int, int]], k: int, shift: int
) -> None:
    grouped = sorted(samples, key=lambda sample: sample[0])  # keeps the order within each prompt
    codes = [NONE if answer < 0 else 7 * answer + shift for _, answer in grouped]
    verdicts = [[sample in right for sample in order] for order in (samples, grouped)]
    expected = majority([p for p, _ in samples], [a for _, a in samples], verdicts[0], k)
    assert majority([p for p, _ in grouped], codes, verdicts[1], k) == pytest.approx(expected, abs=1e-12)


# ---- the standard error


def test_the_standard_error_is_unbiased() -> None:
    assert standard_error(np.array([1.0, 0.0, 1.0, 0.0])) == pytest.approx(math.sqrt(1 / 3) / 2)
    assert standard_error(np.array([0.5, 0.5])) == 0.0
    assert standard_error(np.array([1.0])) == 0.0
