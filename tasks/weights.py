"""`weights`: a policy as engines elsewhere load it, while the trainer may be further on."""

import tempfile
from pathlib import Path

from grpo_lib.placement.train import DTYPES
from grpo_lib.storage.stages import ArtifactRef
from grpo_lib.training.handover import WEIGHTS, save_weights
from tasks.base import Stage, stage_task


@stage_task(WEIGHTS, role="train")
def weights(stage: Stage, policy: ArtifactRef) -> ArtifactRef:
    """Saves the policy's weights in the precision of its passes. They can be made again; `grpo gc` drops them."""
    with tempfile.TemporaryDirectory(prefix="grpo-weights-") as name:
        folder = Path(name)
        with stage.workers(policy).trainer_at(policy) as trainer:
            digest = save_weights(trainer.weights(), DTYPES[stage.config.model.dtype], folder)
        for path in sorted(folder.iterdir()):
            stage.write_file(path.name, path)
    version = stage.summary(policy)["policy_version"]
    return stage.commit(rows=0, summary={"weights_digest": digest, "policy_version": version})
