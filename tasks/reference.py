"""The reference policy where it is not simply the one that the run starts from: another model, or one that follows."""

import tempfile
from pathlib import Path

import torch

from grpo_lib.models import load_model
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.export import export_model
from tasks.base import Stage, stage_task

MODEL = StageSpec(name="reference_model", version=1, reads=("reference.path",))
FOLLOWING = StageSpec(name="reference", version=1, reads=("reference.decay",))


@stage_task(MODEL)
def reference_model(stage: Stage) -> ArtifactRef:
    """Records the model that the reference begins as, by the digest of its weights; they stay where they are."""
    path = stage.config.reference.path
    digest = weights_digest(load_model(path, torch.float32, "cpu").state_dict())
    where = str(Path(path).resolve()) if Path(path).is_dir() else path
    return stage.commit(rows=0, summary={"policy_digest": digest, "path": where})


@stage_task(FOLLOWING)
def reference(stage: Stage, policy: ArtifactRef, initial: ArtifactRef, before: ArtifactRef | None) -> ArtifactRef:
    """Moves the reference towards the policy: ``decay * before + (1 - decay) * policy``; its weights in float32."""
    workers, decay = stage.workers(policy), stage.config.reference.decay
    with workers.trainer_at(policy) as trainer:
        weights = {name: value.clone() for name, value in trainer.weights().items()}
    with tempfile.TemporaryDirectory(prefix="grpo-reference-") as name:
        folder = Path(name)
        model = workers.reference_model(before)
        if decay:
            old = model.state_dict()
            weights = {name: torch.lerp(value, old[name].to(value), decay) for name, value in weights.items()}
        export_model(model, weights, torch.float32, folder)
        for path in sorted(folder.iterdir()):
            stage.write_file(path.name, path)
    summary = {"policy_digest": weights_digest(weights), "policy_version": stage.summary(policy)["policy_version"]}
    return stage.commit(rows=0, summary=summary)
