"""What every rollout engine does, and the records that it takes and gives.

``P`` prompts are sampled ``n`` times each: ``B = P * n`` rows in prompt-major order (row = prompt * n + sample), ``N``
response tokens in all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_lib.data.ragged import Ragged, lengths_to_offsets

Progress = Callable[[int, int, int], None]
"""Rows finished, rows in all, tokens so far."""

FINISH_REASONS = ("stop", "length", "unfinished", "max_turns", "failed")
STOP, LENGTH, UNFINISHED, MAX_TURNS, FAILED = range(len(FINISH_REASONS))
"""Why a row ended: by itself (an end-of-sequence token, a stop token or string), at its limit of tokens, not at all
because the budget ran out, at its limit of turns, or by a failure."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. The order is that of vLLM: penalty, temperature, min_p, top_k, top_p.

    Log-probs are always those of the distribution that tokens were drawn from; greedy: of softmax(logits) after the
    penalty.
    """

    temperature: float
    """What logits are divided by; 0: always the most likely token."""
    max_new_tokens: int
    """Rows that have not ended by then are cut."""
    top_p: float = 1.0
    """Only the most likely tokens, until their probabilities add up to it."""
    top_k: int = 0
    """Only so many of the most likely tokens; 0: all."""
    min_p: float = 0.0
    """Only tokens at least so likely, relative to the most likely one."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens of the prompt and the response so far are divided by it, negative ones multiplied."""
    stop: tuple[str, ...] = ()
    """A row ends with the token that completes one of these texts, which stays in the response."""
    stop_token_ids: tuple[int, ...] = ()
    """A row ends with one of these tokens, as with an end-of-sequence token."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Sampling":
        """The inverse of ``dataclasses.asdict`` and JSON, which has no tuples."""
        lists: dict[str, Any] = {name: tuple(each) for name, each in values.items() if isinstance(each, list)}
        return cls(**{**values, **lists})

    @property
    def shaped(self) -> bool:
        """Whether tokens come from another distribution than softmax(logits / temperature)."""
        truncated = self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)
        return truncated or self.repetition_penalty != 1


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a call may use before rows that still run are given back unfinished."""

    seconds: float | None = None
    tokens: int | None = None
    """Of all rows."""

    def used_up(self, seconds: float, tokens: int) -> bool:
        return (self.seconds is not None and seconds >= self.seconds) or (
            self.tokens is not None and tokens >= self.tokens
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to generate."""

    prompts: Ragged
    """Token ids, integers, ``P`` rows."""
    seeds: Tensor
    """``int64[B]``, not negative: equal weights, prompt and seed give an equal row."""
    sampling: Sampling
    n: int = 1
    """Responses a prompt."""
    limits: Tensor | None = None
    """``int64[B]``: tokens that a row may have, 1 .. ``sampling.max_new_tokens``; None: the latter for all."""
    budget: Budget | None = None

    def __post_init__(self) -> None:
        rows = self.prompts.rows * self.n
        assert len(self.seeds) == rows, f"{len(self.seeds)} seeds for {self.prompts.rows} prompts x {self.n}"
        assert self.limits is None or len(self.limits) == rows, f"{self.limits} for {rows} rows"


@dataclass(frozen=True, kw_only=True)
class Generated:
    """``B`` responses, on the CPU."""

    responses: Ragged
    """``int32``: token ids."""
    logprobs: Tensor
    """``float32[N]``: of each token under the distribution that it was drawn from; 0 where ``mask`` is 0."""
    finish: Tensor
    """``uint8[B]``: places in `FINISH_REASONS`."""
    mask: Tensor | None = None
    """``bool[N]``: tokens that the policy produced, not an environment; None: all."""
    turns: Tensor | None = None
    """``int32[B]``: of the policy; None: one."""
    failures: list[str | None] | None = None
    """Why a row failed; None: none did."""


def from_rows(rows: Sequence[tuple[list[int], list[float], int]]) -> Generated:
    """Of engines that have Python lists: ids, log-probs and the finish of each row."""
    lengths = torch.tensor([len(ids) for ids, _, _ in rows], dtype=torch.int64)
    ids = torch.tensor([token for ids, _, _ in rows for token in ids], dtype=torch.int32)
    return Generated(
        responses=Ragged(values=ids, offsets=lengths_to_offsets(lengths)),
        logprobs=torch.tensor([value for _, values, _ in rows for value in values], dtype=torch.float32),
        finish=torch.tensor([finish for _, _, finish in rows], dtype=torch.uint8),
    )


class Engine(Protocol):
    """A policy that only generates. Its weights change by ``load`` alone."""

    name: str
    version: str
    """Of the software that generates, for errors and records."""

    @property
    def alive(self) -> bool:
        """Whether it can be used; one whose process is gone can't."""
        ...

    def generate(self, request: Request, on_progress: Progress | None = None) -> Generated:
        """Samples the responses.

        Args:
            on_progress: called now and then, maybe in another thread, but never twice at a time.
        """
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copies a policy's weights, by name, into the engine; an engine made for adapters takes theirs.

        Raises:
            ModelError: names or shapes are not those of the engine's model.
        """
        ...

    def digest(self) -> str:
        """`weights_digest` of the weights that the engine holds, in its precision."""
        ...

    def sleep(self) -> None:
        """Frees the accelerator's memory until ``wake``; the weights are kept."""
        ...

    def wake(self) -> None:
        """Takes the accelerator's memory back; without ``sleep`` before it does nothing."""
        ...

    def close(self) -> None:
        """Frees everything; the engine is not used again."""
        ...
