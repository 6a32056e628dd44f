"""Per-token estimators of KL(policy || reference) from the log-probs of the sampled tokens.

``x = logprobs - ref_logprobs``. Each maps ``[N]`` and ``[N]`` to ``[N]`` (Schulman 2020, "Approximating KL
divergence").
"""

from collections.abc import Callable

from torch import Tensor

from grpo_lib.algorithms.registry import Registry

KlEstimator = Callable[[Tensor, Tensor], Tensor]
KL_ESTIMATORS: Registry[KlEstimator] = Registry("KL estimator")


@KL_ESTIMATORS.register("k1")
def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``x``: unbiased, of either sign."""
    return logprobs - ref_logprobs


@KL_ESTIMATORS.register("k2")
def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``x^2 / 2``: biased value; as a loss its gradient is the unbiased one."""
    return (logprobs - ref_logprobs).square() / 2


@KL_ESTIMATORS.register("k3")
def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``exp(-x) - 1 + x``, never negative; ``-x`` clamped to [-20, 20], the result to [-10, 10]."""
    d = (ref_logprobs - logprobs).clamp(-20, 20)
    return (d.expm1() - d).clamp(-10, 10)
