"""One rollout of several turns while it is played: token ids that only grow."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.generation.base import Generated


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the policy wrote at a stretch."""

    ids: list[int]
    text: str
    """Decoded alone, with control tokens: to look for calls in, never to be encoded again."""
    finish: int
    """``STOP`` or ``LENGTH``."""


class Episode:
    """The response to one prompt, as turns of the policy and observations.

    Nothing that was appended changes: what the policy reads, what it is trained on and what is stored are the same ids.

    Args:
        row: among the request's rows.
        prompt: ``int32[n]``: token ids.
        seed: of the row.
        limit: tokens that the response may have, observations included.
    """

    def __init__(self, *, row: int, prompt: Tensor, seed: int, limit: int) -> None:
        self.row, self.seed, self.limit = row, seed, limit
        self._ids = [prompt.int()]
        self._logprobs: list[Tensor] = []
        self._mask: list[Tensor] = []
        self.turns = 0
        """Of the policy."""
        self.length = 0
        """Tokens of the response."""
        self.tool_calls = 0
        self.tool_errors = 0
        self.failure: str | None = None
        self.finish: int | None = None
        """Set at the end: a place in ``FINISH_REASONS``."""

    @property
    def ids(self) -> Tensor:
        """``int32``: prompt and response so far."""
        return torch.cat(self._ids)

    @property
    def remaining(self) -> int:
        """Tokens that the response may still get."""
        return self.limit - self.length

    def append_turn(self, ids: Tensor, logprobs: Tensor) -> None:
        """What the engine sampled; for `Model`."""
        self._append(ids, logprobs, policy=True)
        self.turns += 1

    def observe(self, ids: Sequence[int]) -> None:
        """Appends tokens that the policy reads and is not trained on.

        Raises:
            ValueError: they don't fit, or leave no token for the policy.
        """
        if len(ids) >= self.remaining:
            raise ValueError(
                f"an observation of {len(ids)} tokens leaves nothing of the {self.remaining} that remain; cut it, or "
                "end the rollout with LENGTH"
            )
        self._append(torch.tensor(list(ids), dtype=torch.int32), torch.zeros(len(ids)), policy=False)

    def _append(self, ids: Tensor, logprobs: Tensor, *, policy: bool) -> None:
        assert len(ids) == len(logprobs) <= self.remaining, f"{len(ids)} tokens, {self.remaining} remain"
        self._ids.append(ids.int())
        self._logprobs.append(logprobs.float())
        self._mask.append(torch.full((len(ids),), policy))
        self.length += len(ids)


@dataclass(frozen=True, kw_only=True)
class Played(Generated):
    """Rollouts of several turns."""

    tool_calls: Tensor
    """``int32[B]``."""
    tool_errors: Tensor
    """``int32[B]``: calls that raised or took too long."""


def collect(episodes: Sequence[Episode]) -> Played:
    """The rollouts that were played to their end, in their order."""

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def flat(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.cat([torch.empty(0, dtype=dtype), *parts])

    failures = [each.failure for each in episodes]
    return Played(
        responses=Ragged(
            values=flat([part for each in episodes for part in each._ids[1:]], torch.int32),
            offsets=lengths_to_offsets(torch.tensor([each.length for each in episodes], dtype=torch.int64)),
        ),
        logprobs=flat([part for each in episodes for part in each._logprobs], torch.float32),
        finish=torch.tensor([each.finish for each in episodes], dtype=torch.uint8),
        mask=flat([part for each in episodes for part in each._mask], torch.bool),
        turns=numbers([each.turns for each in episodes]),
        failures=failures if any(each is not None for each in failures) else None,
        tool_calls=numbers([each.tool_calls for each in episodes]),
        tool_errors=numbers([each.tool_errors for each in episodes]),
    )
