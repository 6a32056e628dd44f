"""`publish`: the metrics of an iteration to MLflow, from the manifests of its stages."""

import pyarrow as pa
import pyarrow.compute as pc

from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from grpo_lib.tracking.metrics import metric_points
from grpo_lib.tracking.mlflow import tracker_for
from tasks.base import Stage, stage_task

# The run's name is part of the key: another run of equal stages has an MLflow run of its own.
PUBLISH = StageSpec(name="publish", version=1, reads=("run_name", "tracking"))


@stage_task(PUBLISH)
def publish(stage: Stage, artifacts: list[ArtifactRef]) -> ArtifactRef:
    """Logs metrics, datasets, checkpoints and held-out samples; committed when MLflow has them."""
    stages = stage.run.stages
    manifests = [stages.manifest(ref) for ref in artifacts]
    tracker = tracker_for(stage.run)
    points = metric_points(manifests)
    tracker.log_points(points.to_pylist())
    for ref, manifest in zip(artifacts, manifests, strict=True):
        if ref.stage == "dataset":
            tracker.log_dataset(
                name=str(stage.run.config.data.problem), digest=ref.digest, uri=stages.folder(ref), context="training"
            )
        if ref.stage == "checkpoint":
            tracker.log_model(
                version=int(str(manifest.summary["policy_version"])),
                digest=str(manifest.summary["policy_digest"]),
                uri=stages.folder(ref),
            )
        if ref.stage == "evaluate":
            table = held_out_samples(stage.table(ref), stage.config.tracking.rollout_samples)
            tracker.log_table(table.to_pydict(), f"evaluation/{ref.iteration:06d}.json")
    return stage.commit(points)


def held_out_samples(evaluation: pa.Table, count: int) -> pa.Table:
    """The first sampled (else greedy) responses of an evaluation, for people."""
    mode = pc.max(evaluation.column("mode")).as_py()  # "sampled" sorts after "greedy"
    rows = evaluation.filter(pc.equal(evaluation.column("mode"), mode)).slice(0, count)
    return rows.select(["prompt", "text", "reference", "value", "correct", "finish_reason"])
