"""The workers that a configuration means, if it means any: Ray is imported only then."""

import os
import sys
from typing import TYPE_CHECKING

from grpo_lib.config import RunConfig

if TYPE_CHECKING:
    from grpo_lib.placement.ray_cluster import Cluster

RAY = "grpo_lib.placement.ray_cluster"


def ray_folder() -> str:
    """Temporary folder of the nodes that work. The head has another: a driver that finds its node joins that one,
    and would end with it.
    """
    return os.path.join(os.environ.get("RAY_TMPDIR", "/tmp"), "ray")


def cluster_of(config: RunConfig) -> "Cluster":
    """The cluster of a run with placement.kind=ray, one for this process."""
    from grpo_lib.placement.ray_cluster import cluster

    return cluster(config)


def attach(config: RunConfig, epoch: int | None = None) -> None:
    """Waits until the workers of the run are there, if it has any.

    Args:
        epoch: of a training flow, in the run; see `StageCall.epoch`.

    Raises:
        WorkerLostError: somebody is missing, with the command that starts it.
    """
    if config.placement.kind == "ray":
        cluster = cluster_of(config)
        cluster.epoch = epoch
        cluster.check()


def stop_clusters() -> None:
    """Cancels what flows of this process have running on workers."""
    if RAY in sys.modules:
        sys.modules[RAY].stop_clusters()
