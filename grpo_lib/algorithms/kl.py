"""Per-token estimators of KL(policy || reference), and the coefficient's controllers.

``x = logprobs - ref_logprobs`` of the sampled token. Each estimator maps ``[N]`` and ``[N]`` to ``[N]`` nats. Any name
with ``+`` behind it has the estimator's value and the gradient of k2, which is the unbiased one (``kl_estimator``).
"""

from collections.abc import Callable

from torch import Tensor

from grpo_lib.algorithms.distributions import full_kl
from grpo_lib.algorithms.registry import Registry, nearest
from grpo_lib.errors import ConfigError

KlEstimator = Callable[[Tensor, Tensor], Tensor]
KL_ESTIMATORS: Registry[KlEstimator] = Registry(
    "KL estimator",
    {
        "logprobs": "`[N]`: log pi of the sampled token, with gradient",
        "ref_logprobs": "`[N]`: log pi_ref of it",
        "logits": "`[n, V]` over the temperature, with gradient; only inside the fused log-prob pass",
        "ref_logits": "`[n, V]` of the reference",
    },
)
SCHULMAN = "Schulman 2020, Approximating KL divergence"


@KL_ESTIMATORS.register("k1", aliases=["kl"], formula="x", paper=SCHULMAN, use="unbiased, of either sign")
def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``x``. As a loss its gradient is that of the log-prob alone: use ``k1+``."""
    return logprobs - ref_logprobs


@KL_ESTIMATORS.register("abs", formula="abs(x)", paper="Ziegler et al. 2019", use="a bound on drift of either sign")
def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``|x|``."""
    return (logprobs - ref_logprobs).abs()


@KL_ESTIMATORS.register(
    "k2", aliases=["mse"], formula="x^2 / 2", paper=SCHULMAN, use="a loss: its gradient is unbiased"
)
def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``x^2 / 2``: biased value, unbiased gradient."""
    return (logprobs - ref_logprobs).square() / 2


@KL_ESTIMATORS.register(
    "k3",
    aliases=["low_var_kl"],
    formula="exp(-x) - 1 + x",
    paper=SCHULMAN,
    use="a value of low variance, never negative",
)
def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``exp(-x) - 1 + x``, never negative; ``-x`` clamped to [-20, 20], the result to [-10, 10].

    As a loss its gradient is not that of the KL (0.632 instead of 1 at x = 1): ``k3+`` has the right one.
    """
    d = (ref_logprobs - logprobs).clamp(-20, 20)
    return (d.expm1() - d).clamp(-10, 10)


@KL_ESTIMATORS.register(
    "full",
    formula="sum_v pi(v) (log pi(v) - log pi_ref(v))",
    paper="Kullback and Leibler 1951",
    use="exact; costs a pass of the reference inside the update, and works in the loss only",
    from_logits=True,
)
def full(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """The KL of the two distributions over the vocabulary, ``[n, V]`` and ``[n, V]`` to ``[n]``."""
    return full_kl(logits, ref_logits)


def straight_through(value: Tensor, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``value`` with the gradient of k2."""
    surrogate = k2(logprobs, ref_logprobs)
    return value.detach() + (surrogate - surrogate.detach())


def kl_estimator(name: str) -> KlEstimator:
    """The estimator of the sampled token's log-probs with that name; a ``+`` behind it makes it straight-through.

    Raises:
        ConfigError: no such name, or one that needs the logits.
    """
    base = name.removesuffix("+")
    if base not in KL_ESTIMATORS:
        raise ConfigError(f"unknown KL estimator {name!r}; {nearest(base, KL_ESTIMATORS.names())} (each also with +)")
    entry = KL_ESTIMATORS[base]
    if entry.traits.get("from_logits"):
        raise ConfigError(
            f"KL estimator {name!r} needs the logits of both policies; "
            "stored log-probs can't give it: take k1, k2 or k3"
        )
    if base == name:
        return entry.function

    def estimator(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return straight_through(entry.function(logprobs, ref_logprobs), logprobs, ref_logprobs)

    return estimator


def importance_corrected(kl: Tensor, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """``kl * exp(logprobs - old_logprobs)``, gradient through the ratio: for batches that another policy sampled."""
    return kl * (logprobs - old_logprobs).clamp(-20, 20).exp()


def adaptive_coef(coef: float, kl: float, rows: int, *, target: float, horizon: float) -> float:
    """The next KL coefficient: ``coef * (1 + e * rows / horizon)``, ``e = clip(kl / target - 1, -0.2, 0.2)``.

    Ziegler et al. 2019, section 2.2. ``kl`` is the mean per token of the batch just seen, of ``rows`` rows.

    >>> adaptive_coef(0.1, 0.2, 100, target=0.1, horizon=1000)
    0.10200000000000001
    """
    error = min(0.2, max(-0.2, kl / target - 1))
    return coef * (1 + error * rows / horizon)
