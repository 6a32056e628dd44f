import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lib.algorithms import rollout_correction
from grpo_lib.algorithms.rollout_correction import (
    REJECTION_KINDS,
    Correction,
    Importance,
    Level,
    Rejection,
    RejectionKind,
    correct,
    correct_rows,
)
from grpo_lib.data.ragged import lengths_to_offsets, row_blocks
from grpo_lib.errors import AlgorithmError
from tests.unit.algorithms.correction_references import Batch, Rows, batch_of, correct_by_formula, from_log_ratios
from tests.unit.algorithms.correction_references import random_batch as some_rows

FEW = settings(deadline=None, max_examples=30)
LN2 = math.log(2)

IMPORTANCES = {
    "none": None,
    "token": Importance(level="token", upper=2.0),
    "sequence": Importance(level="sequence", upper=3.0),
    "token IcePop": Importance(level="token", upper=2.0, lower=0.6),
    "sequence IcePop": Importance(level="sequence", upper=2.5, lower=0.4),
    "token normalised": Importance(level="token", upper=2.0, batch_normalize=True),
    "sequence normalised": Importance(level="sequence", upper=3.0, batch_normalize=True),
    "token IcePop normalised": Importance(level="token", upper=1.5, lower=0.6, batch_normalize=True),
    "sequence IcePop normalised": Importance(level="sequence", upper=2.5, lower=0.4, batch_normalize=True),
}
# Bounds between what the rows of `some_rows` have, so that each rule keeps some and rejects some.
BOUNDS: dict[RejectionKind, float] = {
    "token": 1.5,
    "sequence": 2.0,
    "geometric": 1.1,
    "token_k2": 0.1,
    "seq_sum_k2": 0.3,
    "seq_mean_k2": 0.1,
    "seq_max_k2": 0.2,
    "token_k3": 0.1,
    "seq_sum_k3": 0.3,
    "seq_mean_k3": 0.1,
    "seq_max_k3": 0.2,
}
EVERY_KIND = pytest.mark.parametrize("kind", REJECTION_KINDS)


def corrected(
    batch: Batch,
    importance: Importance | None = None,
    rejections: tuple[Rejection, ...] | list[Rejection] = (),
    veto: float | None = None,
) -> Correction:
    return correct(
        batch.old, batch.rollout, batch.mask, batch.offsets, importance=importance, rejections=rejections, veto=veto
    )


def by_row(values: Tensor | None, batch: Batch) -> list[list[float]]:
    assert values is not None
    return [values[start:stop].tolist() for start, stop in itertools.pairwise(batch.offsets.tolist())]


def agrees_with_the_formulas(
    batch: Batch, importance: Importance | None, rejections: list[Rejection], veto: float | None, rel: float
) -> Correction:
    expected = correct_by_formula(batch.rows(), importance, rejections, veto)
    result = corrected(batch, importance, rejections, veto)
    assert result.mask.dtype == torch.bool and result.mask.tolist() == expected.mask
    if expected.weights is None:
        assert result.weights is None
    else:
        assert result.weights is not None and result.weights.dtype == torch.float32
        assert not result.weights.requires_grad
        assert result.weights.tolist() == pytest.approx(expected.weights, rel=max(rel, 1e-6))
    assert result.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        # The weights, and so what is said of them, are float32.
        close = max(rel, 1e-6) if "weight" in name or "sample" in name else rel
        assert result.metrics[name] == pytest.approx(value, rel=close, abs=close), name
    return result


