"""From per-token losses to one scalar: the one place that divides.

Every mode is a weighted sum ``sum_t c_t l_t`` whose weights depend only on the mask of the optimizer step's *whole*
mini-batch. The weights are computed before the first backward pass; a micro-batch then adds its own terms, so that
any split into micro-batches, in any order, on any number of ranks, gives the same loss and gradient.

A mode maps ``mask [N]`` (1 where the token takes part), ``offsets int64[B+1]`` and the constant ``max_response_length``
to ``c [N]`` in float64. Rows without a valid token do not count as rows.
"""

from collections.abc import Callable

from torch import Tensor

from grpo_lib.algorithms.registry import Registry
from grpo_lib.data.ragged import repeat_rows, segment_sum

Aggregation = Callable[[Tensor, Tensor, int], Tensor]
AGGREGATIONS: Registry[Aggregation] = Registry(
    "aggregation",
    {
        "mask": "`[N]`: 1 where the token takes part",
        "offsets": "`int64[B+1]`",
        "max_response_length": "`rollout.max_new_tokens`",
    },
)


@AGGREGATIONS.register(
    "token-mean",
    formula="sum(m l) / sum(m)",
    paper="Yu et al. 2025, DAPO, eq. 8, arXiv:2503.14476",
    use="every token counts the same, so long responses count more (the default)",
)
def token_mean(mask: Tensor, offsets: Tensor, max_response_length: int) -> Tensor:
    """``sum(m l) / sum(m)`` (DAPO)."""
    return mask.double() / mask.double().sum().clamp(min=1)


@AGGREGATIONS.register(
    "token-sum",
    formula="sum(m l)",
    paper="Williams 1992, REINFORCE",
    use="the plain sum; the learning rate then depends on the batch",
)
def token_sum(mask: Tensor, offsets: Tensor, max_response_length: int) -> Tensor:
    """``sum(m l)``."""
    return mask.double()


@AGGREGATIONS.register(
    "seq-mean-token-mean",
    formula="mean over rows of mean_m(l)",
    paper="Shao et al. 2024, DeepSeekMath, eq. 3, arXiv:2402.03300",
    use="every response counts the same (GRPO, GSPO, GMPO)",
)
def seq_mean_token_mean(mask: Tensor, offsets: Tensor, max_response_length: int) -> Tensor:
    """Mean over rows of the row's token mean (the GRPO paper)."""
    per_row = segment_sum(mask.double(), offsets)
    return mask.double() / repeat_rows(per_row.clamp(min=1), offsets) / _valid_rows(per_row)


@AGGREGATIONS.register(
    "seq-mean-token-sum",
    formula="mean over rows of sum(m l)",
    paper="Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740",
    use="the gradient of the expected reward of a whole response",
)
def seq_mean_token_sum(mask: Tensor, offsets: Tensor, max_response_length: int) -> Tensor:
    """Mean over rows of the row's token sum."""
    return mask.double() / _valid_rows(segment_sum(mask.double(), offsets))


@AGGREGATIONS.register(
    "seq-mean-token-sum-norm",
    formula="mean over rows of sum(m l) / max_response_length",
    paper="Liu et al. 2025, Dr. GRPO, arXiv:2503.20783",
    use="as before, over a constant: no bias towards short or long responses",
)
def seq_mean_token_sum_norm(mask: Tensor, offsets: Tensor, max_response_length: int) -> Tensor:
    """Mean over rows of the row's token sum over the constant ``max_response_length`` (Dr. GRPO)."""
    return seq_mean_token_sum(mask, offsets, max_response_length) / max_response_length


def _valid_rows(tokens_per_row: Tensor) -> Tensor:
    return (tokens_per_row > 0).sum().clamp(min=1)
