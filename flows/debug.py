"""One stage of a run again, here and now, on its exact inputs; what comes out is looked at and thrown away."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.branches import planned
from grpo_lib.branches import last_iteration
from grpo_lib.config_branch import ORDER
from grpo_lib.errors import ConfigError, NotFoundError
from grpo_lib.placement.devices import use_threads
from grpo_lib.placement.local import close_all
from grpo_lib.plugins import load_plugins
from grpo_lib.run import Run
from grpo_lib.storage.compare import Comparison, compare_artifacts
from grpo_lib.storage.local import LocalStore
from grpo_lib.storage.stages import ArtifactRef, Manifest, StageStore
from tasks.base import Stage, artifacts
from tasks.plan import Call


@dataclass(frozen=True, kw_only=True)
class Debugged:
    """What a stage gave."""

    made: Manifest
    committed: Manifest | None
    """What the run has at that place."""
    notes: list[str]
    """Why that is not quite the same stage, if so."""
    comparisons: list[Comparison]
    """With what is committed; empty where nothing is."""

    @property
    def equal(self) -> bool:
        return all(each.equal for each in self.comparisons)


class _Rehearsal(Stage):
    """A stage that commits into a store of its own."""

    def __init__(self, *arguments: Any, scratch: StageStore) -> None:
        super().__init__(*arguments)
        self._scratch, self._made = scratch, ""

    def commit(self, *arguments: Any, **more: Any) -> ArtifactRef:
        ref = super().commit(*arguments, **more)
        self._made = ref.manifest
        return ref

    def summary(self, ref: ArtifactRef) -> dict[str, Any]:
        if ref.manifest == self._made:
            return dict(self._scratch.manifest(ref).summary)
        return super().summary(ref)


def debug(run: Run, iteration: int | None, stage: str, shard: int = 0, *, compare: bool = False) -> Debugged:
    """Runs a stage in this thread, with nothing of Prefect, Ray or ranks' progress around it.

    Raises:
        ConfigError, NotFoundError: there is no such stage, or its inputs are not there yet.
    """
    for each in run.lineage:
        load_plugins(each.config.algorithm.plugins)
    call = find_call(run, iteration, stage, shard)
    known = call.committed or call.before
    if compare and known is None:
        raise NotFoundError(
            f"run {run.name!r} has not made {stage} yet, so there is nothing to compare with; leave --compare out"
        )
    here = Run(_alone(run))
    spec, inputs = call.task.spec, artifacts(call.inputs)
    use_threads(here.config.placement.threads)
    try:
        with tempfile.TemporaryDirectory(prefix="grpo-debug-") as name:
            objects = LocalStore(Path(name))
            objects.compression = run.objects.compression  # so that equal tables are equal bytes
            scratch = StageStore(objects, run.name)
            with scratch.attempt(spec, here.config, call.key, inputs, iteration, shard, call.outside) as attempt:
                rehearsal = _Rehearsal(here, spec, iteration, shard, call.key, attempt, call.external, scratch=scratch)
                ref = call.task.body(rehearsal, *call.inputs)
            made = scratch.manifest(ref)
            comparisons = []
            if compare and known is not None:
                committed = known.to_ref(reused=True)
                comparisons = compare_artifacts(
                    run.stages.files(committed), scratch.files(ref), known.summary, made.summary
                )
    finally:
        close_all()  # the trainer may hold what was never committed
    notes = [] if call.committed else [str(each) for each in call.differences]
    return Debugged(made=made, committed=known, notes=notes, comparisons=comparisons)


def find_call(run: Run, iteration: int | None, stage: str, shard: int) -> Call:
    """The stage as the flow calls it, with all its inputs.

    Raises:
        ConfigError: there is no such stage.
        NotFoundError: no such iteration or shard, or an input is not there yet.
    """
    if stage == "publish" or stage not in ORDER:
        listing = ", ".join(each for each in ORDER if each != "publish")
        why = "it logs into MLflow and makes no data" if stage == "publish" else "there is no such stage"
        raise ConfigError(f"can't debug {stage!r}: {why}; the stages are {listing}")
    place = "before the first iteration" if iteration is None else f"of iteration {iteration}"
    if run.shares(stage, iteration, shard):
        owner = run.at(stage, iteration, shard).name
        raise ConfigError(f"{stage} {place} is shared with run {owner!r}; `grpo debug {owner} ...` runs it")
    last = last_iteration(run) if iteration is not None else -1
    if iteration is not None and iteration > last + 1:
        raise NotFoundError(f"iteration {iteration}: run {run.name!r} has iterations 0 to {last}")
    there = [each for each in planned(run, iteration).calls if each.iteration == iteration]
    found = {each.shard: each for each in there if each.stage == stage}
    if not found:
        names = sorted({each.stage for each in there} - {"publish"}, key=ORDER.index)
        raise NotFoundError(f"run {run.name!r} has no {stage} {place}; it has {', '.join(names) or 'nothing there'}")
    if shard not in found:
        raise NotFoundError(f"shard {shard}: {stage} {place} has shards 0 to {max(found)}")
    call = found[shard]
    if call.uncertain:
        raise NotFoundError(
            f"{stage} {place} needs {', '.join(call.uncertain)}, which run {run.name!r} has not made yet with its "
            f"settings and today's code; `grpo resume {run.name}` makes it"
        )
    return call


def _alone(run: Run) -> Any:
    """The configuration with everything in this process: the trainer beside the engine, and in step with it."""
    config = run.config
    placement = config.placement.model_copy(update={"kind": "local"})
    pipeline = config.pipeline.model_copy(update={"max_staleness": 0})
    return config.model_copy(update={"placement": placement, "pipeline": pipeline})
