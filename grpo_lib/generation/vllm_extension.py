"""What vLLM's workers can do besides: take a policy's weights in place, and say which they hold.

vLLM mixes `PolicyExtension` into its worker class (`worker_extension_cls`), in this process or in a server's.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_lib.training.digest import HEAD, is_tied, weights_digest
from grpo_lib.training.tensors import load_tensors

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STEM = "policy"
"""Weights for a worker are the safetensors of this stem in a folder (`training/tensors.py`)."""


class PolicyExtension:
    """Commands for ``collective_rpc``. Each worker gets all weights and keeps its own part."""

    model_config: Any
    vllm_config: "VllmConfig"
    model_runner: Any

    def load_policy(self, folder: str) -> str:
        """Takes the weights in a folder; returns their digest."""
        return self.load_policy_state(load_tensors(Path(folder), STEM))

    def load_policy_state(self, state: Mapping[str, Tensor]) -> str:
        """Takes weights by the names that Transformers has for them; returns their digest in the engine's precision."""
        self._policy_digest: str | None = None  # unknown until all is through
        with ThreadPoolExecutor(1) as pool:  # hashing leaves the interpreter to others
            digest = pool.submit(weights_digest, state, self.model_config.dtype)
            self.take_weights(state)
        self._policy_digest = digest.result()
        return self._policy_digest

    def take_weights(self, state: Mapping[str, Tensor]) -> None:
        """In place."""
        tied = HEAD in state and is_tied(state)
        weights = [(name, value) for name, value in state.items() if not (tied and name == HEAD)]
        self.reload_weights(weights_iterator=iter(weights))  # type: ignore[attr-defined]
        self._repack_embeddings()

    def policy_digest(self) -> str | None:
        """Of the weights that were loaded last; None: those that vLLM started with, or a load that failed."""
        return getattr(self, "_policy_digest", None)

    def _repack_embeddings(self) -> None:
        """A head that shares the embedding's weights is packed for the CPU when vLLM starts, and not again by itself.

        It would go on multiplying with the first policy's weights, without a word.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        model: torch.nn.Module = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            for module in model.modules():
                if isinstance(module, VocabParallelEmbedding):
                    module.quant_method.process_weights_after_loading(module)
