"""Held-out metrics from per-sample outcomes."""

import numpy as np
from numpy.typing import NDArray


def pass_at_k(samples: NDArray[np.int64], correct: NDArray[np.int64], k: int) -> NDArray[np.float64]:
    """Unbiased pass@k of each prompt: ``1 - C(n-c, k) / C(n, k)`` (Chen et al. 2021, equation 1).

    Args:
        samples: ``[P]``, n: samples of each prompt, at least k.
        correct: ``[P]``, c: how many of them were right.

    >>> pass_at_k(np.array([4]), np.array([1]), 2).tolist()
    [0.5]
    """
    assert (samples >= k).all(), f"pass@{k} needs at least {k} samples a prompt"
    factors = np.arange(k, dtype=np.float64)
    wrong = (samples - correct)[:, None] - factors
    return 1.0 - np.prod(np.clip(wrong, 0, None) / (samples[:, None] - factors), axis=1)


def standard_error(values: NDArray[np.float64]) -> float:
    """Standard error of the mean of independent values, 0 for fewer than two."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
