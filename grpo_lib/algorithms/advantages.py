"""Advantage estimators: how much better a response, or a token of it, was than one would have expected.

An estimator names the columns that it wants. An *outcome* estimator returns one advantage a row, ``float64[B]``: every
token with mask 1 gets it. A *token* estimator returns ``TokenAdvantages``. Rows whose reward could not be computed are
taken out before (they belong to no statistic). A group of one has baseline 0 and standard deviation 1; in a group whose
rewards are all equal ``R - mean_g`` is exactly 0. Everything is computed over the whole iteration, in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from grpo_lib.algorithms.registry import Option, Registry
from grpo_lib.data.ragged import (
    GroupStatistics,
    compress,
    dense_groups,
    expand,
    group_max,
    group_statistics,
    group_sum,
    kept_offsets,
    repeat_rows,
    reverse_scan,
)
from grpo_lib.errors import AlgorithmError

Gamma = Annotated[float, Option(gt=0, le=1, description="Discount a token.")]


@dataclass(frozen=True, kw_only=True)
class TokenAdvantages:
    """What a token estimator gives; 0 where the mask is 0."""

    advantages: Tensor
    """``float64[N]``."""
    returns: Tensor | None = None
    """``float64[N]``: what a critic learns."""


ADVANTAGES: Registry[Callable[..., Tensor | TokenAdvantages]] = Registry(
    "advantage estimator",
    {
        "rewards": "`float64[B]`: the row's reward, shaped, with the KL penalty if it is in the reward",
        "group_ids": "`int64[B]`: rows of a group need not be adjacent",
        "lengths": "`int64[B]`: response tokens of the row",
        "valid_tokens": "`int64[B]`: tokens of the row with mask 1",
        "token_rewards": "`float64[N]`: the score on the row's last token with mask 1, plus scores of steps, "
        "minus the KL if in the reward",
        "token_scores": "`float64[N]`: scores of steps on their last tokens, NaN elsewhere (the reward gives them)",
        "mask": "`bool[N]`: tokens that take part in the loss",
        "offsets": "`int64[B+1]`",
        "greedy_rewards": "`float64[B]`: of the greedy response to the row's prompt (generated when named)",
        "components": "`float64[K, B]`: named parts of the reward",
        "component_names": "their K names",
        "values": "`float32[N]`: of the critic (trained when named)",
        "old_logprobs": "`float32[N]`: log pi_old",
        "sum_squared_probs": "`float32[N]`: sum_v pi_old(v)^2 (computed when named)",
        "is_weights": "`float32[N]` or None: importance weights of the rollout correction",
    },
)


@ADVANTAGES.register(
    "grpo",
    formula="(R - mean_g) / (std_g + 1e-6)",
    paper="Shao et al. 2024, DeepSeekMath, section 4.1, arXiv:2402.03300",
    use="the default: no critic, a group of responses is the baseline",
)
def grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Standard deviation unbiased.

    >>> grpo(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([5, 5, 5])).round(decimals=4).tolist()
    [0.5773, -1.1547, 0.5773]
    """
    group = group_statistics(rewards, group_ids)
    std = torch.where(group.size == 1, 1.0, group.std)
    return _over_baseline(rewards, group) / (std + 1e-6)


@ADVANTAGES.register(
    "grpo_process",
    formula="A_t = sum over steps j that end at t or later of (r_j - mean_g) / (std_g + 1e-6), over all steps of g",
    paper="Shao et al. 2024, DeepSeekMath, section 4.1.3, arXiv:2402.03300",
    use="rewards of steps (a process reward model): a token earns what comes from it on",
)
def grpo_process(token_scores: Tensor, group_ids: Tensor, mask: Tensor, offsets: Tensor) -> TokenAdvantages:
    """The outcome's reward does not count; add it as the score of the last step.

    Raises:
        AlgorithmError: no step of the iteration has a score.
    """
    steps = ~token_scores.isnan() & mask
    if not bool(steps.any()):
        raise AlgorithmError("algorithm.advantage=grpo_process needs a reward that gives step_scores or token_scores")
    places = torch.nonzero(steps).squeeze(1)
    rows = torch.searchsorted(offsets, places, right=True) - 1
    normalised = torch.zeros_like(token_scores, dtype=torch.float64)
    normalised[places] = grpo(token_scores[places], group_ids[rows])
    return TokenAdvantages(advantages=discounted_returns(normalised, mask, offsets, 1.0))


