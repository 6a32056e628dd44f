"""Where a response ends by itself: end-of-sequence tokens, stop tokens, stop strings."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_lib.errors import ConfigError
from grpo_lib.generation.base import Sampling

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What a part of a character decodes to."""


class Stops:
    """Finds the rows that end with the token they just got.

    Args:
        eos: ids that end every response.
        tokenizer: needed for stop strings.
    """

    def __init__(self, sampling: Sampling, *, eos: Sequence[int], tokenizer: Any, device: torch.device) -> None:
        self._ids = torch.tensor(sorted({*eos, *sampling.stop_token_ids}), device=device)
        self._texts, self._tokenizer = sampling.stop, tokenizer
        if sampling.stop and tokenizer is None:
            raise ConfigError(f"stop strings {list(sampling.stop)} need a tokenizer, and this engine was given none")
        self._completing = self._tokens_that_complete(device) if sampling.stop else None

    def _tokens_that_complete(self, device: torch.device) -> Tensor:
        """``bool[vocabulary]``: tokens with the last character of a stop string in them; no other can complete it."""
        last = {text[-1] for text in self._texts} | {BROKEN}
        # Twice: some tokenizers drop the space that a text begins with.
        pieces = self._tokenizer.batch_decode([[token, token] for token in range(len(self._tokenizer))])
        return torch.tensor([not last.isdisjoint(piece) for piece in pieces], device=device)

    def reached(self, chosen: Tensor, ids: Tensor, rows: Tensor, length: int) -> Tensor:
        """``bool[A]`` of the rows whose last token is ``chosen``.

        Args:
            chosen: ``int64[A]``.
            ids: ``int32[B, longest]``: of all rows, ``length`` tokens of each row are known.
            rows: ``int64[A]``: which of them these are.
        """
        ended = chosen == self._ids if len(self._ids) == 1 else torch.isin(chosen, self._ids)
        if self._completing is None:
            return ended
        known = chosen < len(self._completing)  # some models have more logits than their tokenizer has tokens
        places = (self._completing[chosen.clamp(max=len(self._completing) - 1)] & known).nonzero().squeeze(1)
        for place, row in zip(places.tolist(), ids[rows[places], :length].tolist(), strict=True):
            text = self._tokenizer.decode(row, skip_special_tokens=False)
            if any(stop in text for stop in self._texts):
                ended[place] = True
        return ended
