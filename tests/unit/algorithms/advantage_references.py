"""Advantage estimators written token by token from their formulas, in plain Python, and iterations to compare on.

``expected(name, rows, ...)`` is slow and obvious; it shares no code with ``grpo_lib``.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

COMPONENTS = ("right", "format", "short")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One response; every list has one entry a token. What stands at a token with mask 0 must not matter."""

    group: int
    reward: float
    mask: list[bool]
    token_rewards: list[float]
    greedy_reward: float
    components: list[float]
    values: list[float]
    old_logprobs: list[float]
    sum_squared_probs: list[float]
    is_weights: list[float]

    @property
    def valid(self) -> list[int]:
        """Positions with mask 1."""
        return [t for t, taken in enumerate(self.mask) if taken]


Tokens = list[list[float]]


# ---------------------------------------------------------------------------------------------------- the formulas


def expected(name: str, rows: list[Row], corrected: bool = False, **options: object) -> tuple[Tokens, Tokens | None]:
    """Advantages of every token, and the returns where the estimator has any."""
    if name in OUTCOME:
        of_row = OUTCOME[name](rows, **options)
        return [[a if taken else 0.0 for taken in row.mask] for a, row in zip(of_row, rows, strict=True)], None
    if name in WHITENED_OUTCOME:
        of_row = WHITENED_OUTCOME[name](rows, **options)
        return _whiten([[a] * len(row.mask) for a, row in zip(of_row, rows, strict=True)], rows), None
    if name == "reinforce_plus_plus":
        returns = [_returns(row, float(str(options["gamma"]))) for row in rows]
        return _whiten(returns, rows), returns
    if name == "remax":
        returns = [_returns(row, 1.0) for row in rows]
        advantages = [
            [g - row.greedy_reward if taken else 0.0 for g, taken in zip(of_row, row.mask, strict=True)]
            for of_row, row in zip(returns, rows, strict=True)
        ]
        return advantages, returns
    if name == "optimal_token_baseline":
        return _optimal_token_baseline(rows, corrected), [_returns(row, 1.0) for row in rows]
    assert name == "gae"
    return _gae(rows, **options)  # type: ignore[arg-type]


def _theirs(row: Row, rows: list[Row]) -> list[Row]:
    return [other for other in rows if other.group == row.group]


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: list[float]) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _over(baseline: Callable[[Row, list[Row]], float], rows: list[Row]) -> list[float]:
    """``R - baseline(row, its group)``; baseline 0 in a group of one; exactly 0 where all rewards are equal."""
    result = []
    for row in rows:
        group = _theirs(row, rows)
        if len(group) == 1:
            result.append(row.reward)
        elif len({other.reward for other in group}) == 1:
            result.append(0.0)
        else:
            result.append(row.reward - baseline(row, group))
    return result


def _mean_of_group(row: Row, group: list[Row]) -> float:
    return _mean([other.reward for other in group])


def _mean_of_others(row: Row, group: list[Row]) -> float:
    return _mean([other.reward for other in group if other is not row])


def _length_weighted(row: Row, group: list[Row]) -> float:
    tokens = sum(len(other.mask) for other in group)
    return math.fsum(len(other.mask) * other.reward for other in group) / tokens if tokens else 0.0


def _dr_grpo(rows: list[Row]) -> list[float]:
    return _over(_mean_of_group, rows)


def _grpo(rows: list[Row]) -> list[float]:
    result = []
    for row, over in zip(rows, _dr_grpo(rows), strict=True):
        group = [other.reward for other in _theirs(row, rows)]
        result.append(over / ((_std(group) if len(group) > 1 else 1.0) + 1e-6))
    return result


def _rloo(rows: list[Row]) -> list[float]:
    return _over(_mean_of_others, rows)


def _opo(rows: list[Row]) -> list[float]:
    return _over(_length_weighted, rows)


def _grpo_passk(rows: list[Row]) -> list[float]:
    result = []
    for row in rows:
        group = [other.reward for other in _theirs(row, rows)]
        best, second = sorted(group, reverse=True)[:2]
        result.append((best - second) / (_std(group) + 1e-6) if row.reward == best else 0.0)
    return result


