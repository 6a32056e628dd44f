"""The end of a run: before and after, a picture, and where to look."""

import re
import tempfile
from pathlib import Path

from prefect.artifacts import create_markdown_artifact
from pydantic import BaseModel

from grpo_lib.run import Run
from grpo_lib.storage.paths import run_folder
from grpo_lib.tracking.mlflow import tracker_for
from grpo_lib.tracking.reports import curve, plot_curves, seconds_between_stages


class Accuracy(BaseModel):
    """Held-out accuracy of one mode, first and last evaluation."""

    mode: str
    before: float
    before_se: float
    after: float
    after_se: float


class RunReport(BaseModel):
    """What a run says at its end."""

    run: str
    iterations: int
    accuracy: list[Accuracy]
    seconds_between_stages: float | None
    store: str
    curve: str
    mlflow_uri: str
    mlflow_run: str


def report(run: Run) -> RunReport:
    """Draws the curves, closes the MLflow run and says where everything is."""
    manifests = run.manifests()
    picture = f"{run_folder(run.name)}/curve.png"
    tracker = tracker_for(run)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "curve.png"
        plot_curves(manifests, run.name, path)
        run.objects.put_file(picture, path)
        tracker.log_file(path, "curves")
    accuracy = []
    for mode in ("sampled", "greedy"):
        _, values = curve(manifests, "evaluate", f"{mode}_accuracy")
        _, errors = curve(manifests, "evaluate", f"{mode}_accuracy_se")
        if values:
            accuracy.append(
                Accuracy(mode=mode, before=values[0], before_se=errors[0], after=values[-1], after_se=errors[-1])
            )
    result = RunReport(
        run=run.name,
        iterations=run.config.iterations,
        accuracy=accuracy,
        seconds_between_stages=seconds_between_stages(manifests),
        store=run.place,
        curve=run.objects.location(picture),
        mlflow_uri=tracker.uri,
        mlflow_run=tracker.run_id,
    )
    tracker.finish("FINISHED")
    create_markdown_artifact(
        key=artifact_key(run.name, "report"), markdown=as_markdown(result), description=f"Run {run.name}"
    )
    return result


def artifact_key(run: str, name: str) -> str:
    """Of Prefect's artifact ``name`` of a run: lower-case letters, digits and dashes.

    >>> artifact_key("Demo_s0.v2", "curves")
    'demo-s0-v2-curves'
    """
    return re.sub("[^a-z0-9]+", "-", run.lower()).strip("-") + f"-{name}"


def as_markdown(result: RunReport) -> str:
    """The report for the Prefect UI."""
    rows = "\n".join(
        f"| {each.mode} | {each.before:.3f} ± {each.before_se:.3f} | {each.after:.3f} ± {each.after_se:.3f} |"
        for each in result.accuracy
    )
    lines = [
        f"# {result.run}",
        "",
        f"| held-out accuracy | before | after {result.iterations} iterations |",
        "|---|---|---|",
        rows,
        "",
        f"- store: `{result.store}`",
        f"- curves: `{result.curve}`",
        f"- MLflow: `{result.mlflow_uri}`, run `{result.mlflow_run}`",
    ]
    return "\n".join(lines)
