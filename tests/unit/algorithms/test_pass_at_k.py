import math
from itertools import combinations

import numpy as np
import pytest

from grpo_lib.algorithms.evaluation import pass_at_k, standard_error


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


def test_the_standard_error_is_unbiased() -> None:
    assert standard_error(np.array([1.0, 0.0, 1.0, 0.0])) == pytest.approx(math.sqrt(1 / 3) / 2)
    assert standard_error(np.array([0.5, 0.5])) == 0.0
    assert standard_error(np.array([1.0])) == 0.0