def _gpg(rows: list[Row], f_norm: float) -> list[float]:
    alpha = len(rows) / max(1, sum(row.reward != 0 for row in rows))
    return [alpha * over / f_norm for over in _dr_grpo(rows)]


def _gdpo(rows: list[Row], weights: dict[str, float] | None) -> list[float]:
    total = [0.0] * len(rows)
    for k, name in enumerate(COMPONENTS):
        weight = 1.0 if weights is None else weights.get(name, 0.0)
        of_component = _grpo([replace(row, reward=row.components[k]) for row in rows])
        total = [so_far + weight * a for so_far, a in zip(total, of_component, strict=True)]
    return total


OUTCOME: dict[str, Callable[..., list[float]]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "opo": _opo,
    "grpo_passk": _grpo_passk,
    "gpg": _gpg,
}
WHITENED_OUTCOME: dict[str, Callable[..., list[float]]] = {"reinforce_plus_plus_baseline": _dr_grpo, "gdpo": _gdpo}


def _whiten(tokens: Tokens, rows: list[Row]) -> Tokens:
    kept = [tokens[i][t] for i, row in enumerate(rows) for t in row.valid]
    if len(set(kept)) < 2:
        return [[0.0] * len(row.mask) for row in rows]
    mean = _mean(kept)
    variance = math.fsum((x - mean) ** 2 for x in kept) / (len(kept) - 1)
    return [
        [(x - mean) / math.sqrt(variance + 1e-8) if taken else 0.0 for x, taken in zip(of_row, row.mask, strict=True)]
        for of_row, row in zip(tokens, rows, strict=True)
    ]


def _returns(row: Row, gamma: float) -> list[float]:
    result, running = [0.0] * len(row.mask), 0.0
    for t in reversed(row.valid):
        running = row.token_rewards[t] + gamma * running
        result[t] = running
    return result


def _weight(row: Row, position: int, corrected: bool) -> float:
    """``W_t``: the sum of ``(1 - 2 pi_u + sum_v pi_u(v)^2) w_u^2`` over ``u <= t`` with mask 1."""
    return math.fsum(
        (1 - 2 * math.exp(row.old_logprobs[u]) + row.sum_squared_probs[u])
        * (row.is_weights[u] ** 2 if corrected else 1.0)
        for u in row.valid
        if u <= position
    )


def _optimal_token_baseline(rows: list[Row], corrected: bool) -> Tokens:
    result = [[0.0] * len(row.mask) for row in rows]
    for i, row in enumerate(rows):
        for t in row.valid:
            running = [other for other in _theirs(row, rows) if t in other.valid]
            baseline = 0.0
            if len(running) > 1:
                weights = [_weight(other, t, corrected) for other in running]
                returns = [_returns(other, 1.0)[t] for other in running]
                weighted = math.fsum(g * w for g, w in zip(returns, weights, strict=True))
                baseline = weighted / (math.fsum(weights) + 1e-8)
            result[i][t] = _returns(row, 1.0)[t] - baseline
    return result


def _gae(rows: list[Row], gamma: float, lam: float) -> tuple[Tokens, Tokens]:
    advantages, returns = [[0.0] * len(row.mask) for row in rows], [[0.0] * len(row.mask) for row in rows]
    for i, row in enumerate(rows):
        following, running = 0.0, 0.0
        for t in reversed(row.valid):
            delta = row.token_rewards[t] + gamma * following - row.values[t]
            running = delta + gamma * lam * running
            following = row.values[t]
            advantages[i][t], returns[i][t] = running, running + row.values[t]
    return _whiten(advantages, rows), returns


# ------------------------------------------------------------------------------------------------------ iterations


