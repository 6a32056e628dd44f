"""A decoder's size: parameters, operations and bytes, from the numbers of its configuration."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HALF = 2
"""Bytes of a bfloat16 value."""
STATE_BYTES = 16
"""Of a parameter while it is trained by `fsdp2`: float32 weight, gradient and two moments."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A Llama-like dense decoder: grouped-query attention, gated MLP, rotary positions."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    tied: bool = False

    @property
    def body(self) -> int:
        """Parameters that every token meets, but embedding and head. Norms and biases are left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp)

    @property
    def head(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.body + self.head * (1 if self.tied else 2)

    @property
    def weight_bytes(self) -> int:
        """That a decoding step reads: the embedding is a look-up."""
        return HALF * (self.body + self.head)

    def kv_bytes(self, tensor_parallel: int = 1) -> float:
        """Of a token in the cache of one of the GPUs; a key-value head is never cut."""
        return HALF * 2 * self.layers * max(1.0, self.kv_heads / tensor_parallel) * self.head_dim

    def forward_flops(self, prompt_tokens: int, responses: NDArray[np.int64]) -> float:
        """Of one pass over rows; the head sees responses only, a token half of its row."""
        rows = (responses + prompt_tokens).astype(np.float64)
        attention = 2 * self.layers * self.heads * self.head_dim * float((rows**2).sum())
        return 2 * self.body * float(rows.sum()) + 2 * self.head * float(responses.sum()) + attention

    def update_flops(self, prompt_tokens: int, responses: NDArray[np.int64], recompute: bool) -> float:
        """Forward and backward; ``recompute``: layers run again (gradient checkpointing)."""
        return (4 if recompute else 3) * self.forward_flops(prompt_tokens, responses)


MODELS = {
    each.name: each
    for each in (
        Model(
            name="qwen2.5-1.5b", layers=28, hidden=1536, heads=12, kv_heads=2, head_dim=128, mlp=8960,
            vocabulary=151_936, tied=True,
        ),
        Model(
            name="qwen2.5-7b", layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, mlp=18_944,
            vocabulary=152_064,
        ),
        Model(
            name="llama-8b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14_336,
            vocabulary=128_256,
        ),
        Model(
            name="qwen3-32b", layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, mlp=25_600,
            vocabulary=151_936,
        ),
        Model(
            name="llama-70b", layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, mlp=28_672,
            vocabulary=128_256,
        ),
    )
}  # fmt: skip
"""From the models' own config.json."""
