"""Whether one policy is better than another on the same prompts."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

RESAMPLES = 9999
"""Sign patterns that are drawn where there are more than so many; all of them otherwise (up to 13 differences)."""


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """The mean of paired differences, and how sure it is."""

    count: int
    mean: float
    low: float
    """Of the confidence interval of the mean (Student's t)."""
    high: float
    p_greater: float
    """Probability of a mean at least as high if neither were better: one-sided."""
    p_less: float
    """Of a mean at least as low."""


def paired_test(differences: NDArray[np.float64], *, confidence: float = 0.95, seed: int = 0) -> PairedTest:
    """Sign-flip permutation test (Fisher 1935) and t interval of the mean of paired differences.

    If neither is better each difference is as likely as its negative. Exact where at most ``RESAMPLES`` patterns of
    signs exist, else by Monte Carlo with that many, reproducible from ``seed``.

    Args:
        differences: ``[P]``, a prompt's accuracy of the one minus that of the other, in [-1, 1].
        confidence: of the interval, in (0, 1).

    >>> test = paired_test(np.array([1.0, 1.0, 1.0, 1.0, 0.0]))
    >>> test.mean, test.p_greater, test.p_less
    (0.8, 0.0625, 1.0)
    """
    assert len(differences)
    assert 0 < confidence < 1
    mean = float(differences.mean())
    low, high = _interval(differences, confidence)
    moved = differences[differences != 0]  # the sign of the others changes nothing
    p_greater, p_less = (_p_value(moved, side, seed) for side in ("greater", "less"))
    return PairedTest(count=len(differences), mean=mean, low=low, high=high, p_greater=p_greater, p_less=p_less)


def _interval(differences: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    count, mean = len(differences), float(differences.mean())
    if count < 2:
        return -1.0, 1.0
    reach = float(stats.t.ppf((1 + confidence) / 2, count - 1) * differences.std(ddof=1) / np.sqrt(count))
    return max(-1.0, mean - reach), min(1.0, mean + reach)


def _p_value(moved: NDArray[np.float64], side: str, seed: int) -> float:
    if not len(moved):
        return 1.0
    if len(moved) == 1:  # too few for SciPy
        return 0.5 if (moved[0] > 0) == (side == "greater") else 1.0
    found = stats.permutation_test(
        (moved,),
        lambda each, axis: each.sum(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=1000,
        alternative=side,
        rng=np.random.default_rng(seed),
    )
    return float(found.pvalue)