def columns(rows: list[Row], corrected: bool = False, masked: float | None = None) -> SimpleNamespace:
    """The columns that estimators may name; ``masked`` overwrites what stands at tokens with mask 0."""
    mask = torch.tensor([taken for row in rows for taken in row.mask], dtype=torch.bool)
    lengths = torch.tensor([len(row.mask) for row in rows], dtype=torch.int64)

    def tokens(name: str, dtype: torch.dtype) -> Tensor:
        flat = torch.tensor([value for row in rows for value in getattr(row, name)], dtype=dtype)
        return flat if masked is None else flat.masked_fill(~mask, masked)

    return SimpleNamespace(
        rewards=torch.tensor([row.reward for row in rows], dtype=torch.float64),
        group_ids=torch.tensor([row.group for row in rows], dtype=torch.int64),
        lengths=lengths,
        row_ids=torch.tensor([i for i, row in enumerate(rows) for _ in row.mask], dtype=torch.int64),
        valid_tokens=torch.tensor([len(row.valid) for row in rows], dtype=torch.int64),
        token_rewards=tokens("token_rewards", torch.float64),
        mask=mask,
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(lengths, 0)]),
        greedy_rewards=torch.tensor([row.greedy_reward for row in rows], dtype=torch.float64),
        components=torch.tensor([row.components for row in rows], dtype=torch.float64)
        .reshape(len(rows), len(COMPONENTS))
        .T,
        component_names=COMPONENTS,
        values=tokens("values", torch.float32),
        old_logprobs=tokens("old_logprobs", torch.float32),
        sum_squared_probs=tokens("sum_squared_probs", torch.float32),
        is_weights=tokens("is_weights", torch.float32) if corrected else None,
    )


KINDS = ["verdicts", "tenths", "one value a group", "one value", "normal", "process", "large"]
GROUP_NAMES = [[0, 1, 2, 3], [5, -3, 9, 0], [2**40, -(2**40), 17, 18]]


@st.composite
def iterations(draw: st.DrawFn, kinds: list[str] = KINDS, smallest_group: int = 1) -> list[Row]:
    """Iterations of up to a dozen rows in up to four groups: ragged, some tokens or whole rows with mask 0."""
    # Group, tokens, and their masks as the bits of a number.
    shape = st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 63))
    drawn = draw(st.lists(shape, min_size=1, max_size=9))
    shapes = [(group, [bool(bits >> t & 1) for t in range(tokens)]) for group, tokens, bits in drawn]
    kind, names = draw(st.sampled_from(kinds)), draw(st.sampled_from(GROUP_NAMES))
    rng = random.Random(draw(st.integers(0, 2**32)))
    for group in sorted({group for group, _ in shapes}):
        missing = smallest_group - sum(other == group for other, _ in shapes)
        shapes += [(group, [rng.random() < 0.7 for _ in range(rng.randrange(5))]) for _ in range(missing)]
    of_group = [rng.choice([0.1, 0.7, -2.3, 0.0]) for _ in names]
    return [_row(rng, kind, names[group], of_group[group], mask) for group, mask in shapes]


def _row(rng: random.Random, kind: str, group: int, of_group: float, mask: list[bool]) -> Row:
    draw_reward: Callable[[], float] = {
        "verdicts": lambda: float(rng.random() < 0.5),
        "tenths": lambda: rng.randint(0, 3) / 10,  # means of these round
        "one value a group": lambda: of_group,
        "one value": lambda: 0.7,
        "normal": lambda: rng.gauss(0.5, 2),
        "process": lambda: rng.gauss(0.5, 2),
        "large": lambda: rng.gauss(1e7, 1e6),
    }[kind]
    valid = [t for t, taken in enumerate(mask) if taken]
    reward, token_rewards = draw_reward(), [0.0] * len(mask)
    if kind == "process" and valid:
        token_rewards = [rng.gauss(0, 1) if taken else 0.0 for taken in mask]
        reward = math.fsum(token_rewards)
    elif valid:
        token_rewards[valid[-1]] = reward
    logprobs = [_float32(rng.choice([0.0, -20.0, -0.01, -rng.uniform(0.05, 4.0)])) for _ in mask]
    # The squares of the other tokens' probabilities sum to at most (1 - pi)^2.
    squares = [_float32(p * p + (1 - p) ** 2 * rng.uniform(0.01, 1)) for p in map(math.exp, logprobs)]
    return Row(
        group=group,
        reward=reward,
        mask=mask,
        token_rewards=token_rewards,
        greedy_reward=draw_reward(),
        components=[draw_reward(), float(rng.random() < 0.5), rng.gauss(0, 1)],
        values=[_float32(rng.gauss(0.5, 1)) for _ in mask],
        old_logprobs=logprobs,
        sum_squared_probs=squares,
        is_weights=[_float32(rng.choice([0.0, 1.0, math.exp(rng.gauss(0, 2))])) for _ in mask],
    )


def _float32(value: float) -> float:
    return float(np.float32(value))
