"""The parity gate: what the engine reports must be what the trainer computes."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from grpo_lib.data.columns import ragged_column
from grpo_lib.data.ragged import Ragged
from grpo_lib.errors import ParityError
from grpo_lib.generation.base import Engine
from grpo_lib.training.microbatches import Sequences
from grpo_lib.training.updates import sequences


def check_parity(
    score: Callable[[Sequences], Ragged],
    digest: Callable[[], str],
    prompts: pa.Table,
    rollouts: pa.Table,
    *,
    engine: Engine,
    rows: int,
    max_mean: float,
    temperature: float,
) -> dict[str, float]:
    """Scores ``rows`` rollouts with the trainer and compares with what the engine reported.

    Args:
        score: log-probs of the trainer, at the rollouts' temperature.
        digest: of the weights that the trainer holds.

    Raises:
        ParityError: the mean absolute difference is above ``max_mean``: the engine holds other weights than the
            trainer, or its log-probs are of another distribution.
    """
    picked = np.unique(np.linspace(0, rollouts.num_rows - 1, min(rows, rollouts.num_rows)).astype(np.int64))
    chosen = rollouts.take(pa.array(picked))
    theirs = ragged_column(chosen, "rollout_logprobs").values
    ours = score(sequences(prompts, chosen))
    finite = theirs.isfinite()
    if not bool(finite.any()):
        raise ParityError(
            f"engine {engine.name!r} reports no finite log-prob in {len(picked)} rows; nothing was committed"
        )
    difference = (ours.values - theirs)[finite].abs().double()
    mean, largest = float(difference.mean()), float(difference.max())
    if not mean <= max_mean:
        raise ParityError(
            f"the log-probs of engine {engine.name!r} and of the trainer differ by {mean:.3g} on average and "
            f"{largest:.3g} at most (parity.max_mean={max_mean:g}, {len(picked)} rows, temperature {temperature:g}); "
            f"the engine holds weights {engine.digest()[:16]}, the trainer {digest()[:16]}. "
            "Nothing was committed. Different digests: the engine was not loaded; equal ones: its arithmetic or its "
            "sampling distribution differs (raise parity.max_mean only for reduced precision)"
        )
    return {"parity_mean": mean, "parity_max": largest}
