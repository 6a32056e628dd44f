"""Rewards of a whole iteration to the per-token advantages, weights and mask that the update reads."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from grpo_lib.algorithms.advantages import TokenAdvantages
from grpo_lib.algorithms.filters import overlong_penalty
from grpo_lib.algorithms.kl import adaptive_coef
from grpo_lib.algorithms.registry import Entry, call, columns_of
from grpo_lib.algorithms.rollout_correction import correct
from grpo_lib.data.columns import flat_column, list_array, ragged_column
from grpo_lib.data.iteration import Iteration, Rows
from grpo_lib.data.ragged import Ragged, group_statistics, place_rows, repeat_rows, segment_sum, spread_rows
from grpo_lib.data.schemas import ADVANTAGE_EXTRAS, ADVANTAGES, FLOATS, MASK
from grpo_lib.errors import AlgorithmError, RewardError


@dataclass(frozen=True, kw_only=True)
class KlInReward:
    """A KL penalty that is taken off the reward of each token."""

    estimator: Callable[[Tensor, Tensor], Tensor]
    coef: float
    """Of this iteration."""
    target: float | None = None
    """Adaptive: the KL aimed at; None: the coefficient is fixed."""
    horizon: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """What becomes of responses that are too long."""

    max_length: int
    buffer: int | None
    penalty: float
    mask_truncated: bool


@dataclass(frozen=True, kw_only=True)
class AdvantagePlan:
    """What the configuration asks for, as functions and numbers."""

    estimator: Callable[..., Tensor | TokenAdvantages]
    grouping: Entry[Any]
    correction: dict[str, Any]
    """Keyword arguments of ``correct``."""
    overlong: Overlong
    kl: KlInReward | None = None
    metrics: Sequence[tuple[str, Callable[..., float]]] = ()
    policy_version: int | None = None
    """Of the policy that learns; None: staleness is not measured."""


def advantage_table(data: Iteration, plan: AdvantagePlan) -> tuple[pa.Table, dict[str, float]]:
    """Advantages, mask and, where there are any, returns and importance weights; with the numbers of the stage.

    A row whose reward is null, or that the filters left out, belongs to no statistic and its mask is cleared. So is the
    mask of tokens with an infinite log-prob, and of what the rollout correction rejects.

    Raises:
        RewardError: no row has a reward.
        AlgorithmError: nothing is left of the rows, or the estimator can't work with them.
    """
    rewards = flat_column(data.rewards, "value").double()
    scored = ~torch.isnan(rewards)
    if not bool(scored.any()):
        raise RewardError(f"none of the {len(rewards)} rewards of the iteration could be computed; see their reasons")
    used = scored if data.used is None else scored & data.used
    if data.greedy is not None:
        used = used & ~torch.isnan(flat_column(data.greedy, "value")[data.prompt_rows])
    if not bool(used.any()):
        raise AlgorithmError(
            "no row of the iteration is left after filters, null rewards and null rewards of greedy responses"
        )
    summary = {"rows_without_reward": float((~scored).sum())}

    in_loss = used & ~data.truncated if plan.overlong.mask_truncated else used
    mask, weights, mismatch = _corrected(data, in_loss, plan.correction)
    summary |= mismatch
    if not bool(mask.values.any()):
        raise AlgorithmError(
            f"no response token of the iteration is left: {int((used & ~in_loss).sum())} of {int(used.sum())} rows are "
            f"truncated and masked (algorithm.overlong.mask_truncated), "
            f"{mismatch['mismatch/nonfinite_tokens']:.0f} tokens have an infinite log-prob; raise "
            "rollout.max_new_tokens, or look at the engine"
        )
    if plan.policy_version is not None:
        staleness = plan.policy_version - flat_column(data.rollouts, "policy_version").double()
        summary |= {"staleness_mean": float(staleness.mean()), "staleness_max": float(staleness.max())}

    penalty = None
    if plan.kl is not None:
        penalty, numbers = _kl_penalty(data, mask, plan.kl, rows=int(used.sum()))
        summary |= numbers
    bonus = _token_bonus(data, mask, penalty)
    chosen = torch.nonzero(used).squeeze(1)
    scores = rewards[chosen]
    if plan.overlong.buffer is not None:
        overlong = plan.overlong
        shaped = overlong_penalty(
            mask.lengths[chosen], max_length=overlong.max_length, buffer=plan.overlong.buffer, penalty=overlong.penalty
        )
        summary["overlong_penalty_mean"] = float(shaped.mean())
        scores = scores + shaped
    rows = Rows(
        data,
        chosen,
        scores=scores,
        group_ids=data.group_ids(plan.grouping)[chosen],
        mask=mask,
        token_bonus=bonus,
        is_weights=weights,
    )
    made = call(plan.estimator, rows)
    summary |= _numbers(rows, made)
    tokens = _to_tokens(made, rows)
    if "values" in columns_of(plan.estimator) and tokens.returns is None:
        raise AlgorithmError(
            "the advantage estimator reads the critic's values but gives no returns to learn; add them"
        )
    rows.advantages = tokens.advantages
    summary |= {f"metric/{name}": _finite(name, call(function, rows)) for name, function in plan.metrics}

    columns = {
        "rollout_id": data.rollouts.column("rollout_id"),
        "advantages": list_array(place_rows(tokens.advantages, used, mask), FLOATS),
        "response_mask": list_array(mask.with_values(mask.values.to(torch.uint8)), MASK),
    }
    if tokens.returns is not None and data.values is not None:  # what the critic learns
        columns["returns"] = list_array(place_rows(tokens.returns, used, mask), FLOATS)
    if weights is not None:
        columns["is_weights"] = list_array(mask.with_values(weights), FLOATS)
    if data.copies is not None:
        columns["copies"] = pa.array(data.copies.numpy(), pa.int32())
    extras = [field for field in ADVANTAGE_EXTRAS if field.name in columns]
    return pa.table(columns, schema=pa.schema([*ADVANTAGES, *extras])), summary


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise AlgorithmError(f"algorithm.metrics: {name} gives {value} in this iteration; mend or remove it")
    return float(value)


def _corrected(
    data: Iteration, in_loss: Tensor, settings: dict[str, Any]
) -> tuple[Ragged, Tensor | None, dict[str, float]]:
    """The mask after rejection (``bool``), the weights, and the mismatch of engine and trainer.

    In bypass mode nothing is recomputed, so there is nothing to compare: only infinite log-probs are dropped here.
    """
    given = ragged_column(data.rollouts, "response_mask")
    rollout = ragged_column(data.rollouts, "rollout_logprobs").values
    mask = given.values.bool() & repeat_rows(in_loss, given.offsets)
    if data.old is None:
        finite = rollout.isfinite()
        dropped = {"mismatch/nonfinite_tokens": float((mask & ~finite).sum())}
        return given.with_values(mask & finite), None, dropped
    result = correct(data.old_logprobs.values, rollout, mask, given.offsets, **settings)
    return (
        given.with_values(result.mask),
        result.weights,
        {f"mismatch/{name}": value for name, value in result.metrics.items()},
    )


def _kl_penalty(data: Iteration, mask: Ragged, kl: KlInReward, rows: int) -> tuple[Tensor, dict[str, float]]:
    """Coefficient times KL of every token, ``float64[N]``, and the coefficient after an iteration of ``rows`` rows."""
    assert data.ref is not None, "a KL in the reward needs ref_logprobs"
    ref = ragged_column(data.ref, "ref_logprobs").values
    values = kl.estimator(data.old_logprobs.values.double(), ref.double()).masked_fill(~mask.values, 0.0)
    mean = float(values.sum() / max(1, int(mask.values.sum())))
    following = kl.coef
    if kl.target is not None:
        following = adaptive_coef(kl.coef, mean, rows, target=kl.target, horizon=kl.horizon)
    return kl.coef * values, {"kl_in_reward": mean, "kl_coef": kl.coef, "next_kl_coef": following}


def _token_bonus(data: Iteration, mask: Ragged, penalty: Tensor | None) -> Tensor | None:
    """What counts at each token beside the scores, ``float64[N]``; None: nothing does."""
    if "token_scores" not in data.rewards.column_names:
        return None if penalty is None else -penalty
    scores = ragged_column(data.rewards, "token_scores").values.double()  # NaN: the token ends no step
    bonus = scores.masked_fill(scores.isnan() | ~mask.values, 0.0)
    return bonus if penalty is None else bonus - penalty


def _numbers(rows: Rows, made: Tensor | TokenAdvantages) -> dict[str, float]:
    """Of outcome advantages per row, of token advantages per token with mask 1."""
    values = made if isinstance(made, Tensor) else made.advantages[rows.mask]
    if len(values) == 0:
        values = torch.zeros(1)
    if isinstance(made, Tensor):
        nothing = made == 0
    else:
        nothing = segment_sum((made.advantages != 0).long(), rows.offsets) == 0
    constant = group_statistics(rows.rewards, rows.group_ids).constant & nothing
    return {
        "abs_mean": float(values.abs().mean()),
        "min": float(values.min()),
        "max": float(values.max()),
        "rows_without_signal_fraction": float(constant.double().mean()),
    }


def _to_tokens(made: Tensor | TokenAdvantages, rows: Rows) -> TokenAdvantages:
    """A row's advantage at each of its tokens with mask 1."""
    if isinstance(made, TokenAdvantages):
        return made
    return TokenAdvantages(advantages=spread_rows(made, rows.mask, rows.offsets))
