import torch

from grpo_lib.data.ragged import lengths_to_offsets
from grpo_lib.training.rectangles import PackedRows, rectangle_attention


def test_rectangles_hold_every_token_once_and_little_padding() -> None:
    offsets = lengths_to_offsets(torch.tensor([100, 3, 95, 20, 9, 100])).int()
    placed = PackedRows(offsets).rectangles
    assert placed.shapes == [(3, 100), (1, 20), (2, 9)]
    source = placed.spread.source
    assert torch.equal(source[placed.place], torch.arange(327))
    assert len(source) == sum(height * width for height, width in placed.shapes)
    assert source[95 + 200 : 300].tolist() == [197] * 5  # the padding of the third row, after two of 100


def test_a_window_counts_the_token_itself() -> None:
    value = torch.arange(5.0)[:, None, None]
    query = key = torch.zeros(5, 1, 1)
    rows = PackedRows(torch.tensor([0, 4, 5], dtype=torch.int32))
    seen = rectangle_attention(query, key, value, rows, scale=1.0, window=2, softcap=None)
    assert seen.flatten().tolist() == [0.0, 0.5, 1.5, 2.5, 4.0]


def test_a_shared_prompt_stands_in_each_of_its_rows_and_is_collected_once() -> None:
    # A prompt of two tokens (0, 1) with responses (2, 3, 4) and (5,): rows 0 1 2 3 4 and 0 1 5.
    rows = PackedRows(torch.tensor([0, 5, 8], dtype=torch.int32), torch.tensor([0, 1, 2, 3, 4, 0, 1, 5]), 6)
    placed = rows.rectangles
    assert placed.shapes == [(2, 5)]
    assert placed.spread.source.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 5, 5]
    assert placed.place.tolist() == [0, 1, 2, 3, 4, 7]
    tokens = torch.arange(6.0)[:, None].requires_grad_()
    (placed.spread(tokens) * torch.tensor([1.0, 2, 3, 4, 5, 10, 20, 30, 40, 50])[:, None]).sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.flatten().tolist() == [11, 22, 3, 4, 5, 30]  # none from the padding of the second row
