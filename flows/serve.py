"""Deployments of this machine: runs are started, cancelled and run again from forms in Prefect's pages."""

from collections.abc import Sequence

from prefect import serve

from flows.rerun import rerun
from flows.train import train

TAGS = ["grpo"]


def serve_flows(limit: int) -> None:
    """Answers Prefect until it is interrupted.

    Args:
        limit: runs at a time.
    """
    served: Sequence[object] = [
        train.to_deployment("train", tags=TAGS, description="Trains a policy; a run that is there goes on."),
        rerun.to_deployment("rerun-stage", tags=TAGS, description="A stage of a run again, in a branch of it."),
    ]
    serve(*served, limit=limit, print_starting_message=False)  # type: ignore[arg-type]
