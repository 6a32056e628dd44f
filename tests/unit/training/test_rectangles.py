import torch

from grpo_lib.data.ragged import lengths_to_offsets
from grpo_lib.training.rectangles import PackedRows, rectangle_attention


def test_rectangles_hold_every_token_once_and_little_padding() -> None:
    offsets = lengths_to_offsets(torch.tensor([100, 3, 95, 20, 9, 100])).int()
    placed = PackedRows(offsets).rectangles
    assert placed.shapes == [(3, 100), (1, 20), (2, 9)]
    assert torch.equal(placed.source[placed.place], torch.arange(327))
    assert len(placed.source) == sum(height * width for height, width in placed.shapes)
    assert placed.source[95 + 200 : 300].tolist() == [197] * 5  # the padding of the third row, after two of 100


def test_a_window_counts_the_token_itself() -> None:
    value = torch.arange(5.0)[:, None, None]
    query = key = torch.zeros(5, 1, 1)
    rows = PackedRows(torch.tensor([0, 4, 5], dtype=torch.int32))
    seen = rectangle_attention(query, key, value, rows, scale=1.0, window=2, softcap=None)
    assert seen.flatten().tolist() == [0.0, 0.5, 1.5, 2.5, 4.0]
