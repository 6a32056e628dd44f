"""`grpo serve`: runs from Prefect's pages."""

import os
from typing import Annotated, Any

import typer

TAGS = ["grpo"]
Limit = Annotated[int, typer.Option(min=1, help="Runs at a time.")]


def serve(limit: Limit = 1) -> None:
    """Offer training and reruns in Prefect's pages, and carry them out here until Ctrl-C.

    Runs that are started there are cancelled there too: their stages stop, on workers as well.
    """
    from grpo_lib.errors import ConfigError

    address = os.environ.get("PREFECT_API_URL")
    if not address:
        raise ConfigError("PREFECT_API_URL is not set: start a server (`grpo up` or `prefect server start`) and set it")
    from prefect import serve as serve_deployments

    from flows.rerun import rerun
    from flows.train import train

    typer.echo(f"serving train and rerun-stage at {address.removesuffix('/api')}; Ctrl-C ends it")
    served: list[Any] = [
        train.to_deployment("train", tags=TAGS, description="Trains a policy; a run that is there goes on."),
        rerun.to_deployment("rerun-stage", tags=TAGS, description="A stage of a run again, in a branch of it."),
    ]
    serve_deployments(*served, limit=limit, print_starting_message=False)
