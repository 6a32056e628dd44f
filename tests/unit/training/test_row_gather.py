import pytest
import torch

from grpo_lib.training.row_gather import RowGather, sum_rows, take_rows

SOURCE = torch.tensor([2, 0, 2, 2, 1])
ROWS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
GRADIENT = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0], [8.0, 80.0], [16.0, 160.0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_all_places_come_together(dtype: torch.dtype) -> None:
    rows = ROWS.detach().clone().to(dtype).requires_grad_()
    gathered = RowGather.of(SOURCE, 4)(rows)
    assert gathered.dtype == dtype
    assert torch.equal(gathered, rows[SOURCE])
    gathered.backward(GRADIENT.to(dtype))
    assert rows.grad is not None and rows.grad.dtype == dtype
    assert rows.grad.tolist() == [[2, 20], [16, 160], [13, 130], [0, 0]]


def test_places_that_are_padding_give_none() -> None:
    rows = ROWS.detach().clone().requires_grad_()
    RowGather.of(SOURCE, 4, real=torch.tensor([0, 1, 3]))(rows).backward(GRADIENT)
    assert rows.grad is not None
    assert rows.grad.tolist() == [[2, 20], [0, 0], [9, 90], [0, 0]]


@pytest.mark.parametrize("shape", [(0, 2, 3), (5, 2, 3), (5, 1)])
def test_rows_of_any_shape_and_of_none(shape: tuple[int, ...]) -> None:
    rows = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    index = torch.arange(shape[0]).flip(0)
    assert torch.equal(take_rows(rows, index), rows.flip(0))
    summed = sum_rows(rows, index, torch.tensor([0, 0, shape[0]]))
    assert torch.equal(summed[0], torch.zeros(shape[1:])) and torch.equal(summed[1], rows.sum(0))


def test_sums_of_bfloat16_are_rounded_once() -> None:
    ones = torch.ones(1000, 1, dtype=torch.bfloat16)  # adding one by one would stop at 256
    summed = sum_rows(ones, torch.arange(1000), torch.tensor([0, 1000]))
    assert summed.item() == 1000


def test_gradients_agree_with_numerical_ones() -> None:
    gather = RowGather.of(SOURCE, 4)
    assert torch.autograd.gradcheck(gather, (ROWS.detach().double().requires_grad_(),))
