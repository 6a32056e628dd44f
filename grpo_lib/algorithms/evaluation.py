"""Held-out metrics from per-sample outcomes. ``P`` prompts with their samples as ragged rows."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from grpo_lib.data.ragged import segment_mean


def mean_at_n(correct: Tensor, offsets: Tensor) -> Tensor:
    """Mean over the samples of each prompt, ``[N]`` and ``int64[P+1]`` to ``float64[P]``.

    >>> mean_at_n(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 2, 3])).tolist()
    [0.5, 1.0]
    """
    return segment_mean(correct.double(), offsets)


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


def maj_at_k(
    prompts: NDArray[np.int64], answers: NDArray[np.int64], correct: NDArray[np.bool_], k: int
) -> NDArray[np.float64]:
    """Whether the commonest answer among the first ``k`` samples of each prompt is right (Wang et al. 2022, section 2).

    Where answers tie for the commonest, the mean of theirs: the expectation of a fair pick.

    Args:
        prompts: ``int64[N]``: which prompt a sample answers, ``0..P-1``; the order within a prompt counts.
        answers: ``int64[N]``: a code of the answer, the same for answers that count as equal; negative: no answer.
        correct: ``bool[N]``: equal answers to a prompt are all right or all wrong.
        k: samples that vote; prompts with fewer samples vote with what they have.

    Returns:
        ``float64[P]``; 0 for a prompt without any answer.

    >>> maj_at_k(np.array([0, 0, 0]), np.array([7, 7, 5]), np.array([True, True, False]), 3).tolist()
    [1.0]
    """
    count = int(prompts.max()) + 1 if len(prompts) else 0
    order = np.argsort(prompts, kind="stable")
    starts = np.searchsorted(prompts[order], np.arange(count))
    rank = np.arange(len(prompts)) - starts[prompts[order]]
    votes = order[(rank < k) & (answers[order] >= 0)]
    # One entry a (prompt, answer), with its votes.
    keys, first, size = np.unique(
        np.stack([prompts[votes], answers[votes]]), axis=1, return_index=True, return_counts=True
    )
    owner = keys[0]
    most = np.zeros(count, dtype=np.int64)
    np.maximum.at(most, owner, size)
    wins = size == most[owner]
    winners = np.bincount(owner[wins], minlength=count)
    right = np.bincount(owner[wins], weights=correct[votes][first[wins]].astype(np.float64), minlength=count)
    return right / np.maximum(winners, 1)


def standard_error(values: NDArray[np.float64]) -> float:
    """Standard error of the mean of independent values, 0 for fewer than two."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
