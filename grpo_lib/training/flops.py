"""Floating-point operations of an update, for model FLOPs utilisation (Chowdhery et al., 2022, appendix B)."""

import re
from typing import Any

PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "GH200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "RTX 4090": 165,
    "A10": 125,
}
"""Dense bfloat16 operations a second, in 10^12, by words of the device's name; vendors' figures."""


class FlopCounter:
    """Operations that a model needs for the forward and backward pass of rows, recomputation not counted.

    Args:
        model: a Transformers causal language model; what does not learn costs no gradient of weights.
    """

    @classmethod
    def of(cls, model: Any) -> "FlopCounter | None":
        """None for a model whose operations are not known: of no attention, or of layers that differ."""
        try:
            return cls(model)
        except (AttributeError, TypeError):
            return None

    def __init__(self, model: Any) -> None:
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        outside = {id(model.get_input_embeddings().weight), id(head.weight)}
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        used = config.num_experts_per_tok / experts if experts else 1.0  # of a mixture a token meets a few
        body = [
            (p, used if ".experts." in name else 1.0) for name, p in model.named_parameters() if id(p) not in outside
        ]
        inside = sum(share * p.numel() for p, share in body)
        learning = sum(share * p.numel() for p, share in body if p.requires_grad)
        self._body = 4 * inside + 2 * learning
        self._head = (6 if head.weight.requires_grad else 4) * head.weight.numel()
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        self._attention = 6 * config.num_hidden_layers * width

    def count(self, tokens: int, squares: float, predicted: int) -> float:
        """Of ``tokens``, with ``predicted`` response tokens through the head.

        A token sees half of its row on average: ``2 s^2 width`` operations a layer forward, twice that backward.

        Args:
            squares: sum of the squares of the rows' lengths, those of repeated prompts taken off.
        """
        return self._body * tokens + self._head * predicted + self._attention * squares


def peak_tflops(device_name: str) -> float | None:
    """Of a device by its name; None: not known."""
    found = (float(value) for part, value in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", device_name))
    return next(found, None)  # of a whole word: an L40 is no L4, an RTX A1000 no A100