@ADVANTAGES.register(
    "dr_grpo",
    formula="R - mean_g",
    paper="Liu et al. 2025, Understanding R1-Zero-Like Training (Dr. GRPO), arXiv:2503.20783",
    use="GRPO without the division that favours very easy and very hard prompts",
)
def dr_grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The reward over the group's mean.

    >>> dr_grpo(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1, 1, 2])).tolist()
    [0.5, -0.5, 0.5]
    """
    return _over_baseline(rewards, group_statistics(rewards, group_ids))


@ADVANTAGES.register(
    "rloo",
    formula="R - mean of the other rows of g = n/(n-1) (R - mean_g)",
    paper="Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740",
    use="an unbiased baseline; small groups",
)
def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Leave one out.

    >>> rloo(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1, 1, 2])).tolist()
    [1.0, -1.0, 0.5]
    """
    group = group_statistics(rewards, group_ids)
    return _over_baseline(rewards, group) * group.size / (group.size - 1).clamp(min=1)


@ADVANTAGES.register(
    "reinforce_plus_plus",
    formula="whiten(G) over all tokens, G_t = r_t + gamma G_{t+1} over tokens with m = 1",
    paper="Hu et al. 2025, REINFORCE++, arXiv:2501.03262",
    use="no groups: one response a prompt is enough; usually with the KL in the reward",
)
def reinforce_plus_plus(token_rewards: Tensor, mask: Tensor, offsets: Tensor, *, gamma: Gamma = 1.0) -> TokenAdvantages:
    """Returns normalised over the batch."""
    returns = discounted_returns(token_rewards, mask, offsets, gamma)
    return TokenAdvantages(advantages=whiten(returns, mask), returns=returns)


@ADVANTAGES.register(
    "reinforce_plus_plus_baseline",
    formula="whiten(R - mean_g) over all tokens",
    paper="Hu et al. 2025, REINFORCE++, arXiv:2501.03262",
    use="groups as baseline, one scale for the whole batch",
)
def reinforce_plus_plus_baseline(rewards: Tensor, group_ids: Tensor, valid_tokens: Tensor) -> Tensor:
    """Whitening shifts by the batch's mean, so a group of equal rewards need not stay at 0 here."""
    return whiten_rows(_over_baseline(rewards, group_statistics(rewards, group_ids)), valid_tokens)


@ADVANTAGES.register(
    "remax",
    formula="G_t (gamma = 1) - R(greedy response to the same prompt)",
    paper="Li et al. 2023, ReMax, arXiv:2310.10505",
    use="one sampled response a prompt and a greedy one as its baseline",
)
def remax(token_rewards: Tensor, mask: Tensor, offsets: Tensor, greedy_rewards: Tensor) -> TokenAdvantages:
    """The greedy response is generated and judged in each iteration, and not trained on."""
    returns = discounted_returns(token_rewards, mask, offsets, 1.0)
    baseline = repeat_rows(greedy_rewards.double(), offsets)
    return TokenAdvantages(advantages=(returns - baseline).masked_fill(~mask, 0.0), returns=returns)


