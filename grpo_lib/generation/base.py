"""What every rollout engine does, and the records that it takes and gives.

``P`` prompts are sampled ``n`` times each: ``B = P * n`` rows in prompt-major order (row = prompt * n + sample), ``N``
response tokens in all. Ragged tensors are flat values with ``int64[rows + 1]`` offsets.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen."""

    temperature: float
    """What logits are divided by; 0: always the most likely token."""
    max_new_tokens: int
    """Rows that have not ended by then are cut."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Responses to ``P`` prompts, on the CPU."""

    response_ids: Tensor
    """``int32[N]``."""
    offsets: Tensor
    """``int64[B+1]``: row ``i`` is ``[offsets[i], offsets[i+1])``."""
    logprobs: Tensor
    """``float32[N]``: of each token under softmax(logits / temperature) in float32; greedy: softmax(logits)."""
    finished: Tensor
    """``bool[B]``: the row ended with an end-of-sequence token, its last; otherwise it was cut."""


class Engine(Protocol):
    """A policy that only generates. Its weights change by ``load`` alone."""

    name: str

    def generate(
        self,
        prompt_ids: Tensor,
        prompt_offsets: Tensor,
        seeds: Tensor,
        n: int,
        sampling: Sampling,
        on_progress: Callable[[int, int, int], None] | None = None,
    ) -> Generated:
        """Samples ``n`` responses to each prompt.

        Args:
            prompt_ids: integers, all prompts' tokens one after the other.
            prompt_offsets: ``int64[P+1]``.
            seeds: ``int64[P*n]``, one a row: equal weights, prompt and seed give an equal row.
            on_progress: called now and then with rows finished, rows in all, and tokens so far.
        """
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copies a policy's weights, by name, into the engine."""
        ...

    def digest(self) -> str:
        """`weights_digest` of the weights that the engine holds, in its precision."""
        ...

    def sleep(self) -> None:
        """Frees the accelerator's memory until ``wake``."""
        ...

    def wake(self) -> None:
        """Takes the accelerator's memory back."""
        ...

    def close(self) -> None:
        """Frees everything; the engine is not used again."""
        ...
