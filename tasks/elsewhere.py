"""Stages that a worker runs: the flow sends references, and passes on what the worker says."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from prefect import get_run_logger

from grpo_lib.placement.calls import StageCall
from grpo_lib.placement.clusters import cluster_of
from grpo_lib.placement.code_version import module_digests
from grpo_lib.progress import progress
from grpo_lib.run import Run
from grpo_lib.storage.manifests import ArtifactRef

LOGGED_SECONDS = 5.0
"""A worker's progress is logged at most so often."""


def run_on_worker(
    role: str,
    task: str,
    stage: str,
    run: Run,
    iteration: int | None,
    inputs: Sequence[ArtifactRef | Sequence[ArtifactRef] | None],
    shard: int,
    key: str,
    external: Mapping[str, str],
) -> ArtifactRef:
    """Has a worker of ``role`` run a stage.

    Args:
        task: ``module:name`` of the stage's task.
    """
    call = StageCall(
        task=task,
        run=run.to_json(),
        stage=stage,
        iteration=iteration,
        inputs=[each if each is None or isinstance(each, ArtifactRef) else list(each) for each in inputs],
        shard=shard,
        key=key,
        external=dict(external),
        folder=os.getcwd(),
        plugins=module_digests(run.config.algorithm.plugins),
    )
    progress().stage_started(stage, iteration)
    relay = _Relay(get_run_logger(), call.name)
    return cluster_of(run.config).run(role, call, relay.message)


class _Relay:
    """What a worker says, to the progress of this process and, less often, to the logs of the Prefect task run."""

    def __init__(self, logger: Any, name: str) -> None:
        self._logger, self._name = logger, name
        self._logged = time.monotonic()

    def message(self, message: Mapping[str, Any]) -> None:
        values = {name: value for name, value in message.items() if name != "kind"}
        if message["kind"] == "progress":
            progress().stage_advanced(**values)
            if time.monotonic() - self._logged >= LOGGED_SECONDS:
                self._logged = time.monotonic()
                numbers = (values["done"], values["total"], values["tokens"])
                self._logger.info("%s: %s of %s, %s tokens", self._name, *numbers)
        elif message["kind"] == "note":
            progress().note(values["text"])
            self._logger.info("%s: %s", self._name, values["text"])
        else:
            self._logger.log(values["level"], "%s: %s: %s", self._name, values["source"], values["text"])