# ---- against the formulas, row by row


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("importance", IMPORTANCES.values(), ids=IMPORTANCES)
@pytest.mark.parametrize("seed", range(4))
def test_weights_and_metrics_agree_with_the_formulas(
    importance: Importance | None, seed: int, dtype: torch.dtype
) -> None:
    agrees_with_the_formulas(some_rows(seed, dtype), importance, [], None, 1e-10 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", REJECTION_KINDS)
def test_what_every_rule_keeps_agrees_with_the_formulas(kind: RejectionKind, dtype: torch.dtype) -> None:
    kept = []
    for seed in range(4):
        batch = some_rows(seed, dtype)
        rel = 1e-10 if dtype == torch.float64 else 2e-5
        result = agrees_with_the_formulas(batch, None, [Rejection(kind=kind, upper=BOUNDS[kind])], None, rel)
        kept.append(1 - result.metrics["masked_token_fraction"])
        if kind in ("token", "sequence", "geometric"):
            one_sided = Rejection(kind=kind, upper=BOUNDS[kind], lower=1e-3)
            agrees_with_the_formulas(batch, IMPORTANCES["sequence"], [one_sided], None, rel)
    assert 0.05 < sum(kept) / 4 < 0.95  # the rule has something to do


@pytest.mark.parametrize("importance", IMPORTANCES.values(), ids=IMPORTANCES)
@pytest.mark.parametrize("seed", range(4))
def test_weights_with_several_rules_and_the_veto_agree_with_the_formulas(
    importance: Importance | None, seed: int
) -> None:
    rules = [
        Rejection(kind="token_k2", upper=0.5),
        Rejection(kind="geometric", upper=1.3, lower=0.5),
        Rejection(kind="seq_max_k3", upper=0.9),
    ]
    result = agrees_with_the_formulas(some_rows(seed), importance, rules, 0.2, 1e-10)
    assert result.metrics["veto_rejected_rows"] > 0


@pytest.mark.parametrize(("lower", "upper"), [(0.1, 0.9), (1.02, 3.0)])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_bounds_that_leave_out_a_ratio_of_1_say_nothing_of_masked_tokens(
    level: Level, lower: float, upper: float
) -> None:
    importance = Importance(level=level, upper=upper, lower=lower)
    for seed in range(3):
        for kind in ("token", "sequence", "geometric"):
            rule = Rejection(kind=kind, upper=upper, lower=lower)
            agrees_with_the_formulas(some_rows(seed), importance, [rule], None, 1e-10)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_batch_of_thousands_of_tokens_agrees_with_the_formulas(level: Level) -> None:
    parts = [some_rows(seed, torch.float32).rows() for seed in range(40)]
    batch = batch_of(list(itertools.chain.from_iterable(parts)), torch.float32)
    assert len(batch.mask) > 4 * 1024
    rule = Rejection(kind="seq_mean_k2", upper=0.2)
    agrees_with_the_formulas(batch, Importance(level=level, upper=2.0), [rule], 1e-4, 2e-5)


# ---- by hand

# Ratios 2, 1/2, 1; 4; 2, 2; 1.
HAND = from_log_ratios([[LN2, -LN2, 0.0], [2 * LN2], [LN2, LN2], [0.0]])


@pytest.mark.parametrize(
    ("kind", "upper", "kept"),
    [
        # k2 of the ratios 2 and 1/2 is 0.2402, of 4 it is 0.9609;
        # k3 of 2 is 0.3069, of 1/2 it is 0.1931, of 4 it is 1.6137.
        ("token", 1.5, "001 0 00 1"),
        ("token", 2.5, "111 0 11 1"),
        ("sequence", 3.0, "111 0 00 1"),  # 1, 4, 4, 1
        ("geometric", 3.0, "111 0 11 1"),  # 1, 4, 2, 1
        ("geometric", 1.9, "111 0 00 1"),
        ("token_k2", 0.23, "001 0 00 1"),
        ("token_k2", 0.25, "111 0 11 1"),
        ("seq_sum_k2", 0.47, "000 0 00 1"),  # 0.4805, 0.9609, 0.4805
        ("seq_sum_k2", 0.49, "111 0 11 1"),
        ("seq_mean_k2", 0.2, "111 0 00 1"),  # 0.1602, 0.9609, 0.2402
        ("seq_max_k2", 0.23, "000 0 00 1"),
        ("seq_max_k2", 0.25, "111 0 11 1"),
        ("token_k3", 0.25, "011 0 00 1"),
        ("token_k3", 0.31, "111 0 11 1"),
        ("seq_sum_k3", 0.55, "111 0 00 1"),  # 0.5000, 1.6137, 0.6137
        ("seq_mean_k3", 0.2, "111 0 00 1"),  # 0.1667, 1.6137, 0.3069
        ("seq_max_k3", 0.3, "000 0 00 1"),
        ("seq_max_k3", 0.31, "111 0 11 1"),
    ],
)
def test_every_rule_by_hand(kind: RejectionKind, upper: float, kept: str) -> None:
    result = corrected(HAND, rejections=[Rejection(kind=kind, upper=upper)])
    rows = [[token == "1" for token in row] for row in kept.split()]
    assert by_row(result.mask, HAND) == rows
    tokens = list(itertools.chain.from_iterable(rows))
    assert result.metrics[f"{kind}_rejected_rows"] == sum(not all(row) for row in rows)
    assert result.metrics["masked_token_fraction"] == pytest.approx(1 - sum(tokens) / 7, abs=1e-15)
    assert result.metrics["masked_row_fraction"] == pytest.approx(1 - sum(map(any, rows)) / 4, abs=1e-15)


def test_the_lower_bound_of_a_ratio_is_one_over_the_upper_one_unless_it_is_set() -> None:
    batch = from_log_ratios([[math.log(0.3)], [math.log(0.6)], [math.log(1.9)]])
    assert corrected(batch, rejections=[Rejection(kind="token", upper=2.0)]).mask.tolist() == [False, True, True]
    set_to = Rejection(kind="token", upper=2.0, lower=0.2)
    assert corrected(batch, rejections=[set_to]).mask.tolist() == [True, True, True]
    assert corrected(batch, rejections=[Rejection(kind="token", upper=2.0, lower=0.7)]).mask.tolist() == [0, 0, 1]


@pytest.mark.parametrize("kind", REJECTION_KINDS)
def test_bounds_are_inclusive(kind: RejectionKind) -> None:
    ratio = kind in ("token", "sequence", "geometric")
    result = corrected(from_log_ratios([[0.0, 0.0]]), rejections=[Rejection(kind=kind, upper=1.0 if ratio else 0.0)])
    assert result.mask.tolist() == [True, True]


@pytest.mark.parametrize(
    ("importance", "weights"),
    [
        (Importance(level="token", upper=3.0), [[2, 0.5, 1], [3], [2, 2], [1]]),
        (Importance(level="token", upper=3.0, lower=0.6), [[2, 0, 1], [0], [2, 2], [1]]),
        (Importance(level="sequence", upper=3.0), [[1, 1, 1], [3], [3, 3], [1]]),
        (Importance(level="sequence", upper=5.0), [[1, 1, 1], [4], [4, 4], [1]]),
        (Importance(level="sequence", upper=3.0, lower=0.1), [[1, 1, 1], [0], [0, 0], [1]]),
        # 7 tokens of mean 11.5 / 7, and 4 rows of mean 2: rows count once, however long they are.
        (
            Importance(level="token", upper=3.0, batch_normalize=True),
            [[14 / 11.5, 3.5 / 11.5, 7 / 11.5], [21 / 11.5], [14 / 11.5, 14 / 11.5], [7 / 11.5]],
        ),
        (Importance(level="sequence", upper=3.0, batch_normalize=True), [[0.5, 0.5, 0.5], [1.5], [1.5, 1.5], [0.5]]),
    ],
)
def test_weights_by_hand(importance: Importance, weights: list[list[float]]) -> None:
    found = by_row(corrected(HAND, importance).weights, HAND)
    for row, expected in zip(found, weights, strict=True):
        assert row == pytest.approx(expected, rel=1e-6)


def test_batch_normalisation_is_over_what_the_rules_leave() -> None:
    # Left are the rows of ratios 2, 1/2, 1 and 1; over all tokens the mean would be 11.5 / 7.
    rule = Rejection(kind="sequence", upper=3.0)
    result = corrected(HAND, Importance(level="token", upper=3.0, batch_normalize=True), [rule])
    expected = [2 / 1.125, 0.5 / 1.125, 1 / 1.125, 0, 0, 0, 1 / 1.125]
    assert result.weights is not None and result.weights.tolist() == pytest.approx(expected, rel=1e-6)


def test_every_metric_by_hand() -> None:
    # Ratios 2, 1/2, 1 and 4; the engine's log-probs are -1 and the trainer's -1 + log ratio.
    batch = from_log_ratios([[LN2, -LN2, 0.0], [2 * LN2]])
    metrics = corrected(batch, Importance(level="token", upper=3.0)).metrics
    expected = {
        "nonfinite_tokens": 0.0,
        "kl": -0.34657359027997264,  # -(ln 2 - ln 2 + 0 + ln 4) / 4
        "k3_kl": (0.5 + 3 - 2 * LN2) / 4,  # 2 - 1 - ln 2, 1/2 - 1 + ln 2, 0, 4 - 1 - ln 4
        "chi2_token": 4.3125,  # (4 + 1/4 + 1 + 16) / 4 - 1
        "chi2_seq": 7.5,  # (1 + 16) / 2 - 1
        "rollout_ppl": math.e,
        "old_ppl": math.e * 0.625,  # e and e / 4
        "log_ppl_ratio": -LN2,  # 0 and -ln 4
        "log_ppl_ratio_abs": LN2,
        "log_ppl_ratio_min": -2 * LN2,
        "log_ppl_ratio_max": 0.0,
        "above_fraction": 0.25,  # above 3
        "below_fraction": 0.0,  # below 1/3
        "masked_token_fraction": 0.0,
        "masked_row_fraction": 0.0,
        "weight_mean": 1.625,  # 2, 1/2, 1, 3
        "weight_std": math.sqrt(0.921875),  # 14.25 / 4 - 1.625^2
        "weight_min": 0.5,
        "weight_max": 3.0,
        "effective_sample_size": 1.625**2 / 3.5625,
    }
    assert metrics.keys() == expected.keys()
    assert metrics == pytest.approx(expected, rel=1e-7, abs=1e-12)


def test_metrics_of_sequence_weights_by_hand() -> None:
    batch = from_log_ratios([[LN2, -LN2, 0.0], [2 * LN2], [-LN2]])  # rows of ratio 1, 4 and 1/2
    metrics = corrected(batch, Importance(level="sequence", upper=3.0, lower=0.75)).metrics
    assert metrics["above_fraction"] == pytest.approx(1 / 3)  # of the rows
    assert metrics["below_fraction"] == pytest.approx(1 / 3)
    # Weights 1, 1, 1, 0, 0.
    assert metrics["weight_mean"] == pytest.approx(0.6)
    assert metrics["weight_std"] == pytest.approx(math.sqrt(0.24))
    assert (metrics["weight_min"], metrics["weight_max"]) == (0.0, 1.0)
    assert metrics["effective_sample_size"] == pytest.approx(0.6)
    normalised = corrected(batch, Importance(level="sequence", upper=3.0, lower=0.75, batch_normalize=True)).metrics
    # The mean over rows is 1/3: weights 3, 3, 3, 0, 0.
    assert normalised["weight_mean"] == pytest.approx(1.8)
    assert normalised["weight_std"] == pytest.approx(3 * math.sqrt(0.24))
    assert (normalised["weight_min"], normalised["weight_max"]) == pytest.approx((0.0, 3.0))
    assert normalised["effective_sample_size"] == pytest.approx(0.6)


def test_mismatch_is_measured_before_rejection_and_weights_after_it() -> None:
    batch = from_log_ratios([[LN2, -LN2, 0.0], [2 * LN2]])
    plain = corrected(batch, Importance(level="token", upper=3.0)).metrics
    rule = Rejection(kind="geometric", upper=2.0)
    metrics = corrected(batch, Importance(level="token", upper=3.0), [rule]).metrics
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "old_ppl", "log_ppl_ratio_min", "above_fraction"):
        assert metrics[name] == plain[name]
    assert metrics["masked_token_fraction"] == 0.25 and metrics["masked_row_fraction"] == 0.5
    assert metrics["geometric_rejected_rows"] == 1.0
    # Weights 2, 1/2, 1.
    assert metrics["weight_mean"] == pytest.approx(3.5 / 3)
    assert metrics["weight_std"] == pytest.approx(math.sqrt(5.25 / 3 - (3.5 / 3) ** 2))
    assert (metrics["weight_min"], metrics["weight_max"]) == pytest.approx((0.5, 2.0))
    assert metrics["effective_sample_size"] == pytest.approx((3.5 / 3) ** 2 / 1.75)


