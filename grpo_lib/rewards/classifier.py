"""The model behind a reward model: a sequence or token classifier of Transformers, run on rows of tokens.

Rows are padded to the longest of their micro-batch, never of all. What is padded is known from lengths.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from grpo_lib.errors import ModelError
from grpo_lib.models import attention_of, load_pretrained

KEPT = 2
"""Models that a process keeps."""
ALONE = threading.Lock()
"""For who uses a model: shards may be scored in several threads; a device has room for one, a tokenizer for one too."""


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """A reward model and its tokenizer."""

    path: str
    model: PreTrainedModel
    tokenizer: Any
    of_tokens: bool
    """It scores every token; else the whole row."""
    positions: int | None
    """Tokens that a row may have; None: as many as one likes."""

    @property
    def labels(self) -> dict[int, str]:
        return dict(self.model.config.id2label)

    @torch.inference_mode()
    def logits(self, rows: Sequence[Sequence[int]], micro_batch_tokens: int) -> list[Tensor]:
        """Of each row ``float32[labels]``, or ``float32[tokens, labels]`` of one that scores tokens; on the CPU.

        Args:
            rows: token ids, at least one a row.
            micro_batch_tokens: padded tokens that the model computes at a time; a longer row is computed alone.
        """
        found: dict[int, Tensor] = {}
        for batch in micro_batches([len(row) for row in rows], micro_batch_tokens):
            logits = self._run([rows[place] for place in batch]).float().cpu()
            for place, theirs in zip(batch, logits, strict=True):
                found[place] = theirs[: len(rows[place])] if self.of_tokens else theirs
        return [found[place] for place in range(len(rows))]

    def _run(self, rows: list[Sequence[int]]) -> Tensor:
        config = self.model.config.get_text_config()
        padding = config.pad_token_id
        known = padding is not None and padding >= 0
        if not known:  # the model looks for the last token that is none of these
            used = {token for row in rows for token in row}
            padding = next(token for token in range(len(used) + 1) if token not in used)
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), padding)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
            mask[place, : len(row)] = 1
        before = config.pad_token_id
        config.pad_token_id = padding
        try:
            device = self.model.device
            logits: Tensor = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        finally:
            config.pad_token_id = before
        return logits


def load_classifier(path: str, dtype: str, device: str) -> Classifier:
    """The reward model in a local folder or of that name on the hub, from safetensors; loaded once in a process.

    Args:
        dtype: ``auto``: bfloat16 on a GPU, float32 on a CPU.
        device: ``auto``: a GPU if there is one.

    Raises:
        ModelError: it is missing, broken or no classifier, or weights of it are missing.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    return _classifier(path, dtype, device)


@lru_cache(maxsize=KEPT)
def _classifier(path: str, dtype: str, device: str) -> Classifier:
    config = load_pretrained("model", path, lambda: AutoConfig.from_pretrained(path, trust_remote_code=False))
    names = list(config.architectures or [])
    of_tokens = any(name.endswith("ForTokenClassification") for name in names)
    if not of_tokens and not any(name.endswith("ForSequenceClassification") for name in names):
        raise ModelError(
            f"{path!r} is no reward model: its config.json names {names or 'no architecture'}, "
            "a ...ForSequenceClassification or ...ForTokenClassification is needed"
        )
    kind = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    model, info = load_pretrained(
        "model",
        path,
        lambda: kind.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            attn_implementation="eager" if attention_of(path) == "eager" else None,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        ),
    )
    missing = sorted(info["missing_keys"])
    if missing:  # Transformers makes them up
        raise ModelError(
            f"the reward model {path!r} has no weights for {', '.join(missing[:3])}"
            f"{' and others' if missing[3:] else ''}: with random ones it would score at random; train it first"
        )
    tokenizer = load_pretrained("tokenizer", path, lambda: AutoTokenizer.from_pretrained(path, trust_remote_code=False))
    shape = model.config.get_text_config()
    shape.use_cache = False
    return Classifier(
        path=path,
        model=model.to(device).eval(),
        tokenizer=tokenizer,
        of_tokens=of_tokens,
        positions=getattr(shape, "max_position_embeddings", None),
    )


def micro_batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Rows by micro-batch, longest first.

    >>> micro_batches([3, 10, 4, 1], tokens=8)
    [[1], [2, 0], [3]]
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    batches = []
    while order:
        count = max(1, tokens // lengths[order[0]])
        batches.append(order[:count])
        order = order[count:]
    return batches
