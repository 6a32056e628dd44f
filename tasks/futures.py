"""Results of stages that were submitted."""

from prefect.context import FlowRunContext
from prefect.futures import PrefectConcurrentFuture

from grpo_lib.storage.manifests import ArtifactRef


class StageFuture:
    """The result to come of a stage that was submitted."""

    def __init__(self, future: "PrefectConcurrentFuture[ArtifactRef]", known: ArtifactRef | None) -> None:
        self._future = future
        self._known = known

    def wait(self) -> None:
        self._future.wait()

    @property
    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        return self._future.wrapped_future.done()

    def result(self) -> ArtifactRef:
        """Raises what the stage raised. What the store knew beforehand counts, not what Prefect remembers of it."""
        made = self._future.result()
        return self._known or made


class KnownResult(StageFuture):
    """A result that needs no waiting for."""

    def __init__(self, ref: ArtifactRef) -> None:
        self._ref = ref

    def wait(self) -> None:
        pass

    @property
    def done(self) -> bool:
        return True

    def result(self) -> ArtifactRef:
        return self._ref


def forget_results() -> None:
    """Drops what Prefect remembers of results, but for references that somebody holds.

    In long runs the others are most of the memory. The strings and numbers inside references make it draw arrows
    between stages that have nothing but a name in common.
    """
    context = FlowRunContext.get()
    if context is not None:
        for key, (_, _, result) in list(context.run_results.items()):
            if result is None or not isinstance(result(), ArtifactRef):
                context.run_results.pop(key, None)
