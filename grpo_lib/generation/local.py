"""The local engine: batched decoding with any Transformers decoder, in this process.

A prompt is prefilled once, however often it is sampled. Rows that have ended leave the batch, so the cost follows the
rows that still run. Prompts of a batch have similar lengths and are padded on the left. Models of the Llama family go
through `FastDecoder`, all others through their own ``forward``.
"""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.errors import ModelError
from grpo_lib.generation.base import LENGTH, STOP, UNFINISHED, Generated, Progress, Request, Sampling
from grpo_lib.generation.cache import GROUPED_SDPA, RoomyCache, as_additive, use_grouped_attention
from grpo_lib.generation.fast_decoder import fast_decoder
from grpo_lib.generation.sampling import choose
from grpo_lib.generation.stops import Stops
from grpo_lib.generation.weights import check_weights
from grpo_lib.seeds import uniforms
from grpo_lib.training.digest import HEAD, is_tied, weights_digest

SPARE_TOKENS = 128
"""Room for new tokens in a fresh cache; it doubles when that is used up."""
LEAVE_FRACTION = 0.125
"""Ended rows leave the batch once they are this fraction of it; leaving means copying the cache of the others."""
REPORT_STEPS = 4
"""Decoding steps between two reports of progress, and looks at the budget."""


@dataclass(frozen=True, kw_only=True)
class _Made:
    """Of all ``B`` rows; what is behind the end of a row means nothing."""

    ids: Tensor
    """``int32[B, max_new_tokens]``."""
    logprobs: Tensor
    """``float32[B, max_new_tokens]``."""
    lengths: Tensor
    """``int64[B]``."""
    finish: Tensor
    """``uint8[B]``."""

    def collect(self) -> Generated:
        inside = torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths.unsqueeze(1)
        responses = Ragged(values=self.ids[inside].cpu(), offsets=lengths_to_offsets(self.lengths).cpu())
        return Generated(responses=responses, logprobs=self.logprobs[inside].cpu(), finish=self.finish.cpu())


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
    limits: Tensor | None = None
    """``int64[A]``: tokens that a row may have; None: all rows have the same limit."""
    seen: Tensor | None = None
    """``bool[A, vocabulary]``: tokens so far; None: there is no penalty on repetition."""


