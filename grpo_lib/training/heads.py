"""How Transformers models turn hidden states into logits, and whether that is known of a model."""

from typing import Any

import torch

from grpo_lib.errors import ModelError
from grpo_lib.training.logprobs import Head, tile_logits

MULTIPLIERS = {"logit_scale": 1, "lm_head_multiplier": 1, "output_multiplier": 1, "logits_scaling": -1}
"""Settings by which Cohere, Falcon-H1, MuseGlimmer multiply and Granite divides (HyperCLOVAX multiplies)."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Gemma and others, RecurrentGemma, xLSTM."""


def head_of(model: Any) -> Head:
    """Of a Transformers causal LM, from its output embeddings and its config; ``check_head`` tells whether it is so."""
    config, output = model.config.get_text_config(), model.get_output_embeddings()
    multiplier = 1.0
    for name, power in MULTIPLIERS.items():
        value = getattr(config, name, None)
        if isinstance(value, int | float):
            multiplier *= value ** (1 if config.model_type.startswith("hyperclovax") else power)
    softcap = next((value for name in SOFTCAPS if (value := getattr(config, name, None)) is not None), None)
    return Head(weight=output.weight, bias=getattr(output, "bias", None), multiplier=multiplier, softcap=softcap)


@torch.no_grad()
def check_head(model: Any) -> None:
    """Compares logits made by ``head_of`` with the model's own, also where they are large and a softcap shows.

    Raises:
        ModelError: the model makes them in another way.
    """
    head, seen = head_of(model), []

    def stretch(_module: Any, _inputs: Any, output: Any) -> Any:
        hidden = output.last_hidden_state.clone()
        hidden[1] *= 100 / (hidden[1] @ head.weight.T * head.multiplier).abs().max()
        seen.append(hidden)
        output.last_hidden_state = hidden
        return output

    ids = torch.randint(len(head.weight), (2, 8), generator=torch.Generator().manual_seed(0))
    hook = model.get_decoder().register_forward_hook(stretch)
    try:
        logits = model(input_ids=ids.to(head.weight.device), use_cache=False).logits.flatten(0, 1)
    finally:
        hook.remove()
    if not seen:
        raise ModelError(f"{type(model).__name__} does not run its own decoder, so its hidden states can't be had")
    ours = tile_logits(seen[0].flatten(0, 1), head, 1.0, slice(None), slice(None))
    tolerance = max(1e-3, 4 * torch.finfo(logits.dtype).eps)
    alike = logits.shape == ours.shape and all(
        bool((a - b).abs().max() <= tolerance * b.abs().max()) for a, b in zip(ours, logits.to(ours.dtype), strict=True)
    )
    if not alike:
        raise ModelError(
            f"{type(model).__name__} makes its logits from the final hidden states in a way that is not known here "
            "(grpo_lib/training/heads.py), so its log-probs would be wrong; use a model of another class"
        )
