"""Runs of the real flow in the tests' process, and what they committed."""

from collections.abc import Callable

from grpo_lib.config import RunConfig
from grpo_lib.run import Run
from grpo_lib.storage.stages import Manifest

Tiny = Callable[..., RunConfig]


def train(config: RunConfig) -> list[Manifest]:
    """Trains and returns everything that the run committed."""
    from flows.train import train as flow

    flow(config)
    return Run(config).stages.manifests()


def of(manifests: list[Manifest], stage: str, iteration: int | None = None) -> list[Manifest]:
    return [each for each in manifests if each.stage == stage and (iteration is None or each.iteration == iteration)]


def fresh_process() -> None:
    """What a new process would not have: the warm engines, and their ranks."""
    from grpo_lib.placement import local
    from tasks.dataset import split

    for each in local._current.values():
        each.close()
    local._current.clear()
    split.cache_clear()
