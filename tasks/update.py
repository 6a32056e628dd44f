"""`update`: policy v to policy v+1, and `checkpoint`: its whole training state."""

from grpo_lib.storage.stages import ArtifactRef
from grpo_lib.training.checkpoints import CHECKPOINT, checkpoint_files
from grpo_lib.training.updates import UPDATE, run_update, update_summary, update_table
from tasks.base import Stage, artifacts, stage_task


@stage_task(UPDATE)
def update(
    stage: Stage,
    policy: ArtifactRef,
    prompts: list[ArtifactRef],
    rollouts: list[ArtifactRef],
    old_logprobs: ArtifactRef | None,
    ref_logprobs: ArtifactRef | None,
    values: ArtifactRef | None,
    advantages: ArtifactRef,
) -> ArtifactRef:
    """The optimizer steps of the iteration. Commits their metrics and the digest of the new policy."""
    inputs = artifacts([prompts, rollouts, old_logprobs, ref_logprobs, values, advantages])
    with stage.workers(policy).training(policy, stage.key) as trainer:
        steps = run_update(trainer, stage.run.stages, inputs, stage.config, stage.k)
        digest, critic = trainer.digest(), trainer.critic_digest()
    before = stage.summary(policy)
    summary = update_summary(steps) | {
        "policy_digest": digest,
        "policy_version": before["policy_version"] + 1,
        "optimizer_step": steps[-1].optimizer_step,
        "initial": before.get("initial") or stage.input_ref(policy),
    }
    if critic is not None:
        summary["critic_digest"] = critic
    ref = stage.commit(update_table(steps), tokens=sum(step.tokens for step in steps), summary=summary)
    committed = stage.summary(ref)
    if (committed["policy_digest"], committed.get("critic_digest")) != (
        digest,
        critic,
    ):  # another attempt was faster, and its arithmetic differs
        stage.workers(policy).forget()
    return ref


@stage_task(CHECKPOINT)
def checkpoint(stage: Stage, policy: ArtifactRef) -> ArtifactRef:
    """Saves weights (Hugging Face format), tokenizer, optimizer and step."""
    workers = stage.workers(policy)
    with workers.trainer_at(policy) as trainer, checkpoint_files(trainer, workers.tokenizer) as paths:
        for path in paths:
            stage.write_file(path.name, path)
    before = stage.summary(policy)
    names = ("policy_digest", "critic_digest", "policy_version")
    summary = {name: before[name] for name in names if name in before}
    return stage.commit(rows=0, summary=summary)
