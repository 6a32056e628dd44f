"""What an iteration generates and learns from: numbers of rows, and the distribution of their lengths."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

POINTS = 4096
"""Quantiles that stand for a distribution."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The batch of an iteration. Response lengths are log-normal, cut at ``max_tokens``."""

    prompts: int
    samples: int
    prompt_tokens: int
    mean_tokens: float
    """Of a response, after the cut."""
    max_tokens: int
    spread: float = 0.8
    """Standard deviation of the logarithm of a length before the cut. Assumed; see the sensitivity."""
    optimizer_steps: int = 1
    old_logprobs: bool = True
    ref_logprobs: bool = False

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        """Of all rows, prompts included."""
        return self.rows * (self.prompt_tokens + self.mean_tokens)

    def lengths(self, rows: int) -> NDArray[np.int64]:
        """Of ``rows`` of the rows, in rising order; the longest of all is among them: all wait for it."""
        median = _median(self.mean_tokens, self.max_tokens, self.spread)
        found = _quantiles(median, self.max_tokens, self.spread, rows)
        found[-1] = _quantiles(median, self.max_tokens, self.spread, self.rows)[-1]
        return np.maximum(1, np.rint(found)).astype(np.int64)


def truncated_workload_mean(max_tokens: int, truncated: float, spread: float) -> float:
    """Mean length where ``truncated`` of the rows reach ``max_tokens``."""
    median = max_tokens * float(np.exp(-spread * ndtri(1 - truncated)))
    return float(_quantiles(median, max_tokens, spread, POINTS).mean())


def _quantiles(median: float, longest: int, spread: float, count: int) -> NDArray[np.float64]:
    at = (np.arange(count) + 0.5) / count
    return np.minimum(median * np.exp(spread * ndtri(at)), longest)


@lru_cache(maxsize=1024)
def _median(mean: float, longest: int, spread: float) -> float:
    """Of the uncut distribution whose cut one has that mean."""
    assert mean < longest, f"a mean of {mean} is no mean of lengths up to {longest}"
    low, high = 1e-3, 1e9
    while high / low > 1 + 1e-9:
        middle = (low * high) ** 0.5
        below = _quantiles(middle, longest, spread, POINTS).mean() < mean
        low, high = (middle, high) if below else (low, middle)
    return low
