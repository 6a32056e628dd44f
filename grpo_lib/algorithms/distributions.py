"""What is read off the distribution over the vocabulary: from logits ``[n, V]``, in float32 or better.

The logits are those of the sampling distribution: divided by the rollout temperature beforehand.
"""

from torch import Tensor


def token_entropy(logits: Tensor) -> Tensor:
    """``logsumexp(z) - sum_v softmax(z) z`` in nats, ``[n]``; differentiable.

    >>> import torch
    >>> token_entropy(torch.zeros(1, 4)).exp().round(decimals=4).tolist()
    [4.0]
    """
    return entropy_of(logits.log_softmax(-1))


def entropy_of(log_p: Tensor) -> Tensor:
    """The same from log-probs ``[n, V]`` that sum to 1."""
    return -_times(log_p.exp(), log_p).sum(-1)


def sum_squared_probs(logits: Tensor) -> Tensor:
    """``sum_v pi(v)^2``, ``[n]``: the chance that two draws are equal (``optimal_token_baseline``)."""
    return logits.softmax(-1).square().sum(-1)


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """``sum_v pi (log pi - log pi_ref)`` in nats, ``[n]``; differentiable, exact."""
    log_p, log_q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return _times(log_p.exp(), log_p - log_q).sum(-1)


def _times(probability: Tensor, factor: Tensor) -> Tensor:
    """The product, 0 where the probability is 0 whatever the factor (a logit of -inf)."""
    return probability * factor.masked_fill(probability == 0, 0.0)