def test_without_weights_the_weight_metrics_are_of_the_plain_token_ratio() -> None:
    result = corrected(from_log_ratios([[math.log(1.5), -LN2 / 2, 0.0], [2 * LN2]]))
    assert result.weights is None
    assert result.metrics["weight_mean"] == pytest.approx((1.5 + math.sqrt(0.5) + 1 + 4) / 4)
    assert result.metrics["weight_max"] == pytest.approx(4.0)
    # Bounds that nobody set are 2 and 1/2; 4 is above.
    assert result.metrics["above_fraction"] == 0.25 and result.metrics["below_fraction"] == 0.0


def test_masked_tokens_take_part_in_nothing() -> None:
    rows: Rows = [[(-1.0, -1.0, 1), (-90.0, -1.0, 0), (-1.5, -1.0, 1), (5.0, -1.0, 0)], [(0.0, -9.0, 0)]]
    bare = [[(-1.0, -1.0, 1), (-1.5, -1.0, 1)]]
    rules = [Rejection(kind=kind, upper=1.7, lower=0.5) for kind in REJECTION_KINDS]
    importance = Importance(level="sequence", upper=2.0, batch_normalize=True)
    result = corrected(batch_of(rows), importance, rules, veto=1e-4)
    alone = corrected(batch_of(bare), importance, rules, veto=1e-4)
    assert result.mask.tolist() == [True, False, True, False, False]
    assert result.weights is not None and result.weights.tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert result.metrics == pytest.approx(alone.metrics, rel=1e-14)