@ADVANTAGES.register(
    "opo",
    formula="R - sum_g(T R) / sum_g(T)",
    paper="Hao et al. 2025, On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585",
    use="strictly on-policy training; the baseline of least variance when gradients grow with length",
)
def opo(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """Length-weighted baseline.

    >>> opo(torch.tensor([1.0, 0.0]), torch.tensor([1, 1]), torch.tensor([3, 1])).tolist()
    [0.25, -0.75]
    """
    rewards, weights = rewards.double(), lengths.double()
    group, groups = dense_groups(group_ids)
    total = group_sum(weights, group, groups).clamp(min=1)
    baseline = group_sum(weights * rewards, group, groups) / total
    return _exact(rewards, baseline[group], group_statistics(rewards, group_ids))


@ADVANTAGES.register(
    "grpo_passk",
    formula="best row of g: (R_max - R_second) / (std_g + 1e-6), others 0",
    paper="Chen et al. 2025, Pass@k Training, arXiv:2508.10751",
    use="pass@k rather than pass@1: only the margin of the best response counts",
)
def grpo_passk(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Two rows that tie for the best have no margin: 0.

    Raises:
        AlgorithmError: a group of one.

    >>> grpo_passk(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1, 1, 1])).round(decimals=4).tolist()
    [1.0, 0.0, 0.0]
    """
    rewards = rewards.double()
    stats = group_statistics(rewards, group_ids)
    if bool((stats.size < 2).any()):
        raise AlgorithmError(
            f"{int((stats.size < 2).sum())} groups hold one row with a reward; algorithm.advantage=grpo_passk compares "
            "the best with the second: raise rollout.samples (at least 2), or take out what makes rewards fail"
        )
    group, groups = dense_groups(group_ids)
    best = group_max(rewards, group, groups)[group]
    is_best = rewards == best
    tied = group_sum(is_best.long(), group, groups)[group] > 1
    second = group_max(rewards.masked_fill(is_best, -torch.inf), group, groups)[group]
    second = torch.where(tied, best, second)
    return torch.where(is_best, (best - second) / (stats.std + 1e-6), 0.0)


@ADVANTAGES.register(
    "gpg",
    formula="alpha (R - mean_g) / f_norm, alpha = B / max(1, rows with R != 0)",
    paper="Chu et al. 2025, GPG, arXiv:2504.02546",
    use="sparse rewards: the gradient is scaled up when few responses earn anything",
)
def gpg(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    f_norm: Annotated[float, Option(gt=0, description="Divides the advantage.")] = 1.0,
) -> Tensor:
    """Policy gradient in its plainest form; with ``loss: reinforce``."""
    alpha = len(rewards) / max(1, int((rewards != 0).sum()))
    return alpha * _over_baseline(rewards, group_statistics(rewards, group_ids)) / f_norm


@ADVANTAGES.register(
    "gdpo",
    formula="whiten(sum_k w_k grpo(R^(k))) over the named components k of the reward",
    paper="Liu et al. 2026, GDPO, arXiv:2601.05242",
    use="several rewards at once: each is normalised in its group before they are added",
)
def gdpo(
    components: Tensor,
    component_names: tuple[str, ...],
    group_ids: Tensor,
    valid_tokens: Tensor,
    *,
    weights: Annotated[
        dict[str, float] | None,
        Option(min_length=1, description="Weight of each component that counts; null: 1 for each."),
    ] = None,
) -> Tensor:
    """Every row needs every component that counts.

    Raises:
        AlgorithmError: no components, one that the reward does not give, or a row without it.
    """
    known = ", ".join(component_names) or "none"
    chosen = dict.fromkeys(component_names, 1.0) if weights is None else weights
    wrong = [name for name in chosen if name not in component_names]
    if wrong or not chosen:
        raise AlgorithmError(
            f"algorithm.advantage=gdpo wants the reward's components {wrong or 'by name'}; the reward gives: {known}. "
            "Name them in algorithm.advantage_options.weights"
        )
    total = torch.zeros(components.shape[1], dtype=torch.float64)
    for name, weight in chosen.items():
        part = components[component_names.index(name)]
        if bool(part.isnan().any()):
            raise AlgorithmError(
                f"{int(part.isnan().sum())} rows have no component {name!r}; the reward function must give it for "
                "every response, or leave it out of algorithm.advantage_options.weights"
            )
        total += weight * grpo(part, group_ids)
    return whiten_rows(total, valid_tokens)


@ADVANTAGES.register(
    "optimal_token_baseline",
    aliases=["otb"],
    formula="G_t - sum_g(G_t W_t) / (sum_g W_t + 1e-8) by position t, W_t = cumsum(1 - 2 pi_t + sum_v pi_v^2) of the "
    "old policy, times w^2 when corrected; baseline 0 where only one row of the group still runs",
    paper="Li et al. 2026, The Optimal Token Baseline, arXiv:2602.07078",
    use="long responses: the baseline of least variance at every position",
)
def optimal_token_baseline(
    token_rewards: Tensor,
    mask: Tensor,
    offsets: Tensor,
    group_ids: Tensor,
    old_logprobs: Tensor,
    sum_squared_probs: Tensor,
    is_weights: Tensor | None,
) -> TokenAdvantages:
    """Positions are counted from the start of the response; a masked token adds nothing and has no baseline."""
    returns = discounted_returns(token_rewards, mask, offsets, 1.0)
    # At least 0 but for rounding, where the policy is sure of the token; of either sign the sums below could cancel.
    energy = (1 - 2 * old_logprobs.double().exp() + sum_squared_probs.double()).clamp(min=0)
    if is_weights is not None:
        energy = energy * is_weights.double().square()
    energy = energy.masked_fill(~mask, 0.0)
    # Cumulative from the front of the row: the scan of everything turned round.
    weight = reverse_scan(energy.flip(0), len(energy) - offsets.flip(0), 1.0).flip(0).masked_fill(~mask, 0.0)
    # One cell a (group, position); a group has as many as its longest row.
    group, groups = dense_groups(group_ids)
    lengths = offsets.diff()
    longest = group_max(lengths.double(), group, groups).clamp(min=0).long()
    first = torch.cumsum(longest, 0) - longest
    cell = repeat_rows(first[group] - offsets[:-1], offsets) + torch.arange(len(returns))
    cells = int(longest.sum())
    total = group_sum(weight, cell, cells)
    running = group_sum(mask.to(torch.int32), cell, cells)
    baseline = group_sum(returns * weight, cell, cells) / (total + 1e-8)
    baseline = baseline.masked_fill_(running <= 1, 0.0)[cell]
    return TokenAdvantages(advantages=(returns - baseline).masked_fill(~mask, 0.0), returns=returns)


@ADVANTAGES.register(
    "gae",
    formula="A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t over tokens with m = 1; G = A + V; "
    "then whiten(A)",
    paper="Schulman et al. 2016, GAE, eq. 16, arXiv:1506.02438",
    use="PPO: a critic's values say which token made the difference",
)
def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    offsets: Tensor,
    *,
    gamma: Gamma = 1.0,
    lam: Annotated[float, Option(ge=0, le=1, description="0: one step; 1: the whole return.")] = 0.95,
) -> TokenAdvantages:
    """Tokens with mask 0 are passed over: the next token of a token is the next one with mask 1."""
    inside, (rewards, v) = _compact(mask, offsets, token_rewards, values)
    following = torch.zeros_like(v)
    following[:-1] = v[1:]
    following[inside[1:][inside.diff() > 0] - 1] = 0.0  # after the last token there is nothing
    advantages = reverse_scan(rewards + gamma * following - v, inside, gamma * lam)
    return TokenAdvantages(advantages=expand(_whitened(advantages), mask), returns=expand(advantages + v, mask))


def discounted_returns(token_rewards: Tensor, mask: Tensor, offsets: Tensor, gamma: float) -> Tensor:
    """``G_t = r_t + gamma G_{t+1}`` over tokens with mask 1, ``float64[N]``; 0 at the others, which it passes."""
    inside, (rewards,) = _compact(mask, offsets, token_rewards)
    return expand(reverse_scan(rewards, inside, gamma), mask)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """``(x - mean_m) / sqrt(var_m + 1e-8) * m`` over all tokens, ``float64[N]``; variance unbiased.

    All 0 where the values with mask 1 are all equal.
    """
    return expand(_whitened(compress(values, mask).double()), mask)


def _whitened(values: Tensor) -> Tensor:
    if len(values) == 0 or bool(values.min() == values.max()):
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.var() + 1e-8).sqrt()


def whiten_rows(values: Tensor, valid_tokens: Tensor) -> Tensor:
    """``whiten`` of one value a row ``[B]``, each counted ``valid_tokens [B]`` times, without spreading it."""
    values, weights = values.double(), valid_tokens.double()
    counted = values[valid_tokens > 0]
    if len(counted) == 0 or bool(counted.min() == counted.max()):
        return torch.zeros_like(values)
    tokens = weights.sum()
    mean = (weights * values).sum() / tokens
    variance = (weights * (values - mean).square()).sum() / (tokens - 1)
    return (values - mean) / (variance + 1e-8).sqrt()


def _compact(mask: Tensor, offsets: Tensor, *columns: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Rows' offsets and columns (in float64) of the tokens with mask 1 alone."""
    if bool(mask.all()):
        return offsets, [column.double() for column in columns]
    return kept_offsets(mask, offsets), [compress(column, mask).double() for column in columns]


def _over_baseline(rewards: Tensor, group: GroupStatistics) -> Tensor:
    """``R - mean_g``: exactly 0 in groups of equal rewards, not the mean's rounding; ``R`` in a group of one."""
    return _exact(rewards.double(), group.mean, group)


def _exact(rewards: Tensor, baseline: Tensor, group: GroupStatistics) -> Tensor:
    over = torch.where(group.constant, 0.0, rewards - baseline)
    return torch.where(group.size == 1, rewards, over)
