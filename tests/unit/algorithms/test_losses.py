"""Every policy loss and the value loss: by hand, against plain loops, and what must hold of all of them."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.losses import LOSSES, PolicyLoss, ppo_clip, value_loss
from grpo_lib.algorithms.registry import call
from grpo_lib.data.ragged import repeat_rows, segment_sum
from tests.unit.algorithms.loss_references import NAMES, OPTIONS, ROWS, Batch, bound, random_batch, reference

FEW = settings(deadline=None, max_examples=30)
EVERY_LOSS = pytest.mark.parametrize("name", NAMES)
BOTH_OPTIONS = pytest.mark.parametrize("with_defaults", [True, False], ids=["defaults", "own"])
numbers = st.integers(-40, 40).map(lambda n: n / 8)
LOG2 = math.log(2)


def gradient_of(loss: PolicyLoss, logprobs: Tensor, weights: Tensor | float = 1.0) -> Tensor:
    (gradient,) = torch.autograd.grad((weights * loss.values).sum(), logprobs)
    return gradient


def loss_at(
    name: str, log_ratio: list[float], advantages: list[float], lp: float = -1.0, selected: bool = False, **options: Any
) -> tuple[PolicyLoss, list[float]]:
    """The loss of one row whose tokens all have the log-prob ``lp``, and the gradient of its sum."""
    logprobs = torch.full((len(log_ratio),), lp, dtype=torch.float64, requires_grad=True)
    columns = SimpleNamespace(
        logprobs=logprobs,
        old_logprobs=logprobs.detach() - torch.tensor(log_ratio, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        offsets=torch.tensor([0, len(log_ratio)]),
        selected=torch.full((len(log_ratio),), selected),
    )
    loss = call(bound(name, options), columns)
    return loss, gradient_of(loss, logprobs).tolist()


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "high", "low"),
    [
        (1.1, 2.0, -2.2, -2.2, False, False),  # inside the range: -A rho
        (0.9, -2.0, 1.8, 1.8, False, False),
        (1.25, 1.0, -1.25, -1.25, False, False),  # clip-higher: above 1.2, below 1.28
        (1.279999, 1.0, -1.279999, -1.279999, False, False),
        (1.280001, 1.0, -1.28, 0.0, True, False),
        (1.5, 1.0, -1.28, 0.0, True, False),  # went up enough
        (0.5, 1.0, -0.5, -0.5, False, False),  # went down although it was good: not clipped
        (0.800001, -1.0, 0.800001, 0.800001, False, False),
        (0.799999, -1.0, 0.8, 0.0, False, True),
        (0.5, -1.0, 0.8, 0.0, False, True),  # went down enough
        (1.5, -1.0, 1.5, 1.5, False, False),  # went up although it was bad: not clipped
        (2.9, -1.0, 2.9, 2.9, False, False),  # just below the dual clip
        (2.999999, -1.0, 2.999999, 2.999999, False, False),
        (3.000001, -1.0, 3.0, 0.0, True, False),
        (5.0, -1.0, 3.0, 0.0, True, False),  # dual clip
        (5.0, -2.0, 6.0, 0.0, True, False),
        (5.0, 2.0, -2.56, 0.0, True, False),  # dual clip is for negative advantages only
        (7.0, 0.0, 0.0, 0.0, False, False),
    ],
)
def test_every_side_of_ppos_clip_by_hand(
    ratio: float, advantage: float, value: float, gradient: float, high: bool, low: bool
) -> None:
    loss, gradients = loss_at("ppo_clip", [math.log(ratio)], [advantage], clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert loss.values.tolist() == pytest.approx([value], rel=1e-12)
    assert gradients == pytest.approx([gradient], rel=1e-12)
    assert loss.ratio.tolist() == pytest.approx([ratio], rel=1e-12)
    assert (loss.clipped_high.tolist(), loss.clipped_low.tolist()) == ([high], [low])


def test_clip_higher_only_moves_the_upper_end() -> None:
    ratios, advantages = [math.log(1.25), math.log(0.75)], [1.0, -1.0]
    narrow, _ = loss_at("ppo_clip", ratios, advantages, clip_low=0.2, clip_high=0.2)
    wide, _ = loss_at("ppo_clip", ratios, advantages, clip_low=0.2, clip_high=0.28)
    assert narrow.values.tolist() == pytest.approx([-1.2, 0.8])
    assert wide.values.tolist() == pytest.approx([-1.25, 0.8])


def test_without_dual_clip_a_bad_token_that_became_likely_costs_in_full() -> None:
    loss, gradients = loss_at("ppo_clip", [math.log(5.0)], [-1.0], dual_clip=None)
    assert loss.values.tolist() == pytest.approx([5.0]) and gradients == pytest.approx([5.0])
    assert not loss.clipped_high.any()


def test_the_dual_clip_is_3_unless_set() -> None:
    assert loss_at("ppo_clip", [math.log(5.0)], [-1.0])[0].values.tolist() == pytest.approx([3.0])


EXP = {x: math.exp(x) for x in (0.1, 0.182, -0.1, -0.051, 2.0, 10.0)}


@pytest.mark.parametrize(
    ("log_ratio", "advantages", "values", "gradient", "high", "low"),
    [
        # The ratio of the row is exp(mean), its range [0.95, 1.2]: in logs [-0.0513, 0.1823].
        ([0.3, -0.1], [2.0, 2.0], [-2 * EXP[0.1]] * 2, [-2 * EXP[0.1]] * 2, [False] * 2, [False] * 2),
        ([0.364, 0.0], [1.0, 1.0], [-EXP[0.182]] * 2, [-EXP[0.182]] * 2, [False] * 2, [False] * 2),
        ([0.366, 0.0], [1.0, 1.0], [-1.2, -1.2], [0.0, 0.0], [True] * 2, [False] * 2),
        ([0.6, -0.2], [2.0, 2.0], [-2.4, -2.4], [0.0, 0.0], [True] * 2, [False] * 2),
        ([0.6, -0.2], [-2.0, -2.0], [2 * EXP[0.1] ** 2] * 2, [2 * EXP[0.1] ** 2] * 2, [False] * 2, [False] * 2),
        ([-0.3, 0.1], [1.0, 1.0], [-EXP[-0.1]] * 2, [-EXP[-0.1]] * 2, [False] * 2, [False] * 2),
        ([-0.102, 0.0], [-1.0, -1.0], [EXP[-0.051]] * 2, [EXP[-0.051]] * 2, [False] * 2, [False] * 2),
        ([-0.104, 0.0], [-1.0, -1.0], [0.95, 0.95], [0.0, 0.0], [False] * 2, [True] * 2),
        ([-0.3, 0.1], [-1.0, -1.0], [0.95, 0.95], [0.0, 0.0], [False] * 2, [True] * 2),
        # Advantages of its own for each token, the ratio of the row: GSPO-token.
        ([-0.3, 0.1], [-1.0, 3.0], [0.95, -3 * EXP[-0.1]], [0.0, -3 * EXP[-0.1]], [False] * 2, [True, False]),
        # No dual clip; the exponent is at most 10.
        ([3.0, 1.0], [-1.0, -1.0], [EXP[2.0]] * 2, [EXP[2.0]] * 2, [False] * 2, [False] * 2),
        ([50.0, 0.0], [-1.0, -1.0], [EXP[10.0]] * 2, [0.0, 0.0], [False] * 2, [False] * 2),
    ],
)
def test_gspo_by_hand(
    log_ratio: list[float],
    advantages: list[float],
    values: list[float],
    gradient: list[float],
    high: list[bool],
    low: list[bool],
) -> None:
    loss, gradients = loss_at("gspo", log_ratio, advantages, clip_low=0.05, clip_high=0.2)
    assert loss.values.tolist() == pytest.approx(values, rel=1e-12)
    assert gradients == pytest.approx(gradient, rel=1e-12)
    assert (loss.clipped_high.tolist(), loss.clipped_low.tolist()) == (high, low)


@pytest.mark.parametrize(
    ("log_ratio", "advantages", "values", "gradient", "high", "low"),
    [
        # Two tokens have the row's value, each slope is half of it: the sum of both has the value as its slope.
        ([0.6, 0.0], [1.0, 1.0], [-math.exp(0.2)] * 2, [0.0, -math.exp(0.2)], [True, False], [False] * 2),
        ([0.6, 0.0], [-1.0, -1.0], [math.exp(0.3)] * 2, [math.exp(0.3)] * 2, [False] * 2, [False] * 2),
        ([-0.6, 0.0], [-1.0, -1.0], [math.exp(-0.2)] * 2, [0.0, math.exp(-0.2)], [False] * 2, [True, False]),
        ([-0.6, 0.0], [1.0, 1.0], [-math.exp(-0.3)] * 2, [-math.exp(-0.3)] * 2, [False] * 2, [False] * 2),
        ([0.399, -0.1], [1.0, 1.0], [-math.exp(0.1495)] * 2, [-math.exp(0.1495)] * 2, [False] * 2, [False] * 2),
        # Each token is clipped by its own sign, the value has the mean advantage.
        ([0.6, 0.6], [3.0, -1.0], [-math.exp(0.5)] * 2, [0.0, -math.exp(0.5)], [True, False], [False] * 2),
        ([-0.6, -0.6], [3.0, -1.0], [-math.exp(-0.5)] * 2, [-math.exp(-0.5), 0.0], [False] * 2, [False, True]),
        ([0.6, 0.6], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [False] * 2, [False] * 2),
    ],
)
def test_geo_mean_by_hand(
    log_ratio: list[float],
    advantages: list[float],
    values: list[float],
    gradient: list[float],
    high: list[bool],
    low: list[bool],
) -> None:
    loss, gradients = loss_at("geo_mean", log_ratio, advantages, clip_low=0.4, clip_high=0.4)
    assert loss.values.tolist() == pytest.approx(values, rel=1e-12)
    assert gradients == pytest.approx(gradient, rel=1e-12)
    assert (loss.clipped_high.tolist(), loss.clipped_low.tolist()) == (high, low)


def test_geo_mean_averaged_over_rows_is_the_loss_of_the_paper() -> None:
    columns = SimpleNamespace(
        logprobs=torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64),
        old_logprobs=torch.tensor([-1.2, -1.0, -0.7], dtype=torch.float64),
        advantages=torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64),
        offsets=torch.tensor([0, 2, 3]),
    )
    loss = call(bound("geo_mean", {}), columns)
    entry = LOSSES["geo_mean"]
    weights = AGGREGATIONS[str(entry.traits["aggregation"])].function(torch.ones(3), columns.offsets, 8)
    assert float(weights @ loss.values) == pytest.approx((-math.exp(0.1) + 2 * math.exp(-0.3)) / 2, rel=1e-14)


TOKEN_LITERALS: list[tuple[str, float, float, float, dict[str, Any], float, float, bool, bool]] = [
    # name, ratio, advantage, logprob, options, value, gradient, clipped high, clipped low
    ("cispo", 1.1, 2.0, -1.0, {}, 2.2, -2.2, False, False),
    ("cispo", 1.27, 2.0, -1.0, {}, 2.54, -2.54, False, False),
    ("cispo", 1.29, 2.0, -1.0, {}, 2.56, -2.56, True, False),  # the weight is clipped, the gradient stays
    ("cispo", 1.5, -2.0, -1.0, {}, -2.56, 2.56, True, False),  # on both signs of A
    ("cispo", 0.5, 1.0, -1.0, {}, 0.5, -0.5, False, False),  # no lower bound unless set
    ("cispo", 0.5, 1.0, -1.0, {"clip_low": 0.2}, 0.8, -0.8, False, True),
    ("cispo", 0.81, -1.0, -3.0, {"clip_low": 0.2}, -2.43, 0.81, False, False),
    ("cispo", 0.79, -1.0, -3.0, {"clip_low": 0.2}, -2.4, 0.8, False, True),
    ("sapo", 1.0, 1.0, -1.0, {}, -2.0, -1.0, False, False),
    ("sapo", 1.0, -1.0, -1.0, {}, 1.9047619047619047, 1.0, False, False),  # 2 / 1.05
    ("sapo", 2.0, 1.0, -1.0, {}, -2.9242343145200195, -1.5728954659318548, False, False),  # -4 sigmoid(1)
    ("sapo", 2.0, -1.0, -1.0, {"tau_neg": 2.0}, 1.7615941559557646, 0.839948683228052, False, False),  # 2 sigmoid(2)
    ("sapo", 0.5, -1.0, -1.0, {"tau_neg": 2.0}, 0.5378828427399902, 0.3932238664829637, False, False),  # 2 sigmoid(-1)
    ("sapo", 3.0, 0.0, -1.0, {}, 0.0, 0.0, False, False),
    ("reinforce", 1.0, 2.0, -1.0, {}, 2.0, -2.0, False, False),
    ("reinforce", 9.0, -0.5, -3.0, {}, -1.5, 0.5, False, False),  # whatever the ratio
    ("clip_cov", 1.19, 1.0, -1.0, {}, -1.19, -1.19, False, False),
    ("clip_cov", 1.21, 1.0, -1.0, {}, -1.2, 0.0, True, False),
    ("clip_cov", 0.81, -1.0, -1.0, {}, 0.81, 0.81, False, False),
    ("clip_cov", 0.79, -1.0, -1.0, {}, 0.8, 0.0, False, True),
    ("clip_cov", 5.0, -1.0, -1.0, {}, 5.0, 5.0, False, False),  # no dual clip
    ("kl_cov", 2.0, 1.0, -1.0, {}, -2.0, -2.0, False, False),  # nothing is clipped
    ("kl_cov", 0.5, -1.0, -1.0, {}, 0.5, 0.5, False, False),
    ("dppo_tv", 2.5, 1.0, math.log(0.5), {}, 0.0, 0.0, True, False),  # 0.2 -> 0.5: moved by 0.3 > 0.2
    ("dppo_tv", 2.5, -1.0, math.log(0.5), {}, -1.732867951399863, 2.5, False, False),  # on its way back
    ("dppo_tv", 1.5, 1.0, math.log(0.3), {}, 1.8059592064889, -1.5, False, False),  # 0.2 -> 0.3: within 0.2
    ("dppo_tv", 1.5, 1.0, math.log(0.3), {"bound_high": 0.09}, 0.0, 0.0, True, False),
    ("dppo_tv", 0.4, -1.0, math.log(0.2), {}, 0.0, 0.0, False, True),  # 0.5 -> 0.2
    ("dppo_tv", 0.4, -1.0, math.log(0.2), {"bound_low": 0.31}, -0.6437751649736402, 0.4, False, False),
    ("dppo_tv", 0.4, 1.0, math.log(0.2), {}, 0.6437751649736402, -0.4, False, False),
    ("dppo_tv", 100.0, 1.0, math.log(0.1), {}, 46.05170185988091, -20.0, False, False),  # the weight is at most 20
    ("dppo_tv", 100.0, 1.0, math.log(0.1), {"cap": 200.0}, 230.25850929940458, -100.0, False, False),
    ("dppo_kl", 2.5, 1.0, math.log(0.5), {}, 0.0, 0.0, True, False),  # 0.2 -> 0.5: 0.193 nats > 0.05
    ("dppo_kl", 2.5, -1.0, math.log(0.5), {}, -1.732867951399863, 2.5, False, False),
    ("dppo_kl", 1.5, 1.0, math.log(0.3), {}, 1.8059592064889, -1.5, False, False),  # 0.2 -> 0.3: 0.0257 nats
    ("dppo_kl", 1.5, 1.0, math.log(0.3), {"bound_high": 0.025}, 0.0, 0.0, True, False),
    ("dppo_kl", 10.0, 1.0, math.log(0.1), {"bound_high": 0.1}, 23.025850929940457, -10.0, False, False),
    # 0.01 -> 0.1 above: KL(old || new) is 0.0713, within 0.1; KL(new || old) would be 0.144.
    ("dppo_kl", 10.0, 1.0, math.log(0.1), {"bound_high": 0.07}, 0.0, 0.0, True, False),
    ("dppo_kl", 0.4, -1.0, math.log(0.2), {}, 0.0, 0.0, False, True),  # 0.5 -> 0.2: 0.223 nats
    ("dppo_kl", 0.4, -1.0, math.log(0.2), {"bound_low": 0.224}, -0.6437751649736402, 0.4, False, False),
    ("dppo_kl", 0.4, 1.0, math.log(0.2), {}, 0.6437751649736402, -0.4, False, False),
    ("dppo_kl", 100.0, -1.0, math.log(0.1), {}, -46.05170185988091, 20.0, False, False),
    ("dro", math.exp(0.5), 2.0, -1.0, {}, 2.0125, -1.95, False, False),  # 2 + 0.05 * 0.25
    ("dro", math.exp(-0.5), 2.0, -1.0, {}, 2.0125, -2.05, False, False),
    ("dro", math.exp(0.5), 0.0, -1.0, {}, 0.0125, 0.05, False, False),
    ("dro", math.exp(0.5), 2.0, -1.0, {"beta": 2.0}, 2.25, -1.0, False, False),
]


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "lp", "options", "value", "gradient", "high", "low"), TOKEN_LITERALS
)
def test_losses_of_one_token_by_hand(
    name: str,
    ratio: float,
    advantage: float,
    lp: float,
    options: dict[str, Any],
    value: float,
    gradient: float,
    high: bool,
    low: bool,
) -> None:
    loss, gradients = loss_at(name, [math.log(ratio)], [advantage], lp=lp, **options)
    assert loss.values.tolist() == pytest.approx([value], rel=1e-12)
    assert gradients == pytest.approx([gradient], rel=1e-12)
    assert loss.ratio.tolist() == pytest.approx([ratio], rel=1e-12)
    assert (loss.clipped_high.tolist(), loss.clipped_low.tolist()) == ([high], [low])


@pytest.mark.parametrize(
    ("old", "clipped"),
    [
        (0.998, False),  # 0.002 log(0.002 / 1e-7) = 0.02 nats, within 0.05; to a true 1 any step is infinite
        (0.99, True),  # 0.01 log(0.01 / 1e-7) = 0.115
    ],
)
def test_in_dppo_kl_a_probability_of_1_counts_as_1_less_the_resolution_of_float32(old: float, clipped: bool) -> None:
    loss, gradients = loss_at("dppo_kl", [-math.log(old)], [1.0], lp=0.0)
    assert loss.clipped_high.tolist() == [clipped]
    assert gradients == pytest.approx([0.0 if clipped else -1 / old])


@pytest.mark.parametrize("ratio", [0.5, 1.0, 5.0])
def test_clip_cov_takes_selected_tokens_out_but_leaves_their_place(ratio: float) -> None:
    loss, gradients = loss_at("clip_cov", [math.log(ratio)] * 2, [1.0, -1.0], selected=True)
    assert loss.values.tolist() == [0.0, 0.0] and gradients == [0.0, 0.0]


@pytest.mark.parametrize(
    ("ratio", "coef", "value", "gradient"),
    [
        (2.0, 1.0, -2.0 + LOG2, -1.0),
        (0.5, 1.0, -0.5 + LOG2, -1.5),  # the penalty pulls towards the old policy from either side
        (2.0, 0.5, -2.0 + LOG2 / 2, -1.5),
        (2.0, 0.0, -2.0, -2.0),
        (1.0, 1.0, -1.0, -1.0),  # the middle of the subgradient at the old policy
    ],
)
def test_kl_cov_adds_the_penalty_to_selected_tokens(ratio: float, coef: float, value: float, gradient: float) -> None:
    loss, gradients = loss_at("kl_cov", [math.log(ratio)], [1.0], selected=True, coef=coef)
    assert loss.values.tolist() == pytest.approx([value], rel=1e-12)
    assert gradients == pytest.approx([gradient], rel=1e-12)


@pytest.mark.parametrize(
    ("value", "old", "goal", "clip", "loss", "gradient"),
    [
        (2.0, 1.0, 0.0, 0.5, 2.0, 2.0),  # moved up, away from the goal: the larger, unclipped square
        (2.0, 1.0, 3.0, 0.5, 1.125, 0.0),  # moved up towards the goal, far enough
        (1.4, 1.0, 3.0, 0.5, 1.28, -1.6),  # within the range
        (1.49, 1.0, 3.0, 0.5, 1.14005, -1.51),
        (1.51, 1.0, 3.0, 0.5, 1.125, 0.0),
        (0.0, 1.0, -1.0, 0.5, 1.125, 0.0),  # moved down towards the goal
        (0.49, 1.0, -1.0, 0.5, 1.125, 0.0),
        (0.51, 1.0, -1.0, 0.5, 1.14005, 1.51),
        (0.0, 1.0, 2.0, 0.5, 2.0, -2.0),  # moved down, away from the goal
        (2.0, 1.0, 3.0, None, 0.5, -1.0),
        (5.0, 1.0, 3.0, None, 2.0, 2.0),
    ],
)
def test_value_loss_by_hand(
    value: float, old: float, goal: float, clip: float | None, loss: float, gradient: float
) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    result = value_loss(values, torch.tensor([old]).double(), torch.tensor([goal]).double(), clip=clip)
    (slope,) = torch.autograd.grad(result.sum(), values)
    assert result.tolist() == pytest.approx([loss], rel=1e-12)
    assert slope.tolist() == pytest.approx([gradient], rel=1e-12)


def test_every_loss_has_numbers_by_hand_and_a_reference() -> None:
    assert {"ppo_clip", "gspo", "geo_mean", *(each[0] for each in TOKEN_LITERALS)} == set(NAMES) == set(ROWS)


def test_other_names_of_losses_mean_the_same() -> None:
    aliases = {"vanilla": "ppo_clip", "gmpo": "geo_mean", "gpg": "reinforce"}
    assert {alias: LOSSES[alias].name for alias in aliases} == aliases


# --- against plain loops ----------------------------------------------------------------------------------------------


def test_the_random_batches_hold_the_cases_that_matter() -> None:
    seen = set()
    for seed in range(8):
        batch = random_batch(seed)
        valid = batch.valid()
        lengths, kept = batch.offsets.diff(), valid.offsets.diff()
        rows = torch.tensor_split(valid.advantages, valid.offsets[1:-1])
        cases = {
            "log-ratio of 50": bool((valid.logprobs - valid.old_logprobs > 49).any()),
            "log-ratio of -50": bool((valid.logprobs - valid.old_logprobs < -49).any()),
            "a row of one token": bool((kept == 1).any()),
            "no valid token in a row": bool(((kept == 0) & (lengths > 0)).any()),
            "an observation token inside a row": bool(((kept > 0) & (kept < lengths)).any()),
            "zero advantages": any(len(row) > 1 and not row.any() for row in rows),
            "one advantage for a row": any(len(row) > 1 and len(row.unique()) == 1 and row.all() for row in rows),
            "an advantage for each token": any(len(row) > 1 and len(row.unique()) == len(row) for row in rows),
        }
        seen |= {case for case, holds in cases.items() if holds}
    assert seen == set(cases)


@EVERY_LOSS
@BOTH_OPTIONS
def test_values_gradients_and_flags_agree_with_the_formula_token_by_token(name: str, with_defaults: bool) -> None:
    options = {} if with_defaults else OPTIONS.get(name, {})
    seen = torch.zeros(2, dtype=torch.bool)
    for seed in range(8):
        batch = random_batch(seed).valid().with_gradient()
        loss = call(bound(name, options), batch)
        gradient = gradient_of(loss, batch.logprobs, batch.weights)
        expected = reference(name, batch, options)
        assert loss.values.tolist() == pytest.approx(expected.values, rel=1e-12, abs=1e-14)
        assert gradient.tolist() == pytest.approx(expected.gradient, rel=1e-12, abs=1e-14)
        assert loss.clipped_high.tolist() == expected.high and loss.clipped_low.tolist() == expected.low
        assert gradient.abs().max() > 0
        seen |= torch.stack([loss.clipped_high.any(), loss.clipped_low.any()])
    never = {"sapo", "reinforce", "kl_cov", "dro"}
    no_lower_bound = name == "cispo" and with_defaults
    assert seen.tolist() == [name not in never, name not in never and not no_lower_bound]


@EVERY_LOSS
def test_the_ratio_is_that_of_the_token_or_of_its_row_and_has_no_gradient(name: str) -> None:
    batch = random_batch(3).valid().with_gradient()
    loss = call(bound(name, OPTIONS.get(name, {})), batch)
    log_ratio = (batch.logprobs - batch.old_logprobs).tolist()
    expected = [math.exp(max(-20.0, min(20.0, x))) for x in log_ratio]
    if name == "gspo":
        starts = batch.offsets.tolist()
        expected = []
        for a, b in itertools.pairwise(starts):
            expected += [math.exp(min(10.0, math.fsum(log_ratio[a:b]) / max(1, b - a)))] * (b - a)
    if name == "geo_mean":  # the row's, of clipped log-ratios: value = -mean(A) ratio
        rows = repeat_rows(segment_sum(batch.advantages, batch.offsets) / batch.offsets.diff(), batch.offsets)
        assert (-rows * loss.ratio).tolist() == pytest.approx(loss.values.tolist(), rel=1e-12)
    else:
        assert loss.ratio.tolist() == pytest.approx(expected, rel=1e-12)
    assert not loss.ratio.requires_grad


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_value_loss_agrees_with_the_formula_token_by_token(clip: float | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, 60, generator=generator, dtype=torch.float64)
    values[:3] += 50
    values.requires_grad_()
    loss = value_loss(values, old, returns, clip=clip)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    for t, (v, v_old, g) in enumerate(zip(values.tolist(), old.tolist(), returns.tolist(), strict=True)):
        expected, slope = (v - g) ** 2, v - g
        if clip is not None and abs(v - v_old) > clip:
            near = v_old + math.copysign(clip, v - v_old)
            if (near - g) ** 2 > expected:
                expected, slope = (near - g) ** 2, 0.0
        assert loss[t].item() == pytest.approx(0.5 * expected, rel=1e-12)
        assert gradient[t].item() == pytest.approx(slope, rel=1e-12, abs=1e-14)


# --- what holds of all ------------------------------------------------------------------------------------------------


def away_from_kinks() -> Batch:
    """Three rows whose log-ratios lie 0.01 or more from every bound, on all sides of the default ones; constant A."""
    log_ratio = [0.05, -0.07, 0.1, 0.45, -0.55, 0.6, -0.1, 0.15, 0.3, 1.5, -0.02]
    advantages = [1.0] * 4 + [-0.7] * 4 + [-1.3] * 3
    lp = torch.tensor([-1.0, -2.0, -0.6, -0.4, -2.5, -1.5, -0.3, -3.0, -1.2, -0.9, -4.0], dtype=torch.float64)
    n = len(lp)
    return Batch(
        offsets=torch.tensor([0, 4, 8, 11]),
        mask=torch.ones(n, dtype=torch.bool),
        logprobs=lp,
        old_logprobs=lp - torch.tensor(log_ratio, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        selected=torch.arange(n) % 3 == 1,
        draws=torch.zeros(n),
        weights=torch.ones(n),
    )


@EVERY_LOSS
def test_gradients_are_the_derivatives_of_the_values(name: str) -> None:
    batch = away_from_kinks()
    loss = bound(name, {})
    # Where the weight has a stop-gradient, the old policy moves along: the weight then stays what it is.
    held = name in ("cispo", "dppo_tv", "dppo_kl")

    def values(step: Tensor) -> Tensor:
        old = batch.old_logprobs + (step.detach() if held else 0)
        result: Tensor = call(loss, replace(batch, logprobs=batch.logprobs + step, old_logprobs=old)).values
        # GSPO's tokens have the whole row's slope each: their sum has the slope of the row's value times its length.
        return segment_sum(result, batch.offsets) if name == "gspo" else result

    start = torch.zeros_like(batch.logprobs, requires_grad=True)
    assert torch.autograd.gradcheck(values, (start,), eps=1e-6, atol=1e-7, rtol=1e-6)
    assert torch.autograd.grad(values(start).sum(), start)[0].abs().max() > 0.1


def test_the_value_losss_gradient_is_its_derivative() -> None:
    values = torch.tensor([0.3, 1.9, -1.4, 0.1, 2.5], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(5, dtype=torch.float64)
    returns = torch.tensor([1.0, 3.0, -2.0, -1.0, 0.5], dtype=torch.float64)
    for clip in (None, 0.5):
        assert torch.autograd.gradcheck(lambda v, clip=clip: value_loss(v, old, returns, clip=clip), (values,))


@EVERY_LOSS
@pytest.mark.parametrize("aggregation", AGGREGATIONS.names())
@BOTH_OPTIONS
def test_at_the_old_policy_the_gradient_is_that_of_the_plain_policy_gradient(
    name: str, aggregation: str, with_defaults: bool
) -> None:
    whole = random_batch(5, constant_in_row=name in ("gspo", "geo_mean"))
    weights = AGGREGATIONS[aggregation].function(whole.mask, whole.offsets, 16)[whole.mask]
    batch = whole.valid()
    batch = replace(batch, old_logprobs=batch.logprobs).with_gradient()
    loss = call(bound(name, {} if with_defaults else OPTIONS.get(name, {})), batch)
    plain = -batch.advantages * weights
    if name == "clip_cov":
        plain[batch.selected] = 0.0
    torch.testing.assert_close(gradient_of(loss, batch.logprobs, weights), plain, rtol=1e-12, atol=1e-15)
    assert plain.abs().max() > 0
    assert not loss.clipped_high.any() and not loss.clipped_low.any()
    torch.testing.assert_close(loss.ratio, torch.ones_like(loss.ratio))


@EVERY_LOSS
def test_rows_of_zero_advantages_have_no_gradient_unless_the_loss_says_so(name: str) -> None:
    batch = random_batch(7).valid().with_gradient()
    batch = replace(batch, selected=torch.full_like(batch.selected, name == "kl_cov"))
    gradient = gradient_of(call(bound(name, {}), batch), batch.logprobs)
    zero_rows = segment_sum(batch.advantages.abs(), batch.offsets) == 0
    in_zero_row = repeat_rows(zero_rows, batch.offsets)
    assert int(in_zero_row.sum()) > 3 and gradient[~in_zero_row].abs().max() > 0
    if LOSSES[name].traits.get("zero_without_advantage", True):
        assert torch.equal(gradient[in_zero_row], torch.zeros_like(gradient[in_zero_row]))
    else:
        assert bool((gradient[in_zero_row] != 0).all())


@EVERY_LOSS
@BOTH_OPTIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_inputs_give_finite_losses_and_gradients(name: str, with_defaults: bool, dtype: torch.dtype) -> None:
    levels = torch.tensor([-1000.0, -80.0, -50.0, -30.0, -10.0, -1.0, -1e-6, -1e-9, 0.0])
    lp, old, a = torch.cartesian_prod(levels, levels, torch.tensor([-1e3, -1.0, 0.0, 1.0, 1e3])).to(dtype).T
    for size in (1, 3, len(lp)):
        edges = torch.tensor([*range(0, len(lp), size), len(lp)])
        batch = Batch(edges, lp < 1, lp, old, a, torch.arange(len(lp)) % 2 == 0, lp, lp).with_gradient()
        loss = call(bound(name, {} if with_defaults else OPTIONS.get(name, {})), batch)
        assert loss.values.dtype == dtype
        assert bool(loss.values.isfinite().all()) and bool(loss.ratio.isfinite().all())
        assert bool(gradient_of(loss, batch.logprobs).isfinite().all())


@EVERY_LOSS
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_no_tokens_give_no_values(name: str, rows: int) -> None:
    batch = random_batch(0, lengths=[0] * rows).with_gradient()
    loss = call(bound(name, {}), batch)
    assert [len(column) for column in (loss.values, loss.ratio, loss.clipped_high, loss.clipped_low)] == [0, 0, 0, 0]
    assert loss.values.sum().item() == 0.0
    assert gradient_of(loss, batch.logprobs).shape == (0,)


def test_extreme_log_ratios_are_clamped_to_20() -> None:
    loss, gradients = loss_at("ppo_clip", [50.0, 50.0, -50.0, -50.0], [1.0, -1.0, 1.0, -1.0], dual_clip=None)
    assert loss.values.tolist() == pytest.approx([-1.2, math.exp(20), -math.exp(-20), 0.8], rel=1e-12)
    assert gradients == [0.0, 0.0, 0.0, 0.0]
    assert loss.ratio.tolist() == pytest.approx([math.exp(20), math.exp(20), math.exp(-20), math.exp(-20)], rel=1e-12)


@FEW
@given(
    pairs=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20),
    low=st.floats(0.01, 0.9),
    high=st.floats(0.01, 5),
    dual=st.none() | st.floats(1.01, 10),
)
def test_ppos_flags_say_where_the_gradient_was_cut(
    pairs: list[tuple[float, float]], low: float, high: float, dual: float | None
) -> None:
    old = torch.full((len(pairs),), -6.0, dtype=torch.float64)
    logprobs = (old + torch.tensor([x for x, _ in pairs], dtype=torch.float64)).requires_grad_()
    advantages = torch.tensor([a for _, a in pairs], dtype=torch.float64)
    loss = ppo_clip(logprobs, old, advantages, clip_low=low, clip_high=high, dual_clip=dual)
    cut = loss.clipped_high | loss.clipped_low
    assert torch.equal(gradient_of(loss, logprobs) == 0.0, cut | (advantages == 0.0))
    assert not (loss.clipped_high & loss.clipped_low).any()