# ---- extremes


def test_a_veto_looks_at_the_ratio_unclamped_and_drops_the_whole_row() -> None:
    batch = from_log_ratios([[0.0, -30.0], [0.0, -15.0, 0.0], [30.0, 0.0]])
    assert by_row(corrected(batch, veto=math.exp(-25)).mask, batch) == [[0, 0], [1, 1, 1], [1, 1]]
    result = corrected(batch, veto=1e-4)
    assert by_row(result.mask, batch) == [[0, 0], [0, 0, 0], [1, 1]]
    assert result.metrics["veto_rejected_rows"] == 2.0
    assert result.metrics["masked_row_fraction"] == pytest.approx(2 / 3)


def test_a_ratio_just_at_the_veto_stays() -> None:
    batch = from_log_ratios([[0.0], [-0.01]])
    assert corrected(batch, veto=1.0).mask.tolist() == [True, False]


def test_a_masked_token_does_not_veto_its_row() -> None:
    batch = batch_of([[(-1.0, -1.0, 1), (-99.0, -1.0, 0)]])
    assert corrected(batch, veto=1e-4).mask.tolist() == [True, False]


@pytest.mark.parametrize("importance", IMPORTANCES.values(), ids=IMPORTANCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_differences_give_finite_weights_and_metrics(importance: Importance | None, dtype: torch.dtype) -> None:
    batch = batch_of([[(-1.0, -1.0, 1)], [(-1000.0, -1.0, 1)], [(-1.0, -1000.0, 1)], [(-3e4, -0.5, 1)] * 3], dtype)
    result = corrected(batch, importance)
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert result.metrics["kl"] == pytest.approx((999 - 999 + 3 * 29999.5) / 6)
    if result.weights is not None:
        assert bool(result.weights.isfinite().all()) and bool((result.weights >= 0).all())


def test_exponents_are_clamped_at_20() -> None:
    result = corrected(from_log_ratios([[50.0], [-50.0]]), Importance(level="token", upper=math.inf))
    assert result.weights is not None
    assert result.weights.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-6)
    metrics = result.metrics
    assert metrics["chi2_token"] == pytest.approx(math.exp(40) / 2, rel=1e-12)
    assert metrics["chi2_seq"] == pytest.approx(math.exp(40) / 2, rel=1e-12)
    assert metrics["k3_kl"] == pytest.approx((math.exp(20) - 21 + 19) / 2, rel=1e-12)  # the difference is clamped
    rows = corrected(from_log_ratios([[15.0, 15.0], [-15.0, -15.0]]), Importance(level="sequence", upper=math.inf))
    assert rows.weights is not None
    assert rows.weights.tolist() == pytest.approx([math.exp(20)] * 2 + [math.exp(-20)] * 2, rel=1e-6)


