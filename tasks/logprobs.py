"""`old_logprobs` and `ref_logprobs`: what the trainer's policy and the reference say of the rollouts."""

import pyarrow as pa

from grpo_lib.data.columns import list_array, ragged_column
from grpo_lib.data.schemas import FLOATS, OLD_LOGPROBS, REF_LOGPROBS
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from grpo_lib.training.updates import sequences
from tasks.base import Stage, stage_task

READS = ("rollout.temperature", "model.dtype", "trainer.backend", "trainer.max_tokens")
OLD = StageSpec(name="old_logprobs", version=1, reads=READS)
REF = StageSpec(name="ref_logprobs", version=1, reads=READS)


@stage_task(OLD)
def old_logprobs(stage: Stage, prompts: ArtifactRef, rollouts: list[ArtifactRef], policy: ArtifactRef) -> ArtifactRef:
    """Log-probs and entropies under the policy before the update: the anchor of the ratio."""
    responses = stage.table(rollouts)
    with stage.workers(policy).trainer_at(policy) as trainer:
        logprobs, entropy = trainer.logprobs(
            sequences(stage.table(prompts), responses), stage.config.rollout.temperature
        )
    theirs = ragged_column(responses, "rollout_logprobs").values.double()
    difference = theirs - logprobs.values.double()
    table = pa.table(
        {
            "rollout_id": responses.column("rollout_id"),
            "old_logprobs": list_array(logprobs, FLOATS),
            "entropy": list_array(entropy, FLOATS),
        },
        schema=OLD_LOGPROBS,
    )
    summary = {
        "entropy": float(entropy.values.double().mean()),
        "rollout_kl": float(difference.mean()),
        "rollout_abs_difference_max": float(difference.abs().max()),
    }
    return stage.commit(table, tokens=len(logprobs.values), summary=summary)


@stage_task(REF)
def ref_logprobs(stage: Stage, prompts: ArtifactRef, rollouts: list[ArtifactRef], initial: ArtifactRef) -> ArtifactRef:
    """Log-probs under the frozen policy that the run started from."""
    responses = stage.table(rollouts)
    logprobs = stage.workers(initial).reference_logprobs(
        sequences(stage.table(prompts), responses), stage.config.rollout.temperature
    )
    table = pa.table(
        {"rollout_id": responses.column("rollout_id"), "ref_logprobs": list_array(logprobs, FLOATS)},
        schema=REF_LOGPROBS,
    )
    return stage.commit(table, tokens=len(logprobs.values))
