"""Paired differences against numbers worked out by hand."""

import numpy as np
import pytest
from scipy import stats

from grpo_lib.algorithms.paired import paired_test


def test_three_gains_and_a_loss_have_the_p_value_of_all_sixteen_sign_patterns() -> None:
    # Sums of +-1 +-1 +-1 +-1 that are at least 2: the one of four gains and the four of three gains, of 16.
    found = paired_test(np.array([1.0, 1.0, 1.0, -1.0]))
    assert found.mean == 0.5
    assert found.p_greater == pytest.approx(5 / 16)
    assert found.p_less == pytest.approx(15 / 16)


def test_sizes_count_and_ties_do_not() -> None:
    # 0.5 and 1: sums of at least 0.5 are 1.5 and 0.5, two of four patterns; the three zeros change nothing.
    found = paired_test(np.array([-0.5, 0.0, 1.0, 0.0, 0.0]))
    assert found.count == 5
    assert found.mean == pytest.approx(0.1)
    assert (found.p_greater, found.p_less) == (0.5, 0.75)


def test_the_interval_is_that_of_student() -> None:
    # Mean 0.25, standard deviation 0.5, t(3) at 97.5 % = 3.182446.
    found = paired_test(np.array([0.0, 0.0, 0.0, 1.0]))
    assert found.low == pytest.approx(0.25 - 3.182446 * 0.5 / 2, abs=1e-6)
    assert found.high == 1.0, "0.25 + 0.7956 is cut at the largest difference"
    narrower = paired_test(np.array([0.0, 0.0, 0.0, 1.0]), confidence=0.6)
    assert narrower.low == pytest.approx(0.25 - stats.t.ppf(0.8, 3) * 0.25)


def test_one_prompt_or_none_that_moved_proves_nothing() -> None:
    alone = paired_test(np.array([1.0]))
    assert (alone.p_greater, alone.p_less, alone.low, alone.high) == (0.5, 1.0, -1.0, 1.0)
    worse = paired_test(np.array([-0.5, 0.0]))
    assert (worse.p_greater, worse.p_less) == (1.0, 0.5)
    same = paired_test(np.zeros(100))
    assert (same.p_greater, same.p_less, same.low, same.high) == (1.0, 1.0, 0.0, 0.0)


def test_many_prompts_are_drawn_by_the_seed_and_agree_with_the_binomial_test() -> None:
    # 40 prompts that moved by 1, 27 of them up: the sign-flip test is the sign test.
    differences = np.array([1.0] * 27 + [-1.0] * 13 + [0.0] * 60)
    exact = stats.binom.sf(26, 40, 0.5)
    found = paired_test(differences, seed=1)
    assert found.p_greater == pytest.approx(exact, abs=0.004)
    assert found == paired_test(differences, seed=1)
    assert found.p_greater != paired_test(differences, seed=2).p_greater
