"""A process that is one run of a sweep: ``python -m flows.trial FLOW_RUN_ID``. The flow run's parameters say which."""

import sys
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow

from flows.train import train


def main(flow_run_id: str) -> None:
    """Runs `train` as the flow run that was made for it."""
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(UUID(flow_run_id))
    run_flow(train, flow_run=flow_run, parameters=flow_run.parameters)


if __name__ == "__main__":
    main(sys.argv[1])
