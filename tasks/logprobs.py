"""`old_logprobs`, `ref_logprobs`, `values`: what policy, reference and critic say of the rollouts.

Rows that the filters left out are not scored; their values are 0 and nothing reads them.
"""

import pyarrow as pa
import torch

from grpo_lib.data.columns import flag_column, list_array, ragged_column
from grpo_lib.data.ragged import Ragged, place_rows
from grpo_lib.data.schemas import FLOATS, OLD_LOGPROBS, REF_LOGPROBS, SUM_SQUARED_PROBS, VALUES
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from grpo_lib.training.microbatches import Sequences
from grpo_lib.training.updates import sequences
from tasks.base import Stage, stage_task

READS = ("rollout.temperature", "model.dtype", "trainer.backend", "trainer.max_tokens")
OLD = StageSpec(name="old_logprobs", version=1, reads=READS)
REF = StageSpec(name="ref_logprobs", version=1, reads=READS)
CRITIC = StageSpec(name="values", version=1, reads=("model.dtype", "trainer.backend", "trainer.max_tokens"))


@stage_task(OLD)
def old_logprobs(
    stage: Stage,
    prompts: list[ArtifactRef],
    rollouts: list[ArtifactRef],
    policy: ArtifactRef,
    selection: ArtifactRef | None,
) -> ArtifactRef:
    """Log-probs and entropies under the policy before the update: the anchor of the ratio.

    ``stage.external["sum_squared_probs"]`` asks for that column too.
    """
    rows = _Scored(stage, prompts, rollouts, selection)
    temperature = stage.config.rollout.temperature
    with stage.workers(policy).trainer_at(policy) as trainer:
        logprobs, entropy = trainer.logprobs(rows.sequences, temperature)
        squares = None
        if "sum_squared_probs" in stage.external:
            squares = trainer.sum_squared_probs(rows.sequences, temperature)
    theirs = rows.rollout_logprobs.values.double()
    difference = (theirs - logprobs.values.double())[theirs.isfinite()]
    table = rows.table(OLD_LOGPROBS, old_logprobs=logprobs, entropy=entropy)
    if squares is not None:
        table = table.append_column(SUM_SQUARED_PROBS, list_array(rows.spread(squares), FLOATS))
    summary = {
        "entropy": float(entropy.values.double().mean()),
        "rollout_kl": float(difference.mean()),
        "rollout_abs_difference_max": float(difference.abs().max()),
    }
    return stage.commit(table, tokens=len(logprobs.values), summary=summary)


@stage_task(REF)
def ref_logprobs(
    stage: Stage,
    prompts: list[ArtifactRef],
    rollouts: list[ArtifactRef],
    initial: ArtifactRef,
    selection: ArtifactRef | None,
) -> ArtifactRef:
    """Log-probs under the frozen policy that the run started from."""
    rows = _Scored(stage, prompts, rollouts, selection)
    logprobs = stage.workers(initial).reference_logprobs(rows.sequences, stage.config.rollout.temperature)
    return stage.commit(rows.table(REF_LOGPROBS, ref_logprobs=logprobs), tokens=len(logprobs.values))


@stage_task(CRITIC)
def values(
    stage: Stage,
    prompts: list[ArtifactRef],
    rollouts: list[ArtifactRef],
    policy: ArtifactRef,
    selection: ArtifactRef | None,
) -> ArtifactRef:
    """What the critic expects before each response token."""
    rows = _Scored(stage, prompts, rollouts, selection)
    with stage.workers(policy).trainer_at(policy) as trainer:
        found = trainer.values(rows.sequences)
    return stage.commit(rows.table(VALUES, values=found), tokens=len(found.values))


class _Scored:
    """The rows of an iteration that are scored."""

    def __init__(
        self, stage: Stage, prompts: list[ArtifactRef], rollouts: list[ArtifactRef], selection: ArtifactRef | None
    ) -> None:
        self._rollouts = stage.table(rollouts)
        everything = sequences(stage.table(prompts), self._rollouts)
        self._all = everything.responses
        self._chosen = None
        self.sequences: Sequences = everything
        self.rollout_logprobs = ragged_column(self._rollouts, "rollout_logprobs")
        if selection is not None:
            self._chosen = flag_column(stage.table(selection), "used")
            rows = torch.nonzero(self._chosen).squeeze(1)
            self.sequences = everything.gather(rows)
            self.rollout_logprobs = self.rollout_logprobs.gather(rows)

    def spread(self, scored: Ragged) -> Ragged:
        """The scored rows at their places among all, 0 elsewhere."""
        return scored if self._chosen is None else place_rows(scored.values, self._chosen, self._all)

    def table(self, schema: pa.Schema, **columns: Ragged) -> pa.Table:
        arrays = {name: list_array(self.spread(column), FLOATS) for name, column in columns.items()}
        return pa.table({"rollout_id": self._rollouts.column("rollout_id"), **arrays}, schema=schema)
