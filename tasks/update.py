"""`update`: policy v to policy v+1, and `checkpoint`: its whole training state."""

import tempfile
from pathlib import Path

from grpo_lib.storage.stages import ArtifactRef
from grpo_lib.training.checkpoints import CHECKPOINT
from grpo_lib.training.updates import UPDATE, update_summary, update_table
from tasks.base import Stage, artifacts, stage_task


@stage_task(UPDATE, role="train")
def update(
    stage: Stage,
    policy: ArtifactRef,
    prompts: list[ArtifactRef],
    rollouts: list[ArtifactRef],
    old_logprobs: ArtifactRef | None,
    ref_logprobs: ArtifactRef | None,
    values: ArtifactRef | None,
    advantages: ArtifactRef,
    reference: ArtifactRef | None,
) -> ArtifactRef:
    """The optimizer steps of the iteration. Commits their metrics and the digest of the new policy."""
    inputs = artifacts([prompts, rollouts, old_logprobs, ref_logprobs, values, advantages])
    with stage.workers(policy).training(policy, stage.key) as trainer:
        done = trainer.update(inputs, stage.k, reference, on_progress=stage.advanced)
        digest, critic = trainer.digests()
    before, steps = stage.summary(policy), done.steps
    summary = (
        update_summary(steps)
        | done.performance
        | {
            "policy_digest": digest,
            "policy_version": before["policy_version"] + 1,
            "optimizer_step": steps[-1].optimizer_step,
            "initial": before.get("initial") or stage.input_ref(policy),
        }
    )
    if critic is not None:
        summary["critic_digest"] = critic
    ref = stage.commit(update_table(steps), tokens=sum(step.tokens for step in steps), summary=summary)
    committed = stage.summary(ref)
    if (committed["policy_digest"], committed.get("critic_digest")) != (digest, critic):
        # Another attempt was faster, and its arithmetic differs.
        stage.workers(policy).forget()
    return ref


@stage_task(CHECKPOINT, role="train")
def checkpoint(stage: Stage, policy: ArtifactRef) -> ArtifactRef:
    """Saves weights (Hugging Face format), tokenizer, optimizer and step."""
    workers = stage.workers(policy)
    with tempfile.TemporaryDirectory(prefix="grpo-checkpoint-") as name:
        folder = Path(name)
        with workers.trainer_at(policy) as trainer:
            trainer.save(folder)
        workers.tokenizer.save_pretrained(folder)
        for path in sorted(each for each in folder.iterdir() if each.is_file()):
            stage.write_file(path.name, path)
    before = stage.summary(policy)
    names = ("policy_digest", "critic_digest", "policy_version")
    summary = {name: before[name] for name in names if name in before}
    return stage.commit(rows=0, summary=summary)