def test_small_differences_in_float32_are_not_rounding_noise() -> None:
    x = torch.linspace(-2e-4, 2e-4, 1001)
    rollout = torch.zeros(1001)  # so that the difference itself is exact
    result = correct(rollout + x, rollout, torch.ones(1001, dtype=torch.bool), torch.tensor([0, 1001]))
    exact = float((x.double().expm1() - x.double()).mean())
    assert result.metrics["k3_kl"] == pytest.approx(exact, rel=2e-2)


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_a_token_without_a_finite_log_prob_is_dropped_and_counted(odd: float) -> None:
    rows: Rows = [[(-1.0, -1.0, 1), (-1.0, odd, 1), (-1.0 + LN2, -1.0, 1)], [(-1.0, odd, 0), (-1.0, -1.0, 1)]]
    without: Rows = [[(-1.0, -1.0, 1), (-1.0 + LN2, -1.0, 1)], [(-1.0, -1.0, 1)]]
    importance = Importance(level="sequence", upper=3.0)
    rules = [Rejection(kind=kind, upper=2.5) for kind in REJECTION_KINDS]
    result = corrected(batch_of(rows), importance, rules, veto=1e-4)
    bare = corrected(batch_of(without), importance, rules, veto=1e-4)
    assert result.mask.tolist() == [True, False, True, False, True]
    assert result.weights is not None and result.weights.tolist() == pytest.approx([2.0, 0.0, 2.0, 0.0, 1.0])
    assert result.metrics == pytest.approx(bare.metrics | {"nonfinite_tokens": 1.0}, rel=1e-14)


# ---- nothing there, nothing left


