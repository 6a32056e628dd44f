"""The local engine: batched decoding with any Transformers decoder, in this process.

A prompt is prefilled once, however often it is sampled. Rows that have ended leave the batch, so the cost follows the
rows that still run. Prompts of a batch have similar lengths and are padded on the left.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from grpo_lib.errors import ModelError
from grpo_lib.generation.base import Generated, Sampling
from grpo_lib.generation.cache import GROUPED_SDPA, RoomyCache, as_additive, use_grouped_attention
from grpo_lib.generation.sampling import choose
from grpo_lib.seeds import uniforms
from grpo_lib.training.digest import HEAD, weights_digest

SPARE_TOKENS = 128
"""Room for new tokens in a fresh cache; it doubles when that is used up."""
LEAVE_FRACTION = 0.125
"""Ended rows leave the batch once they are this fraction of it; leaving means copying the cache of the others."""
REPORT_STEPS = 16
"""Decoding steps between two reports of progress."""


@dataclass(kw_only=True)
class _Batch:
    """Rows that are decoded together: ``A`` slots, fewer as rows end."""

    rows: Tensor
    """``int64[A]``: the row of each slot among all rows."""
    seeds: NDArray[np.int64]
    """``[A]``."""
    running: Tensor
    """``bool[A]``."""
    positions: Tensor
    """``int64[A, 1]``: of the next token."""
    mask: Tensor | None
    """Which tokens are not padding, for prompts and all tokens to come; ``None``: there is no padding."""
    cache: RoomyCache
    logits: Tensor
    """``[A, vocabulary]``: of the next token."""


class LocalEngine:
    """An `Engine` on a Transformers decoder, on the device where its weights are.

    Args:
        model: the engine's own; it is switched to evaluation mode and its weights change with ``load``.
        eos_token_ids: tokens that end a response.
        max_batch_rows: rows that are decoded at a time.

    Raises:
        ModelError: the model keeps another state than keys and values of attention.
    """

    name = "local"

    def __init__(self, model: PreTrainedModel, *, eos_token_ids: Sequence[int], max_batch_rows: int = 1024) -> None:
        self._model = model.eval()
        self._device = next(model.parameters()).device
        self._max_batch_rows = max_batch_rows
        self._eos = torch.tensor(sorted(eos_token_ids), device=self._device)
        self._digest = weights_digest(model.state_dict())
        layer_types, _ = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
        if unknown := set(layer_types) - {"full_attention", "sliding_attention"}:
            raise ModelError(
                f"{type(model).__name__} has layers of type {', '.join(sorted(unknown))}; the local engine decodes "
                "models whose layers are all full or sliding-window attention: choose such a model"
            )
        self._layers = len(layer_types)
        use_grouped_attention(model)
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._logits_of_last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        # A mask made here once saves making it for every token, but it says nothing about windows.
        self._ready_mask = (
            set(layer_types) == {"full_attention"}
            and self._takes_positions
            and model.config._attn_implementation in (GROUPED_SDPA, "sdpa", "eager")
        )

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Tensor,
        prompt_offsets: Tensor,
        seeds: Tensor,
        n: int,
        sampling: Sampling,
        on_progress: Callable[[int, int, int], None] | None = None,
    ) -> Generated:
        """See `Engine.generate`. Deterministic; rows depend on their batch by rounding of logits only."""
        total, prompt_lengths = len(seeds), prompt_offsets.diff()
        assert total == n * len(prompt_lengths), f"{total} seeds for {len(prompt_lengths)} prompts x {n}"
        ids = torch.zeros(total, sampling.max_new_tokens, dtype=torch.int32, device=self._device)
        logprobs = torch.zeros(total, sampling.max_new_tokens, device=self._device)
        order = prompt_lengths.repeat_interleave(n).argsort(stable=True)
        tokens = 0
        for start in range(0, total, self._max_batch_rows):
            rows = order[start : start + self._max_batch_rows]

            def report(finished: int, made: int, start: int = start, before: int = tokens) -> None:
                if on_progress is not None:
                    on_progress(start + finished, total, before + made)

            prompts, sample_of = (rows // n).unique(return_inverse=True)
            batch = self._prefill(prompt_ids, prompt_offsets, prompts, sampling.max_new_tokens)
            batch.rows, batch.seeds = rows.to(self._device), seeds[rows].numpy()
            batch.running = torch.ones_like(batch.rows, dtype=torch.bool)
            self._spread(batch, sample_of.to(self._device), sampling.max_new_tokens)
            tokens += self._decode(batch, sampling, ids, logprobs, report)
        return self._collect(ids, logprobs)

    def _prefill(self, prompt_ids: Tensor, prompt_offsets: Tensor, prompts: Tensor, max_new_tokens: int) -> _Batch:
        """Runs each of ``prompts`` once; a slot is a prompt, its rows and seeds are not set yet."""
        lengths = prompt_offsets.diff()[prompts]
        width = int(lengths.max())
        places = torch.arange(width) - (width - lengths).unsqueeze(1)
        valid, positions = places >= 0, places.clamp(min=0)
        ids = prompt_ids[prompt_offsets[:-1][prompts].unsqueeze(1) + positions].long()
        padded = not bool(valid.all())
        cache = RoomyCache(self._layers)
        logits = self._forward(
            ids.to(self._device), positions.to(self._device), valid.to(self._device) if padded else None, cache
        )
        mask = None
        if padded:
            whole = torch.cat([valid, valid.new_ones(len(valid), max_new_tokens)], 1).to(self._device)
            mask = as_additive(whole, self._model.dtype) if self._ready_mask else whole
        return _Batch(
            rows=prompts,
            seeds=np.empty(0, dtype=np.int64),
            running=prompts,
            positions=lengths.unsqueeze(1).to(self._device),
            mask=mask,
            cache=cache,
            logits=logits,
        )

    def _spread(self, batch: _Batch, slots: Tensor, max_new_tokens: int) -> None:
        """Every row gets a copy of its prompt's slot."""
        batch.cache.take(slots, min(max_new_tokens, SPARE_TOKENS))
        batch.positions, batch.logits = batch.positions[slots], batch.logits[slots]
        batch.mask = None if batch.mask is None else batch.mask[slots]

    def _decode(
        self, batch: _Batch, sampling: Sampling, ids: Tensor, logprobs: Tensor, report: Callable[[int, int], None]
    ) -> int:
        """Writes the tokens of the batch's rows into ``ids`` and ``logprobs``; returns their number.

        What is written behind the end of a row means nothing.
        """
        total = running = len(batch.rows)
        tokens = 0
        for step in range(sampling.max_new_tokens):
            uniform = None
            if sampling.temperature > 0:
                uniform = torch.from_numpy(uniforms(batch.seeds, step)).to(self._device)
            chosen, logprob = choose(batch.logits, sampling.temperature, uniform)
            ids[batch.rows, step] = chosen.int()
            logprobs[batch.rows, step] = logprob
            tokens += running
            batch.running &= ~self._is_eos(chosen)
            running = int(batch.running.sum())
            if running == 0 or step + 1 == sampling.max_new_tokens:
                break
            if running <= (1 - LEAVE_FRACTION) * len(chosen):
                chosen = chosen[self._drop_ended(batch, sampling.max_new_tokens - step)]
            batch.logits = self._forward(chosen.unsqueeze(1), batch.positions, batch.mask, batch.cache)
            batch.positions += 1
            if (step + 1) % REPORT_STEPS == 0:
                report(total - running, tokens)
        report(total, tokens)
        return tokens

    def _drop_ended(self, batch: _Batch, tokens_left: int) -> Tensor:
        """Takes ended rows out of the batch; returns the slots that stay, ``int64``."""
        slots = batch.running.nonzero().squeeze(1)
        batch.cache.take(slots, min(tokens_left, SPARE_TOKENS))
        batch.rows, batch.seeds = batch.rows[slots], batch.seeds[slots.cpu().numpy()]
        batch.running, batch.positions = batch.running[slots], batch.positions[slots]
        batch.mask = None if batch.mask is None else batch.mask[slots]
        return slots

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: RoomyCache) -> Tensor:
        """Logits ``[rows, vocabulary]`` of the token after ``ids`` (``[rows, length]``)."""
        end = cache.get_seq_length() + ids.shape[1]
        inputs = {"position_ids": positions} if self._takes_positions else {}
        if mask is not None:
            inputs["attention_mask"] = mask[..., :end]
        output = self._model(
            input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True, **inputs, **self._logits_of_last
        )
        return output.logits[:, -1]

    def _is_eos(self, ids: Tensor) -> Tensor:
        return ids == self._eos if len(self._eos) == 1 else torch.isin(ids, self._eos)

    def _collect(self, ids: Tensor, logprobs: Tensor) -> Generated:
        """Cuts every row after its first end-of-sequence token; all on the CPU."""
        is_eos = self._is_eos(ids)
        finished = is_eos.any(1)
        lengths = torch.where(finished, is_eos.int().argmax(1) + 1, ids.shape[1])
        inside = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
        return Generated(
            response_ids=ids[inside].cpu(),
            offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).cpu(),
            logprobs=logprobs[inside].cpu(),
            finished=finished.cpu(),
        )

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copies weights, converted to the engine's precision. A head that is tied may be missing.

        Raises:
            ModelError: names or shapes are not those of the engine's model.
        """
        own = self._model.state_dict()
        missing, unknown = own.keys() - state.keys() - {HEAD}, state.keys() - own.keys()
        wrong = [name for name in own.keys() & state.keys() if own[name].shape != state[name].shape]
        if missing or unknown or wrong:
            problems = {"missing": missing, "unknown": unknown, "of another shape": wrong}
            listed = "; ".join(f"{what}: {', '.join(sorted(names)[:3])}" for what, names in problems.items() if names)
            raise ModelError(f"these weights are not those of the engine's model ({listed}): load it from one folder")
        for name, tensor in state.items():
            own[name].copy_(tensor)
        self._digest = weights_digest(own)

    def digest(self) -> str:
        """`weights_digest` of what the engine holds, in its own precision."""
        return self._digest

    def sleep(self) -> None:
        """Moves the weights to the CPU's memory."""
        self._model.to("cpu")

    def wake(self) -> None:
        """Moves the weights back to the device."""
        self._model.to(self._device)

    def close(self) -> None:
        """Drops the model."""
        del self._model
