"""The reference policy where it is not simply the one that the run starts from: another model, or one that follows."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from grpo_lib.errors import ConfigError
from grpo_lib.models import load_model
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.export import describe, export_model
from tasks.base import Stage, stage_task

MODEL = StageSpec(name="reference_model", version=2, reads=("reference.path", "reference.every"))
FOLLOWING = StageSpec(name="reference", version=2, reads=("reference.decay",))


@stage_task(MODEL, role="train")
def reference_model(stage: Stage, initial: ArtifactRef) -> ArtifactRef:
    """Records the model that the reference begins as, by the digest of its weights; they stay where they are."""
    settings = stage.config.reference
    path = settings.path
    if settings.every is not None and describe(path).shapes != stage.workers(initial).description.shapes:
        raise ConfigError(
            f"reference.path={path!r} has weights of other names or shapes than the policy, so reference.every="
            f"{settings.every} can't bring it up to date; take a model of the same architecture, or remove every"
        )
    digest = weights_digest(load_model(path, torch.float32, "cpu").state_dict())
    where = str(Path(path).resolve()) if Path(path).is_dir() else path
    return stage.commit(rows=0, summary={"policy_digest": digest, "path": where})


@stage_task(FOLLOWING, role="train")
def reference(stage: Stage, policy: ArtifactRef, initial: ArtifactRef, before: ArtifactRef | None) -> ArtifactRef:
    """Moves the reference towards the policy: ``decay * before + (1 - decay) * policy``; its weights in float32."""
    workers, decay = stage.workers(policy), stage.config.reference.decay
    with tempfile.TemporaryDirectory(prefix="grpo-reference-") as name, workers.trainer_at(policy) as trainer:
        weights = trainer.weights()
        if decay:
            weights = moved(workers.reference_weights(before), weights, decay)
        digest = export_model(workers.description, weights, torch.float32, Path(name))
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