@pytest.mark.parametrize("importance", IMPORTANCES.values(), ids=IMPORTANCES)
@pytest.mark.parametrize("rows", [[], [[]], [[], []], [[(-1.0, -2.0, 0)], [(-9.0, 0.0, 0), (-1.0, -1.0, 0)]]])
def test_a_batch_without_a_token_that_takes_part_is_no_error(importance: Importance | None, rows: Rows) -> None:
    batch = batch_of(rows)
    result = corrected(batch, importance, [Rejection(kind=kind, upper=1.0) for kind in REJECTION_KINDS], veto=0.5)
    assert result.mask.tolist() == [False] * len(batch.mask)
    if importance is None:
        assert result.weights is None
    else:
        assert result.weights is not None and result.weights.tolist() == [0.0] * len(batch.mask)
    assert result.metrics["nonfinite_tokens"] == 0.0
    assert not any(math.isnan(value) for value in result.metrics.values())
    assert all(value == 0.0 for name, value in result.metrics.items() if name.endswith("rejected_rows"))


def test_empty_rows_between_others_change_nothing() -> None:
    full, gaps = [[LN2, 0.0], [-LN2]], [[], [LN2, 0.0], [], [], [-LN2], []]
    rules = [Rejection(kind=kind, upper=2.5) for kind in REJECTION_KINDS]
    first = corrected(from_log_ratios(full), IMPORTANCES["sequence"], rules, 1e-4)
    second = corrected(from_log_ratios(gaps), IMPORTANCES["sequence"], rules, 1e-4)
    assert first.mask.tolist() == second.mask.tolist() and first.metrics == second.metrics
    assert first.weights is not None and second.weights is not None and torch.equal(first.weights, second.weights)


def test_when_nothing_is_left_the_error_names_what_rejected_how_many_rows() -> None:
    batch = from_log_ratios([[3.0, 3.0], [3.0], [-30.0]])
    rules = [Rejection(kind="geometric", upper=2.0), Rejection(kind="seq_max_k3", upper=18.0)]
    with pytest.raises(AlgorithmError) as caught:
        corrected(batch, None, rules, veto=1e-4)
    message = str(caught.value)
    assert "none of the 4 response tokens is left" in message
    assert "veto rejects 1 of 3 rows" in message
    assert "geometric rejects 3 of 3 rows" in message
    assert "seq_max_k3 rejects 1 of 3 rows" in message
    assert "algorithm.rollout_correction" in message


def test_an_engine_that_gives_no_finite_log_prob_is_an_error_that_says_so() -> None:
    with pytest.raises(AlgorithmError, match="2 of them have an infinite or NaN log-prob"):
        corrected(batch_of([[(-1.0, math.nan, 1), (-1.0, -1.0, 0)], [(-1.0, -math.inf, 1)]]))


# ---- properties

log_ratios = st.one_of(
    st.just(0.0), st.floats(-1, 1), st.floats(-6, 6), st.sampled_from([-50.0, 50.0]), st.floats(-1e-3, 1e-3)
)
finite_tokens = st.tuples(log_ratios, st.floats(-8, -0.01), st.integers(0, 3).map(lambda n: int(n > 0)))
odd_tokens = st.tuples(log_ratios, st.sampled_from([math.inf, -math.inf, math.nan]), st.integers(0, 1))


@st.composite
def batches(draw: st.DrawFn, finite: bool = False) -> Batch:
    """The last row holds a token on which both policies agree: no rule that allows a ratio of 1 rejects it."""
    tokens = finite_tokens if finite else st.one_of(*[finite_tokens] * 6, odd_tokens)
    rows = draw(st.lists(st.lists(tokens, min_size=0, max_size=6), max_size=6))
    return batch_of([[(rollout + x, rollout, m) for x, rollout, m in row] for row in rows] + [[(-1.0, -1.0, 1)]])


importances = st.builds(
    Importance,
    level=st.sampled_from(["token", "sequence"]),
    upper=st.floats(1.0, 10.0),
    lower=st.none() | st.floats(0.01, 1.0),
    batch_normalize=st.booleans(),
)


@st.composite
def rejections(draw: st.DrawFn) -> Rejection:
    kind = draw(st.sampled_from(REJECTION_KINDS))
    if kind in ("token", "sequence", "geometric"):
        return Rejection(kind=kind, upper=draw(st.floats(1.0, 6.0)), lower=draw(st.none() | st.floats(0.01, 1.0)))
    return Rejection(kind=kind, upper=draw(st.floats(0.0, 4.0)))


rules = st.lists(rejections(), max_size=3)
vetoes = st.none() | st.sampled_from([1e-4, 0.1, 0.9])


