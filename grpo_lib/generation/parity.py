"""The parity gate: what the engine reports must be what the trainer computes."""

import math
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import torch

from grpo_lib.data.columns import ragged_column
from grpo_lib.data.ragged import Ragged, segment_sum
from grpo_lib.errors import ParityError
from grpo_lib.generation.base import Engine, Sampling
from grpo_lib.generation.sampling import shape
from grpo_lib.training.heads import head_of
from grpo_lib.training.logprobs import tile_logits
from grpo_lib.training.microbatches import Sequences, micro_batch
from grpo_lib.training.trainer import Trainer
from grpo_lib.training.updates import sequences

MAX_IMPOSSIBLE = 0.02
"""Fraction of tokens that may fall outside what the trainer takes for the truncated distribution."""
BLOCK = 64
"""Tokens whose logits are held at a time."""


def check_parity(
    score: Callable[[Sequences], Ragged],
    digest: Callable[[], str],
    prompts: pa.Table,
    rollouts: pa.Table,
    *,
    engine: Engine,
    rows: int,
    max_mean: float,
    sampling: Sampling,
    policy_version: int,
) -> dict[str, float]:
    """Scores ``rows`` rollouts with the trainer and compares with what the engine reported.

    Args:
        score: log-probs of the trainer, of the distribution that tokens are sampled from.
        digest: of the weights that the trainer holds.

    Raises:
        ParityError: the mean absolute difference is above ``max_mean``: the engine holds other weights than the
            trainer, or its log-probs are of another distribution.
    """
    comparable = _comparable(rollouts, policy_version)
    candidates = (segment_sum(comparable.values.long(), comparable.offsets) > 0).nonzero().squeeze(1).numpy()
    if len(candidates) == 0:
        raise ParityError(
            f"engine {engine.name!r} ({engine.version}) reports no finite log-prob in {rollouts.num_rows} rows; "
            "nothing was committed"
        )
    picked = candidates[np.unique(np.linspace(0, len(candidates) - 1, min(rows, len(candidates))).astype(np.int64))]
    chosen = rollouts.take(pa.array(picked))
    theirs = ragged_column(chosen, "rollout_logprobs").values
    few = sequences(prompts, chosen).gather(torch.arange(len(picked)))  # with the prompts of these alone
    ours = score(few).values
    own = comparable.gather(torch.from_numpy(picked)).values
    possible = own & ours.isfinite()  # rounding may put a token at the edge of a truncation on its other side
    impossible = int(own.sum()) - int(possible.sum())
    difference = (ours - theirs)[possible].abs().double()
    mean = float(difference.mean()) if len(difference) else math.inf
    largest = float(difference.max()) if len(difference) else math.inf
    if not mean <= max_mean or impossible > max(3, MAX_IMPOSSIBLE * int(own.sum())):
        raise ParityError(
            f"the log-probs of engine {engine.name!r} ({engine.version}) and of the trainer (torch "
            f"{torch.__version__}) differ by {mean:.3g} on average and {largest:.3g} at most "
            f"(parity.max_mean={max_mean:g}, {len(picked)} rows, {_described(sampling)}; {impossible} of the "
            f"engine's {int(own.sum())} tokens can't be drawn at all, says the trainer); "
            f"the engine holds weights {engine.digest()[:16]}, the trainer {digest()[:16]}. Nothing was committed. "
            "In float32 and without adapters different digests mean that the engine was not loaded, equal ones that "
            "its arithmetic or sampling distribution differs, or that it kept old weights in a packed form (raise "
            "parity.max_mean only for reduced precision)"
        )
    return {"parity_mean": mean, "parity_max": largest}


def _comparable(rollouts: pa.Table, policy_version: int) -> Ragged:
    """``bool``: tokens that this policy drew, not a tool or an earlier policy, with a finite log-prob."""
    logprobs = ragged_column(rollouts, "rollout_logprobs")
    own = ragged_column(rollouts, "response_mask").values.bool() & logprobs.values.isfinite()
    if "token_versions" in rollouts.column_names:
        own &= ragged_column(rollouts, "token_versions").values == policy_version
    return logprobs.with_values(own)


def _described(sampling: Sampling) -> str:
    settings = f"temperature {sampling.temperature:g}"
    if sampling.shaped:
        settings += f", top_p {sampling.top_p:g}, top_k {sampling.top_k}, min_p {sampling.min_p:g}"
        settings += f", repetition_penalty {sampling.repetition_penalty:g}"
    return settings


@torch.no_grad()
def sampling_logprobs(trainer: Trainer, few: Sequences, sampling: Sampling) -> Ragged:
    """Log-probs of the response tokens under the distribution that they are sampled from, truncated and renormalised.

    Row by row, with the whole vocabulary for a block of tokens: for few rows. Each rank computes all.
    """
    found = []
    for row in range(few.responses.rows):
        one = few.gather(torch.tensor([row]))
        batch = micro_batch(one, torch.tensor([0]), trainer.layout).to(trainer.world.device)
        hidden = trainer.policy.module(batch, sampling.temperature, hidden_only=True)
        with trainer.policy.gathered():
            head = head_of(trainer.model)
            columns, ids = slice(0, len(head.weight)), one.prompts.values.long()
            first = torch.full((len(head.weight),), len(batch.targets), device=hidden.device)  # where a token came up
            places = torch.arange(len(batch.targets), device=hidden.device) + 1
            first.scatter_reduce_(0, batch.targets, places, "amin")
            first[ids.to(hidden.device)] = 0
            for start in range(0, len(batch.targets), BLOCK):
                rows = slice(start, min(start + BLOCK, len(batch.targets)))
                logits = tile_logits(hidden, head, 1.0, rows, columns)
                seen = first <= places[rows, None] - 1
                logprobs = shape(logits, sampling, seen).log_softmax(-1)
                found.append(logprobs.gather(1, batch.targets[rows, None]).squeeze(1).cpu())
    return few.responses.with_values(torch.cat(found))
