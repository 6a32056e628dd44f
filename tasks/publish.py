"""`publish`: the metrics of an iteration to MLflow, from the manifests of its stages."""

import pyarrow as pa
import pyarrow.compute as pc
import yaml

from grpo_lib.config import RunConfig
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from grpo_lib.tracking.metrics import metric_points
from grpo_lib.tracking.mlflow import tracker_for
from grpo_lib.tracking.notes import CONFIG
from grpo_lib.tracking.registry import Registered, Registry
from tasks.base import Stage, stage_task

# The run's name is part of the key: another run of equal stages has an MLflow run of its own.
PUBLISH = StageSpec(
    name="publish",
    version=2,
    reads=("run_name", "tracking.uri", "tracking.experiment", "tracking.rollout_samples"),
)
SHOWN = {
    "prompt": "prompt", "text": "response", "reference": "reference", "value": "reward", "correct": "correct",
    "finish_reason": "ended by",
}  # fmt: skip
"""Columns of an evaluation that people read, and their titles."""


@stage_task(PUBLISH)
def publish(stage: Stage, artifacts: list[ArtifactRef]) -> ArtifactRef:
    """Logs metrics, datasets, checkpoints and held-out samples; committed when MLflow has them."""
    tracker = tracker_for(stage.run)
    tracker.measure_system()
    by_stage = {ref.stage: ref for ref in artifacts}
    points = metric_points([stage.run.stages.manifest(ref) for ref in artifacts])
    if stage.again:  # some stages may have run again, and took another time
        points = pa.Table.from_pylist(tracker.as_logged(points.to_pylist()), schema=points.schema)
    model_id = None
    if "checkpoint" in by_stage and not stage.run.shares("checkpoint", by_stage["checkpoint"].iteration):
        model_id = _publish_model(stage, by_stage["checkpoint"])
    _publish_points(stage, points, model_id, by_stage.get("evaluate"))
    if "dataset" in by_stage:
        _publish_data(stage, by_stage["dataset"])
    if "evaluate" in by_stage:
        _publish_samples(stage, by_stage["evaluate"])
    return stage.commit(points)


def published_elsewhere(config: RunConfig, stages: list[ArtifactRef]) -> dict[str, str]:
    """Where a publication goes beside the MLflow run, which is part of its key."""
    name = config.tracking.registered_model
    return {"registered_model": name} if name is not None and any(ref.stage == "checkpoint" for ref in stages) else {}


def _publish_data(stage: Stage, data: ArtifactRef) -> None:
    """Both splits as inputs, and the configuration as a file."""
    tracker = tracker_for(stage.run)
    splits = pc.value_counts(stage.run.stages.table(data, ["split"]).column("split")).to_pylist()
    rows = {each["values"]: each["counts"] for each in splits}
    for split, context in (("train", "training"), ("heldout", "evaluation")):
        tracker.log_dataset(
            name=_data_name(stage, split),
            digest=data.digest,
            uri=stage.run.stages.folder(data),
            context=context,
            rows=rows.get(split, 0),
        )
    config = stage.run.config.model_dump(mode="json") | {"name": stage.run.name}
    tracker.log_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), CONFIG)


def _publish_samples(stage: Stage, evaluation: ArtifactRef) -> None:
    samples = held_out_samples(stage.run.stages.table(evaluation), stage.config.tracking.rollout_samples)
    tracker_for(stage.run).log_table(samples.to_pydict(), f"evaluation/{evaluation.iteration:06d}.json")


def _publish_points(stage: Stage, points: pa.Table, model_id: str | None, evaluation: ArtifactRef | None) -> None:
    """Those of the evaluation belong to the model that it judged, and to the prompts."""
    tracker = tracker_for(stage.run)
    if model_id is None or evaluation is None:
        tracker.log_points(points.to_pylist())
        return
    judged = pc.starts_with(points.column("name"), "evaluate/")
    prompts = next(ref.digest for ref in stage.run.stages.manifest(evaluation).inputs if ref.stage == "dataset")
    tracker.log_points(points.filter(pc.invert(judged)).to_pylist())
    tracker.log_points(points.filter(judged).to_pylist(), model_id, (_data_name(stage, "heldout"), prompts))


def _publish_model(stage: Stage, checkpoint: ArtifactRef) -> str:
    """A checkpoint as a logged model, and as a registered version if that is wanted."""
    tracker, saved, place = tracker_for(stage.run), stage.summary(checkpoint), stage.run.stages.folder(checkpoint)
    version, digest = saved["policy_version"], saved["policy_digest"]
    model_id = tracker.log_model(version=version, digest=digest, uri=place)
    name = stage.external.get("registered_model")
    if name is not None:
        registered = Registered(
            place=place,
            run=stage.run.name,
            policy_version=version,
            policy_digest=digest,
            run_id=tracker.run_id,
            model_id=model_id,
        )
        Registry(stage.run.config).register(name, registered)
    return model_id


def _data_name(stage: Stage, split: str) -> str:
    return f"{stage.run.config.data.problem}/{split}"


def held_out_samples(evaluation: pa.Table, count: int) -> pa.Table:
    """The first sampled (else greedy) responses of an evaluation, for people."""
    mode = pc.max(evaluation.column("mode")).as_py()  # "sampled" sorts after "greedy"
    rows = evaluation.filter(pc.equal(evaluation.column("mode"), mode)).slice(0, count)
    return rows.select(list(SHOWN)).rename_columns(list(SHOWN.values()))