class LocalEngine:
    """An `Engine` on a Transformers decoder, on the device where its weights are.

    Args:
        model: the engine's own; it is switched to evaluation mode and its weights change with ``load``.
        eos_token_ids: tokens that end a response.
        tokenizer: for stop strings.
        max_batch_rows: rows that are decoded at a time.

    Raises:
        ModelError: the model keeps another state than keys and values of attention.
    """

    name = "local"
    alive = True
    version = f"transformers {transformers.__version__}"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Sequence[int],
        tokenizer: Any = None,
        max_batch_rows: int = 1024,
    ) -> None:
        self._model = model.eval()
        self._device = next(model.parameters()).device
        self._max_batch_rows = max_batch_rows
        self._eos = sorted(eos_token_ids)
        self._tokenizer = tokenizer
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
        self._fast = fast_decoder(model) if self._ready_mask else None

    @torch.inference_mode()
    def generate(self, request: Request, on_progress: Progress | None = None) -> Generated:
        """See `Engine.generate`. Deterministic; rows depend on their batch by rounding of logits only."""
        sampling, total = request.sampling, len(request.seeds)
        size = (total, sampling.max_new_tokens)
        made = _Made(
            ids=torch.zeros(size, dtype=torch.int32, device=self._device),
            logprobs=torch.zeros(size, device=self._device),
            lengths=torch.zeros(total, dtype=torch.int64, device=self._device),
            finish=torch.full((total,), UNFINISHED, dtype=torch.uint8, device=self._device),
        )
        stops = Stops(sampling, eos=self._eos, tokenizer=self._tokenizer, device=self._device)
        order = request.prompts.lengths.repeat_interleave(request.n).argsort(stable=True)
        tokens, began = 0, time.perf_counter()
        for start in range(0, total, self._max_batch_rows):

            def go_on(finished: int, new: int, start: int = start, before: int = tokens) -> bool:
                if on_progress is not None:
                    on_progress(start + finished, total, before + new)
                budget, seconds = request.budget, time.perf_counter() - began
                return budget is None or not budget.used_up(seconds, before + new)

            if not go_on(0, 0):
                break
            batch = self._start(request, order[start : start + self._max_batch_rows])
            tokens += self._decode(batch, sampling, stops, made, go_on)
        return made.collect()

    def _start(self, request: Request, rows: Tensor) -> _Batch:
        """The rows' prompts are in the cache, each of them computed once."""
        prompts, sample_of = (rows // request.n).unique(return_inverse=True)
        batch = self._prefill(request, prompts)
        batch.rows, batch.seeds = rows.to(self._device), request.seeds[rows].numpy()
        batch.running = torch.ones_like(batch.rows, dtype=torch.bool)
        if request.limits is not None:
            batch.limits = request.limits[rows].to(self._device)
        self._spread(batch, sample_of.to(self._device), request.sampling.max_new_tokens)
        return batch

    def _prefill(self, request: Request, prompts: Tensor) -> _Batch:
        """Runs each of ``prompts`` once; a slot is a prompt, its rows and seeds are not set yet."""
        lengths = request.prompts.lengths[prompts]
        width = int(lengths.max())
        places = torch.arange(width) - (width - lengths).unsqueeze(1)
        valid, positions = places >= 0, places.clamp(min=0)
        ids = request.prompts.values[request.prompts.offsets[:-1][prompts].unsqueeze(1) + positions].long()
        padded = not bool(valid.all())
        cache = RoomyCache(self._layers)
        logits = self._forward(
            ids.to(self._device), positions.to(self._device), valid.to(self._device) if padded else None, cache
        )
        mask = None
        if padded:
            whole = torch.cat([valid, valid.new_ones(len(valid), request.sampling.max_new_tokens)], 1)
            mask = as_additive(whole.to(self._device)[:, None, None], self._model.dtype) if self._ready_mask else whole
        seen = None
        if request.sampling.repetition_penalty != 1:  # padding repeats the first token
            seen = torch.zeros(logits.shape, dtype=torch.bool, device=self._device).scatter_(
                1, ids.to(self._device), True
            )
        return _Batch(
            rows=prompts,
            seeds=np.empty(0, dtype=np.int64),
            running=prompts,
            positions=lengths.unsqueeze(1).to(self._device),
            mask=mask,
            cache=cache,
            logits=logits,
            seen=seen,
        )

    def _spread(self, batch: _Batch, slots: Tensor, max_new_tokens: int) -> None:
        """Every row gets a copy of its prompt's slot."""
        batch.cache.take(slots, min(max_new_tokens, SPARE_TOKENS))
        batch.positions, batch.logits = batch.positions[slots], batch.logits[slots]
        batch.mask, batch.seen = (None if each is None else each[slots] for each in (batch.mask, batch.seen))

    def _decode(
        self, batch: _Batch, sampling: Sampling, stops: Stops, made: _Made, go_on: Callable[[int, int], bool]
    ) -> int:
        """Fills in the batch's rows; returns the number of tokens."""
        total = running = len(batch.rows)
        tokens, longest = 0, sampling.max_new_tokens
        for step in range(longest):
            uniform = None
            if sampling.temperature > 0:
                uniform = torch.from_numpy(uniforms(batch.seeds, step)).to(self._device)
            chosen, logprob = choose(batch.logits, sampling, uniform, batch.seen)
            made.ids[batch.rows, step], made.logprobs[batch.rows, step] = chosen.int(), logprob
            tokens += running
            running -= self._end(batch, made, step + 1, stops.reached(chosen, made.ids, batch.rows, step + 1), STOP)
            if batch.limits is not None:
                running -= self._end(batch, made, step + 1, batch.limits == step + 1, LENGTH)
            if running == 0 or step + 1 == longest:
                self._end(batch, made, step + 1, batch.running, LENGTH)
                break
            if (step + 1) % REPORT_STEPS == 0 and not go_on(total - running, tokens):
                self._end(batch, made, step + 1, batch.running, UNFINISHED)
                break
            if running <= (1 - LEAVE_FRACTION) * len(chosen):
                chosen = chosen[self._drop_ended(batch, longest - step)]
            if batch.seen is not None:
                batch.seen.scatter_(1, chosen.unsqueeze(1), True)
            batch.logits = self._forward(chosen.unsqueeze(1), batch.positions, batch.mask, batch.cache)
            batch.positions += 1
        go_on(total, tokens)
        return tokens

    @staticmethod
    def _end(batch: _Batch, made: _Made, length: int, which: Tensor, reason: int) -> int:
        """Those of the running rows end here; returns their number."""
        slots = (which & batch.running).nonzero().squeeze(1)
        if len(slots):
            rows = batch.rows[slots]
            made.lengths[rows], made.finish[rows] = length, reason
            batch.running[slots] = False
        return len(slots)

    def _drop_ended(self, batch: _Batch, tokens_left: int) -> Tensor:
        """Takes ended rows out of the batch; returns the slots that stay, ``int64``."""
        slots = batch.running.nonzero().squeeze(1)
        batch.cache.take(slots, min(tokens_left, SPARE_TOKENS))
        batch.rows, batch.seeds = batch.rows[slots], batch.seeds[slots.cpu().numpy()]
        batch.running, batch.positions = batch.running[slots], batch.positions[slots]
        batch.mask, batch.seen, batch.limits = (
            None if each is None else each[slots] for each in (batch.mask, batch.seen, batch.limits)
        )
        return slots

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: RoomyCache) -> Tensor:
        """Logits ``[rows, vocabulary]`` of the token after ``ids`` (``[rows, length]``)."""
        if mask is not None:
            mask = mask[..., : cache.get_seq_length() + ids.shape[1]]
        if self._fast is not None:
            return self._fast(ids, positions, mask, cache)
        inputs = {} if mask is None else {"attention_mask": mask}
        if self._takes_positions:
            inputs["position_ids"] = positions
        output = self._model(
            input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True, **inputs, **self._logits_of_last
        )
        return output.logits[:, -1]

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copies weights, converted to the engine's precision. A head that is tied may be missing.

        Raises:
            ModelError: names or shapes are not those of the engine's model.
        """
        own = self._model.state_dict()
        shapes = {name: value.shape for name, value in own.items()}
        check_weights(shapes, state, tied=HEAD in own and is_tied(own))
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
        del self._model, self._fast
