"""What a generation server of any kind is asked for and answers; each kind has its own words for it.

To add one: a `Dialect` in a file of its own, a line in ``DIALECTS`` of `server`, its name in ``rollout.server.kind``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from grpo_lib.errors import ParityError
from grpo_lib.generation.base import Sampling
from grpo_lib.generation.server_http import Connection
from grpo_lib.training.export import Description

NOT_FOUND, INTERNAL = 404, 500


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a server shall generate: one response."""

    ids: list[int]
    """Of the prompt, and of what there is of the response already."""
    seed: int
    """0 .. 2^63 - 1."""
    limit: int
    """Of new tokens."""
    sampling: Sampling
    stop_ids: Sequence[int]
    """All tokens that end a row."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What it generated."""

    ids: list[int]
    """New tokens, with the one that ended the row."""
    logprobs: list[float]
    stopped: bool
    """It ended by itself, not at the limit."""


class Dialect(Protocol):
    """One kind of server."""

    async def generate(self, server: Connection, ask: Ask, digest: str) -> Reply:
        """
        Args:
            digest: of the weights that the response shall come from.
        """
        ...

    def write(self, model: Description, weights: Mapping[str, Tensor], dtype: torch.dtype, folder: Path) -> None:
        """Writes weights as ``load`` takes them."""
        ...

    async def introduce(self, server: Connection) -> str:
        """Software and version.

        Raises:
            ConfigError: it was not started as it must be; with what is missing.
        """
        ...

    async def held(self, server: Connection) -> str | None:
        """Digest of the weights that it holds; None: those that it was started with."""
        ...

    async def load(self, server: Connection, folder: Path, digest: str) -> None:
        """The server takes the weights in the folder and forgets what it keeps of prompts under the old ones.

        Raises:
            ParityError: it holds others afterwards.
            ConfigError: it can't.
        """
        ...


def numbers(logprobs: Sequence[float | None]) -> list[float]:
    """Log-probs as they came: JSON has no NaN."""
    return [math.nan if each is None else each for each in logprobs]


def other_weights(server: Connection, expected: str, found: str) -> ParityError:
    return ParityError(
        f"the server {server.url} was given weights with digest {expected[:16]} and holds {found}; nothing was "
        "generated with them. Its --dtype must be model.dtype, and its --model the run's model"
    )