def same(first: Correction, second: Correction, tokens: Tensor | None = None) -> None:
    """Equal but for rounding; the second's tokens are the first's at ``tokens``."""
    order = slice(None) if tokens is None else tokens
    assert torch.equal(second.mask, first.mask[order])
    if first.weights is not None and second.weights is not None:
        torch.testing.assert_close(second.weights, first.weights[order], rtol=1e-6, atol=0)
    assert (first.weights is None) == (second.weights is None)
    assert second.metrics == pytest.approx(first.metrics, rel=1e-6, abs=1e-6)


@FEW
@given(batch=batches(), importance=st.none() | importances, rules=rules, veto=vetoes, data=st.data())
def test_the_order_of_rows_does_not_matter(
    batch: Batch, importance: Importance | None, rules: list[Rejection], veto: float | None, data: st.DataObject
) -> None:
    starts = batch.offsets.tolist()
    order = data.draw(st.permutations(range(len(starts) - 1)))
    tokens = torch.tensor([token for row in order for token in range(starts[row], starts[row + 1])])
    moved = Batch(
        old=batch.old[tokens],
        rollout=batch.rollout[tokens],
        mask=batch.mask[tokens],
        offsets=lengths_to_offsets(batch.offsets.diff()[torch.tensor(order)]),
    )
    same(corrected(batch, importance, rules, veto), corrected(moved, importance, rules, veto), tokens)


@FEW
@given(batch=batches(), importance=st.none() | importances, rules=rules, veto=vetoes, tokens=st.integers(1, 12))
def test_the_size_of_blocks_does_not_matter(
    batch: Batch, importance: Importance | None, rules: list[Rejection], veto: float | None, tokens: int
) -> None:
    whole = corrected(batch, importance, rules, veto)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_correction, "row_blocks", partial(row_blocks, tokens=tokens))
        same(whole, corrected(batch, importance, rules, veto))


@FEW
@given(batch=batches(), importance=importances, rules=rules, veto=vetoes)
def test_weights_are_0_where_nothing_is_left_and_never_above_the_bound(
    batch: Batch, importance: Importance, rules: list[Rejection], veto: float | None
) -> None:
    plain = Importance(level=importance.level, upper=importance.upper, lower=importance.lower)
    result = corrected(batch, plain, rules, veto)
    weights = result.weights
    assert weights is not None and bool((weights[~result.mask] == 0).all())
    assert bool((weights >= 0).all()) and bool((weights <= torch.tensor(plain.upper)).all())
    inside = weights[result.mask]
    if plain.lower is None:
        assert bool((inside > 0).all())
    else:
        assert bool(((inside == 0) | (inside >= torch.tensor(plain.lower))).all())


@FEW
@given(batch=batches(), importance=importances, rules=rules, veto=vetoes)
def test_normalised_weights_have_mean_1(
    batch: Batch, importance: Importance, rules: list[Rejection], veto: float | None
) -> None:
    normalised = Importance(
        level=importance.level, upper=importance.upper, lower=importance.lower, batch_normalize=True
    )
    result = corrected(batch, normalised, rules, veto)
    weights = by_row(result.weights, batch)
    kept = by_row(result.mask, batch)
    left = [[w for w, k in zip(*row, strict=True) if k] for row in zip(weights, kept, strict=True)]
    values = list(itertools.chain.from_iterable(left)) if normalised.level == "token" else [r[0] for r in left if r]
    assert math.fsum(values) / len(values) == pytest.approx(1.0, rel=1e-6)


@FEW
@given(batch=batches(), rules=rules, veto=vetoes)
def test_rejection_only_ever_clears_the_mask(batch: Batch, rules: list[Rejection], veto: float | None) -> None:
    kept = corrected(batch, None, rules, veto).mask
    assert not bool((kept & ~batch.mask).any())


@FEW
@given(batch=batches(), rules=rules, veto=vetoes)
def test_several_rules_keep_what_each_alone_keeps_and_the_veto_is_one_more(
    batch: Batch, rules: list[Rejection], veto: float | None
) -> None:
    together = corrected(batch, None, rules, veto)
    alone = [corrected(batch, None, [rule]) for rule in rules] + [corrected(batch, None, [], veto)]
    assert torch.equal(together.mask, torch.stack([each.mask for each in alone]).all(0))
    if veto is not None:
        assert together.metrics["veto_rejected_rows"] == alone[-1].metrics["veto_rejected_rows"]


@FEW
@given(batch=batches(), veto=vetoes)
def test_rules_of_whole_rows_and_the_veto_keep_all_of_a_row_or_none(batch: Batch, veto: float | None) -> None:
    finite = batch.mask & (batch.old - batch.rollout).isfinite()
    for kind in REJECTION_KINDS:
        if not kind.startswith("token"):
            kept = by_row(corrected(batch, None, [Rejection(kind=kind, upper=1.5)], veto).mask, batch)
            for left, could in zip(kept, by_row(finite, batch), strict=True):
                assert left == could or not any(left)


