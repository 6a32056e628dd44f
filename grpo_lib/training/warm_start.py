"""Supervised fine-tuning of a small model on demonstrations, before RL has something to sharpen.

Matrices are trained by Muon, the embedding and vectors by AdamW. The loss of a batch is the sum over its answer
tokens divided by the number of answer tokens that a batch has on average over the whole pool: dividing by the
batch's own number would give a token of a short demonstration more weight than one of a long. What a tool says in a
demonstration is read and not learned.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from grpo_lib.config import WarmStartConfig
from grpo_lib.errors import DataError, NonFiniteError
from grpo_lib.training.muon import Muon
from grpo_lib.training.schedules import lr_factor

IGNORED = -100
BUCKET_BATCHES = 32
"""Batches that are cut from one shuffled and then length-sorted stretch of the pool."""


@dataclass(frozen=True, kw_only=True)
class WarmStartResult:
    """What a warm start did."""

    losses: list[float]
    """Loss of each step."""
    left_out: int
    """Demonstrations longer than ``max_tokens``."""
    tokens: int
    """Answer tokens that were trained on, repetitions included."""


@dataclass(frozen=True, kw_only=True)
class _Demonstration:
    ids: list[int]
    """Prompt, response and end-of-sequence token."""
    learned: np.ndarray
    """``bool``, of each of the ids: it is to be written by the model."""


def warm_start(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[str],
    responses: Sequence[str],
    config: WarmStartConfig,
    seed: int,
    on_progress: Callable[[int, int, float], None] | None = None,
    observed: tuple[str, str] | None = None,
) -> WarmStartResult:
    """Trains ``model`` in place to write ``responses[i]`` and the end-of-sequence token after ``prompts[i]``.

    Deterministic: equal arguments give equal weights.

    Args:
        on_progress: called after each step with its number from 1, the number of steps, and the loss.
        observed: tags, each one token, around what is read and not learned, themselves included.

    Raises:
        DataError: no demonstration has at most ``config.max_tokens`` tokens, or one can't be tokenised.
        NonFiniteError: the loss became NaN or infinite.
    """
    pool, left_out = _tokenised(tokenizer, prompts, responses, config.max_tokens, observed)
    answer_tokens = np.array([each.learned.sum() for each in pool])
    batch_size = min(config.batch_size, len(pool))
    denominator = float(answer_tokens.mean() * batch_size)
    optimizers = _optimizers(model, config)
    batches = _batches(np.array([len(each.ids) for each in pool]), batch_size, seed)
    losses, tokens = [], 0
    model.train()
    for step in range(config.steps):
        rows = next(batches)
        ids, targets = _padded([pool[row] for row in rows], tokenizer.pad_token_id)
        loss = _step(model, ids, targets, denominator, optimizers, config, step)
        losses.append(loss)
        tokens += int(answer_tokens[rows].sum())
        if on_progress is not None:
            on_progress(step + 1, config.steps, loss)
    model.eval()
    return WarmStartResult(losses=losses, left_out=left_out, tokens=tokens)


def _tokenised(
    tokenizer: Any,
    prompts: Sequence[str],
    responses: Sequence[str],
    max_tokens: int,
    observed: tuple[str, str] | None,
) -> tuple[list[_Demonstration], int]:
    """The demonstrations that fit, and the number of those that don't."""
    try:
        prompt_ids, response_ids = (
            tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
            for texts in (prompts, responses)
        )
    except Exception as error:  # what the tokenizers package raises has no type of its own
        raise DataError(
            f"a demonstration can't be tokenised: {error}. Does it use characters outside the problem's alphabet?"
        ) from error
    tags = None if observed is None else tokenizer.convert_tokens_to_ids(list(observed))
    made = [
        _demonstration(prompt, [*response, tokenizer.eos_token_id], tags)
        for prompt, response in zip(prompt_ids, response_ids, strict=True)
    ]
    pool = [each for each in made if len(each.ids) <= max_tokens]
    if not pool:
        shortest = min((len(each.ids) for each in made), default=0)
        raise DataError(
            f"none of {len(made)} demonstrations has at most warm_start.max_tokens={max_tokens} tokens "
            f"(the shortest has {shortest}): raise it, or make the problem smaller"
        )
    return pool, len(made) - len(pool)


def _demonstration(prompt: list[int], response: list[int], tags: list[int] | None) -> _Demonstration:
    ids = np.array([*prompt, *response])
    learned = np.arange(len(ids)) >= len(prompt)
    if tags is not None:
        opened, closed = ((ids == tag).cumsum() for tag in tags)
        learned &= (opened == closed) & (ids != tags[1])
    return _Demonstration(ids=ids.tolist(), learned=learned)


def _batches(lengths: np.ndarray, batch_size: int, seed: int) -> Iterator[np.ndarray]:
    """Rows of one batch after the other, without end; rows of a batch have similar lengths.

    An epoch is a shuffle, cut into stretches that are sorted by length and cut into batches, which come in random
    order. What is left over at the end of an epoch opens the next.
    """
    rng = np.random.default_rng(seed)
    rest = np.empty(0, dtype=np.int64)
    while True:
        rows = np.concatenate([rest, rng.permutation(len(lengths))])
        whole = len(rows) // batch_size * batch_size
        rows, rest = rows[:whole], rows[whole:]
        stretches = np.split(rows, range(batch_size * BUCKET_BATCHES, whole, batch_size * BUCKET_BATCHES))
        ordered = np.concatenate([each[np.argsort(lengths[each], kind="stable")] for each in stretches])
        yield from rng.permutation(ordered.reshape(-1, batch_size))


def _padded(rows: list[_Demonstration], pad_id: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both ``int64[rows, longest - 1]``; targets that are not learned, or padding, are ignored.

    Padding stands on the right, where causal attention keeps it from every real token.
    """
    width = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    targets = torch.full((len(rows), width), IGNORED, dtype=torch.int64)
    for place, row in enumerate(rows):
        tokens = torch.tensor(row.ids)
        ids[place, : len(tokens)] = tokens
        targets[place, : len(tokens)] = tokens.where(torch.from_numpy(row.learned), IGNORED)
    return ids[:, :-1], targets[:, 1:]


def _optimizers(model: PreTrainedModel, config: WarmStartConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the model; AdamW for the embedding, the head and everything else."""
    outside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in outside]
    others = [p for p in model.parameters() if p.ndim != 2 or id(p) in outside]
    return [
        Muon(matrices, lr=config.muon_lr),
        torch.optim.AdamW(others, lr=config.adamw_lr, betas=(0.9, 0.99), weight_decay=0.0),
    ]


def _step(
    model: PreTrainedModel,
    ids: Tensor,
    targets: Tensor,
    denominator: float,
    optimizers: list[torch.optim.Optimizer],
    config: WarmStartConfig,
    step: int,
) -> float:
    """One optimizer step; returns the loss before it."""
    device = next(model.parameters()).device
    logits = model(input_ids=ids.to(device), use_cache=False).logits.float()
    total = cross_entropy(logits.flatten(0, 1), targets.to(device).flatten(), ignore_index=IGNORED, reduction="sum")
    loss = total / denominator
    value = loss.item()
    if not np.isfinite(value):
        raise NonFiniteError(
            f"the loss of warm-start step {step + 1} is {value}: lower warm_start.muon_lr={config.muon_lr:g} "
            f"and warm_start.adamw_lr={config.adamw_lr:g}"
        )
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    factor = lr_factor(
        step,
        schedule="linear",
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        final_fraction=config.final_lr_fraction,
    )
    for optimizer, lr in zip(optimizers, (config.muon_lr, config.adamw_lr), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return value
