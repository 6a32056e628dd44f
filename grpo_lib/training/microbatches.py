"""Rows into micro-batches: sorted by length, cut by a budget of padded tokens.

CPU attention kernels take no rows of different length in one call, so rows of nearly equal length share a rectangle;
what is padded is known from lengths, never from token values. The gradient does not depend on the cut
(``algorithms/aggregation.py``).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_lib.data.ragged import Ragged, concat_rows, lengths_to_offsets, repeat_rows
from grpo_lib.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Prompts and the responses to score, row by row."""

    prompts: Ragged
    """Token ids, ``[B]`` rows of at least one token."""
    responses: Ragged
    """Token ids, ``[B]`` rows of at least one token."""

    def gather(self, rows: Tensor) -> "Sequences":
        return Sequences(prompts=self.prompts.gather(rows), responses=self.responses.gather(rows))


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One rectangle of ``b`` rows for the model."""

    rows: Tensor
    """``int64[b]``: rows of the sequences, longest first."""
    input_ids: Tensor
    """``int64[b, L]``, padded on the right with 0: causal attention keeps real tokens from seeing the padding."""
    predicts: Tensor
    """``int64[n]``: positions in ``input_ids.flatten()`` whose output predicts a response token."""
    targets: Tensor
    """``int64[n]``: those response tokens, row by row."""
    offsets: Tensor
    """``int64[b+1]``: of the rows in ``targets``."""

    def to(self, device: torch.device) -> "MicroBatch":
        """The same with what the model reads on ``device``; row numbers and offsets stay on the CPU."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            predicts=self.predicts.to(device),
            targets=self.targets.to(device),
        )


def bins(lengths: Tensor, max_tokens: int) -> list[Tensor]:
    """Row indices ``int64[b]`` of each micro-batch: longest rows first, ``b * longest <= max_tokens``.

    Raises:
        ConfigError: a row is longer than the budget.
    """
    if len(lengths) == 0:
        return []
    order = torch.argsort(lengths, descending=True, stable=True)
    longest = lengths[order].tolist()
    if longest[0] > max_tokens:
        raise ConfigError(
            f"a row of {longest[0]} tokens does not fit into trainer.max_tokens={max_tokens}; raise it, "
            "or lower rollout.max_new_tokens"
        )
    cuts, start = [], 0
    while start < len(order):
        size = max_tokens // longest[start]
        cuts.append(order[start : start + size])
        start += size
    return cuts


def micro_batch(sequences: Sequences, rows: Tensor) -> MicroBatch:
    """The rectangle of the given rows. The causal shift stands here and nowhere else."""
    chosen = sequences.gather(rows)
    tokens = concat_rows(chosen.prompts, chosen.responses)
    width = int(tokens.lengths.max())
    column = torch.arange(width)
    index = tokens.offsets[:-1, None] + column
    real = column < tokens.lengths[:, None]
    input_ids = torch.where(real, tokens.values[index.clamp(max=len(tokens.values) - 1)].long(), 0)
    # The first response token is predicted at the last prompt position, and so on.
    first = torch.arange(len(rows)) * width + chosen.prompts.lengths - 1
    offsets = chosen.responses.offsets
    predicts = repeat_rows(first - offsets[:-1], offsets) + torch.arange(int(offsets[-1]))
    return MicroBatch(
        rows=rows, input_ids=input_ids, predicts=predicts, targets=chosen.responses.values.long(), offsets=offsets
    )


def scatter_rows(parts: list[tuple[Tensor, Ragged]], rows: int) -> Ragged:
    """Puts results of micro-batches (row indices, ragged values) back into row order."""
    order = torch.argsort(torch.cat([indices for indices, _ in parts]))
    assert len(order) == rows, "every row belongs to one micro-batch"
    lengths = torch.cat([part.lengths for _, part in parts])
    together = Ragged(values=torch.cat([part.values for _, part in parts]), offsets=lengths_to_offsets(lengths))
    return together.gather(order)
