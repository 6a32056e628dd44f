"""`publish`: the metrics of an iteration to MLflow, from the manifests of its stages."""

import pyarrow as pa
import pyarrow.compute as pc

from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from grpo_lib.tracking.metrics import metric_points
from grpo_lib.tracking.mlflow import tracker_for
from tasks.base import Stage, stage_task

# The run's name is part of the key: another run of equal stages has an MLflow run of its own.
PUBLISH = StageSpec(
    name="publish",
    version=1,
    reads=("run_name", "tracking.uri", "tracking.experiment", "tracking.rollout_samples"),
)


@stage_task(PUBLISH)
def publish(stage: Stage, artifacts: list[ArtifactRef]) -> ArtifactRef:
    """Logs metrics, datasets, checkpoints and held-out samples; committed when MLflow has them."""
    stages, tracker = stage.run.stages, tracker_for(stage.run)
    manifests = [stages.manifest(ref) for ref in artifacts]
    by_stage = {ref.stage: ref for ref in artifacts}
    points = metric_points(manifests)
    if stage.again:  # some stages may have run again, and took another time
        points = pa.Table.from_pylist(tracker.as_logged(points.to_pylist()), schema=points.schema)
    model_id = None
    if "checkpoint" in by_stage and not stage.run.shares("checkpoint", by_stage["checkpoint"].iteration):
        saved = stage.summary(by_stage["checkpoint"])
        model_id = tracker.log_model(
            version=saved["policy_version"],
            digest=saved["policy_digest"],
            uri=stages.folder(by_stage["checkpoint"]),
        )
    tracker.log_points(points.to_pylist(), model_id)
    if "dataset" in by_stage:
        data = by_stage["dataset"]
        tracker.log_dataset(
            name=stage.run.config.data.problem, digest=data.digest, uri=stages.folder(data), context="training"
        )
    if "evaluate" in by_stage:
        evaluation = by_stage["evaluate"]
        samples = held_out_samples(stage.table(evaluation), stage.config.tracking.rollout_samples)
        tracker.log_table(samples.to_pydict(), f"evaluation/{evaluation.iteration:06d}.json")
    return stage.commit(points)


def held_out_samples(evaluation: pa.Table, count: int) -> pa.Table:
    """The first sampled (else greedy) responses of an evaluation, for people."""
    mode = pc.max(evaluation.column("mode")).as_py()  # "sampled" sorts after "greedy"
    rows = evaluation.filter(pc.equal(evaluation.column("mode"), mode)).slice(0, count)
    return rows.select(["prompt", "text", "reference", "value", "correct", "finish_reason"])
