"""`old_logprobs`, `ref_logprobs`, `values`: what policy, reference and critic say of the rollouts.

Rows that the filters left out are not scored; their values are 0 and nothing reads them.
"""

import pyarrow as pa
import torch
from torch import Tensor

from grpo_lib.data.columns import flag_column, list_array, ragged_column
from grpo_lib.data.ragged import Ragged, place_rows
from grpo_lib.data.schemas import FLOATS, OLD_LOGPROBS, REF_LOGPROBS, SUM_SQUARED_PROBS, VALUES
from grpo_lib.placement.train import Rows
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from tasks.base import Stage, stage_task

BATCHING = ("model.dtype", "trainer.backend", "trainer.max_tokens", "trainer.layout")
READS = ("rollout.temperature", *BATCHING)
OLD = StageSpec(name="old_logprobs", version=2, reads=(*READS, "trainer.lora"))
REF = StageSpec(name="ref_logprobs", version=2, reads=READS)
CRITIC = StageSpec(name="values", version=2, reads=BATCHING)


@stage_task(OLD, role="train")
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
    columns = _Columns(stage, rollouts, selection)
    asked = ["logprobs", *(["sum_squared_probs"] if "sum_squared_probs" in stage.external else [])]
    rows = Rows(prompts=prompts, rollouts=rollouts, selection=selection)
    with stage.workers(policy).trainer_at(policy) as trainer:
        scores = trainer.score(asked, rows, on_progress=stage.advanced)
    assert scores.logprobs is not None
    assert scores.entropy is not None
    own = columns.chosen("response_mask").values.bool()  # what the policy wrote, not what tools said
    theirs = columns.chosen("rollout_logprobs").values.double()
    difference = (theirs - scores.logprobs.values.double())[own & theirs.isfinite()]
    table = columns.table(OLD_LOGPROBS, old_logprobs=scores.logprobs, entropy=scores.entropy)
    if scores.sum_squared_probs is not None:
        squares = list_array(columns.spread(scores.sum_squared_probs), FLOATS)
        table = table.append_column(SUM_SQUARED_PROBS, squares)
    summary = {
        "entropy": float(scores.entropy.values[own].double().mean()),
        "rollout_kl": float(difference.mean()),
        "rollout_abs_difference_max": float(difference.abs().max()),
    }
    return stage.commit(table, tokens=len(scores.logprobs.values), summary=summary)


@stage_task(REF, role="train")
def ref_logprobs(
    stage: Stage,
    prompts: list[ArtifactRef],
    rollouts: list[ArtifactRef],
    initial: ArtifactRef,
    reference: ArtifactRef | None,
    selection: ArtifactRef | None,
) -> ArtifactRef:
    """Log-probs under the reference policy; without an artifact of its own that is the one the run started from."""
    columns = _Columns(stage, rollouts, selection)
    rows = Rows(prompts=prompts, rollouts=rollouts, selection=selection)
    with stage.workers(initial).trainer() as trainer:
        scores = trainer.score(["ref_logprobs"], rows, reference, on_progress=stage.advanced)
    assert scores.ref_logprobs is not None
    table = columns.table(REF_LOGPROBS, ref_logprobs=scores.ref_logprobs)
    return stage.commit(table, tokens=len(scores.ref_logprobs.values))


@stage_task(CRITIC, role="train")
def values(
    stage: Stage,
    prompts: list[ArtifactRef],
    rollouts: list[ArtifactRef],
    policy: ArtifactRef,
    selection: ArtifactRef | None,
) -> ArtifactRef:
    """What the critic expects before each response token."""
    columns = _Columns(stage, rollouts, selection)
    rows = Rows(prompts=prompts, rollouts=rollouts, selection=selection)
    with stage.workers(policy).trainer_at(policy) as trainer:
        scores = trainer.score(["values"], rows, on_progress=stage.advanced)
    assert scores.values is not None
    return stage.commit(columns.table(VALUES, values=scores.values), tokens=len(scores.values.values))


class _Columns:
    """What is scored, as columns beside all rollouts of the iteration."""

    def __init__(self, stage: Stage, rollouts: list[ArtifactRef], selection: ArtifactRef | None) -> None:
        self._rollouts = stage.table(rollouts)
        self._used: Tensor | None = None if selection is None else flag_column(stage.table(selection), "used")

    def chosen(self, name: str) -> Ragged:
        """A column of the rows that are scored."""
        column = ragged_column(self._rollouts, name)
        return column if self._used is None else column.gather(torch.nonzero(self._used).squeeze(1))

    def spread(self, scored: Ragged) -> Ragged:
        """The scored rows at their places among all, 0 elsewhere."""
        if self._used is None:
            return scored
        return place_rows(scored.values, self._used, ragged_column(self._rollouts, "response_ids"))

    def table(self, schema: pa.Schema, **columns: Ragged) -> pa.Table:
        arrays = {name: list_array(self.spread(column), FLOATS) for name, column in columns.items()}
        return pa.table({"rollout_id": self._rollouts.column("rollout_id"), **arrays}, schema=schema)
