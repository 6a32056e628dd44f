"""The reference policy where it is not simply the one that the run starts from: another model, or one that follows."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

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
    model = workers.reference_model(before)
    with tempfile.TemporaryDirectory(prefix="grpo-reference-") as name, workers.trainer_at(policy) as trainer:
        weights = moved(model.state_dict(), trainer.weights(), decay) if decay else trainer.weights()
        digest = export_model(model, weights, torch.float32, Path(name))
        for path in sorted(Path(name).iterdir()):
            stage.write_file(path.name, path)
    return stage.commit(
        rows=0, summary={"policy_digest": digest, "policy_version": stage.summary(policy)["policy_version"]}
    )


def moved(before: Mapping[str, Tensor], policy: Mapping[str, Tensor], decay: float) -> dict[str, Tensor]:
    """``decay * before + (1 - decay) * policy``; tied weights stay one tensor."""
    found: dict[int, Tensor] = {}
    for name, value in policy.items():
        if value.data_ptr() not in found:
            found[value.data_ptr()] = torch.lerp(value.cpu(), before[name].to(value.dtype), decay)
    return {name: found[value.data_ptr()] for name, value in policy.items()}
