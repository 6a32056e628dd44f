import pytest
import torch

from grpo_lib.algorithms.aggregation import AGGREGATIONS

# Rows: 2 of 3 tokens valid, 1 of 1, 0 of 2, 4 of 4, and an empty row; 7 valid tokens in 3 valid rows.
MASK = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1, 1], dtype=torch.uint8)
OFFSETS = torch.tensor([0, 3, 4, 6, 10, 10])
LOSS = torch.tensor([1.0, 3.0, 1e9, 5.0, 1e9, -1e9, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)

EXPECTED = {
    "token-mean": 19 / 7,
    "token-sum": 19.0,
    "seq-mean-token-mean": (2.0 + 5.0 + 2.5) / 3,
    "seq-mean-token-sum": (4.0 + 5.0 + 10.0) / 3,
    "seq-mean-token-sum-norm": (4.0 + 5.0 + 10.0) / 3 / 8,
}


def test_every_aggregation_has_a_value_by_hand() -> None:
    assert sorted(EXPECTED) == AGGREGATIONS.names()


@pytest.mark.parametrize("name", EXPECTED)
def test_the_weighted_sum_is_the_value_by_hand(name: str) -> None:
    weights = AGGREGATIONS[name](MASK, OFFSETS, 8)
    assert weights.dtype == torch.float64
    assert float(weights @ LOSS) == pytest.approx(EXPECTED[name], rel=1e-14)


@pytest.mark.parametrize("name", EXPECTED)
def test_masked_tokens_weigh_exactly_0(name: str) -> None:
    weights = AGGREGATIONS[name](MASK, OFFSETS, 8)
    assert torch.equal(weights != 0, MASK.bool())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_batch_without_a_valid_token_has_weights_0_and_not_nan(name: str) -> None:
    weights = AGGREGATIONS[name](torch.zeros(3, dtype=torch.uint8), torch.tensor([0, 1, 3]), 8)
    assert weights.tolist() == [0.0, 0.0, 0.0]


def test_the_token_mean_is_not_the_mean_of_micro_batch_means() -> None:
    # Rows 1-2 and rows 3-5 apart: means 3 and 2.5; their mean is wrong because the second holds more tokens.
    apart = [AGGREGATIONS["token-mean"](m, o, 8) for m, o in ((MASK[:4], OFFSETS[:3]), (MASK[4:], OFFSETS[2:] - 4))]
    wrong = (float(apart[0] @ LOSS[:4]) + float(apart[1] @ LOSS[4:])) / 2
    assert wrong == pytest.approx(2.75)
    assert abs(wrong - EXPECTED["token-mean"]) > 0.03