@FEW
@given(
    rows=st.lists(st.lists(st.tuples(st.floats(-8, -0.01), st.integers(0, 1)), max_size=6), max_size=6),
    importance=st.none() | importances,
    rules=rules,
    veto=vetoes,
)
def test_equal_policies_reject_nothing_and_weigh_1(
    rows: list[list[tuple[float, int]]], importance: Importance | None, rules: list[Rejection], veto: float | None
) -> None:
    batch = batch_of([[(lp, lp, m) for lp, m in row] for row in rows] + [[(-1.0, -1.0, 1)]])
    result = corrected(batch, importance, rules, veto)
    assert torch.equal(result.mask, batch.mask)
    if importance is not None:
        assert result.weights is not None and torch.equal(result.weights, batch.mask.float())
    metrics = result.metrics
    zero = ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_ratio", "log_ppl_ratio_abs", "weight_std")
    assert [metrics[name] for name in zero] == pytest.approx([0.0] * len(zero), abs=1e-12)
    ones = ("weight_mean", "weight_min", "weight_max", "effective_sample_size")
    assert [metrics[name] for name in ones] == pytest.approx([1.0] * len(ones), rel=1e-12)
    nothing = ("above_fraction", "below_fraction", "masked_token_fraction", "masked_row_fraction", "nonfinite_tokens")
    assert [metrics[name] for name in nothing] == [0.0] * len(nothing)
    assert metrics["old_ppl"] == metrics["rollout_ppl"] >= 1.0


@FEW
@given(batch=batches(), importance=st.none() | importances, rules=rules, veto=vetoes)
def test_metrics_stay_within_their_range(
    batch: Batch, importance: Importance | None, rules: list[Rejection], veto: float | None
) -> None:
    metrics = corrected(batch, importance, rules, veto).metrics
    assert metrics["k3_kl"] >= 0.0
    assert 0.0 < metrics["effective_sample_size"] <= 1.0
    assert metrics["log_ppl_ratio_min"] <= metrics["log_ppl_ratio"] <= metrics["log_ppl_ratio_max"]
    assert metrics["weight_min"] <= metrics["weight_mean"] * (1 + 1e-6)
    assert metrics["weight_mean"] <= metrics["weight_max"] * (1 + 1e-6)
    for name, value in metrics.items():
        if name.endswith("_fraction"):
            assert 0.0 <= value <= 1.0, name


# ---- a micro-batch in bypass mode


@FEW
@given(batch=batches(finite=True), importance=st.none() | importances, rules=rules, veto=vetoes)
def test_rows_of_finite_unmasked_tokens_are_corrected_as_in_the_whole_batch(
    batch: Batch, importance: Importance | None, rules: list[Rejection], veto: float | None
) -> None:
    if importance is not None:
        importance = Importance(level=importance.level, upper=importance.upper, lower=importance.lower)
    every = Batch(batch.old, batch.rollout, torch.ones_like(batch.mask), batch.offsets)
    whole = corrected(every, importance, rules, veto)
    kept, weights = correct_rows(
        every.old - every.rollout, every.offsets, importance=importance, rejections=rules, veto=veto
    )
    assert torch.equal(kept, whole.mask)
    if importance is None:
        assert weights is None and whole.weights is None
    else:
        assert weights is not None and whole.weights is not None and torch.equal(weights, whole.weights)


def test_weights_of_a_micro_batch_have_no_gradient_and_an_empty_one_is_none() -> None:
    log_rho = torch.tensor([LN2, -LN2, 2 * LN2], requires_grad=True)
    kept, weights = correct_rows(
        log_rho,
        torch.tensor([0, 2, 3]),
        importance=Importance(level="token", upper=3.0),
        rejections=[Rejection(kind="sequence", upper=2.0)],
    )
    assert kept.tolist() == [True, True, False]
    assert weights is not None and not weights.requires_grad and weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx([2.0, 0.5, 0.0], rel=1e-6)
    kept, weights = correct_rows(torch.zeros(0), torch.tensor([0]), importance=Importance(level="sequence", upper=2.0))
    assert weights is not None and (kept.tolist(), weights.tolist()) == ([], [])


def test_a_micro_batch_may_lose_all_its_rows() -> None:
    rule = Rejection(kind="token", upper=2.0)
    kept, weights = correct_rows(torch.tensor([9.0]), torch.tensor([0, 1]), importance=None, rejections=[rule])
    assert kept.tolist() == [False] and weights is None
