import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.data.ragged import lengths_to_offsets

FEW = settings(deadline=None, max_examples=30)

# Rows: 2 of 3 tokens valid, 1 of 1, 0 of 2, 4 of 4, and an empty row; 7 valid tokens in 3 valid rows.
MASK = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1, 1], dtype=torch.uint8)
OFFSETS = torch.tensor([0, 3, 4, 6, 10, 10])
LOSS = torch.tensor([1.0, 3.0, 1e9, 5.0, 1e9, -1e9, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
LONGEST = 8

WEIGHTS = {
    "token-mean": [1 / 7, 1 / 7, 0, 1 / 7, 0, 0, 1 / 7, 1 / 7, 1 / 7, 1 / 7],
    "token-sum": [1, 1, 0, 1, 0, 0, 1, 1, 1, 1],
    "seq-mean-token-mean": [1 / 6, 1 / 6, 0, 1 / 3, 0, 0, 1 / 12, 1 / 12, 1 / 12, 1 / 12],
    "seq-mean-token-sum": [1 / 3, 1 / 3, 0, 1 / 3, 0, 0, 1 / 3, 1 / 3, 1 / 3, 1 / 3],
    "seq-mean-token-sum-norm": [1 / 24, 1 / 24, 0, 1 / 24, 0, 0, 1 / 24, 1 / 24, 1 / 24, 1 / 24],
}
EXPECTED = {
    "token-mean": 19 / 7,
    "token-sum": 19.0,
    "seq-mean-token-mean": (2.0 + 5.0 + 2.5) / 3,
    "seq-mean-token-sum": (4.0 + 5.0 + 10.0) / 3,
    "seq-mean-token-sum-norm": (4.0 + 5.0 + 10.0) / 3 / 8,
}
EVERY_MODE = pytest.mark.parametrize("name", EXPECTED)


def weights_of(name: str, mask: Tensor, offsets: Tensor) -> Tensor:
    return AGGREGATIONS[name].function(mask, offsets, LONGEST)


def test_every_aggregation_has_a_value_by_hand() -> None:
    assert sorted(EXPECTED) == sorted(WEIGHTS) == AGGREGATIONS.names()


@EVERY_MODE
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32])
def test_the_weights_by_hand(name: str, dtype: torch.dtype) -> None:
    weights = weights_of(name, MASK.to(dtype), OFFSETS)
    assert weights.dtype == torch.float64
    assert weights.tolist() == pytest.approx(WEIGHTS[name], rel=1e-15)


@EVERY_MODE
def test_the_weighted_sum_is_the_value_by_hand(name: str) -> None:
    assert float(weights_of(name, MASK, OFFSETS) @ LOSS) == pytest.approx(EXPECTED[name], rel=1e-14)


@EVERY_MODE
def test_masked_tokens_weigh_exactly_0(name: str) -> None:
    assert torch.equal(weights_of(name, MASK, OFFSETS) != 0, MASK.bool())


@EVERY_MODE
@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1, 2], [3, 0]])
def test_a_batch_without_a_valid_token_has_weights_0_and_not_nan(name: str, lengths: list[int]) -> None:
    offsets = lengths_to_offsets(torch.tensor(lengths).long())
    weights = weights_of(name, torch.zeros(sum(lengths), dtype=torch.uint8), offsets)
    assert weights.tolist() == [0.0] * sum(lengths)


@FEW
@given(rows=st.lists(st.lists(st.booleans(), max_size=6), max_size=8))
def test_weights_agree_with_the_formulas_row_by_row_and_with_their_sums(rows: list[list[bool]]) -> None:
    mask = torch.tensor([each for row in rows for each in row]).bool()
    offsets = lengths_to_offsets(torch.tensor([len(row) for row in rows]).long())
    tokens, valid_rows = sum(map(sum, rows)), sum(any(row) for row in rows)
    sums = {
        "token-mean": float(tokens > 0),
        "token-sum": tokens,
        "seq-mean-token-mean": float(tokens > 0),
        "seq-mean-token-sum": tokens / max(1, valid_rows),
        "seq-mean-token-sum-norm": tokens / max(1, valid_rows) / LONGEST,
    }
    for name, total in sums.items():
        weights = weights_of(name, mask, offsets)
        assert float(weights.sum()) == pytest.approx(total, rel=1e-12)
        for row, (a, b) in zip(rows, itertools.pairwise(offsets.tolist()), strict=True):
            share = {
                "token-mean": 1 / max(1, tokens),
                "token-sum": 1.0,
                "seq-mean-token-mean": 1 / max(1, sum(row)) / max(1, valid_rows),
                "seq-mean-token-sum": 1 / max(1, valid_rows),
                "seq-mean-token-sum-norm": 1 / max(1, valid_rows) / LONGEST,
            }[name]
            assert weights[a:b].tolist() == pytest.approx([share * valid for valid in row], rel=1e-14)


def test_a_row_without_a_valid_token_changes_no_weight_of_another() -> None:
    without = torch.cat([MASK[:4], MASK[6:]]), torch.tensor([0, 3, 4, 8])
    for name in EXPECTED:
        weights = weights_of(name, MASK, OFFSETS)
        assert torch.equal(weights_of(name, *without), torch.cat([weights[:4], weights[6:]]))


def test_dr_grpos_denominator_is_a_constant_and_not_the_sum_of_the_mask() -> None:
    short = weights_of("seq-mean-token-sum-norm", torch.ones(2), torch.tensor([0, 2]))
    long = weights_of("seq-mean-token-sum-norm", torch.ones(6), torch.tensor([0, 6]))
    assert short.tolist() == [1 / 8] * 2 and long.tolist() == [1 / 8] * 6


def test_only_dr_grpos_weights_depend_on_the_longest_response() -> None:
    for name in EXPECTED:
        at_8, at_16 = (AGGREGATIONS[name].function(MASK, OFFSETS, longest) for longest in (8, 16))
        assert torch.equal(at_8, at_16 * 2 if name == "seq-mean-token-sum-norm" else at_16)


def test_the_token_mean_is_not_the_mean_of_micro_batch_means() -> None:
    # Rows 1-2 and rows 3-5 apart: means 3 and 2.5; their mean is wrong because the second holds more tokens.
    apart = [weights_of("token-mean", m, o) for m, o in ((MASK[:4], OFFSETS[:3]), (MASK[4:], OFFSETS[2:] - 4))]
    wrong = (float(apart[0] @ LOSS[:4]) + float(apart[1] @ LOSS[4:])) / 2
    assert wrong == pytest.approx(2.75)
    assert abs(wrong - EXPECTED["token-mean"]) > 0.03
