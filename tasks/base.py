"""What makes a function a stage: its key, its cache, its commit, and its Prefect task.

    SPEC = StageSpec(name="reward", version=1, reads=("reward", "data"))

    @stage_task(SPEC)
    def reward(stage: Stage, prompts: ArtifactRef, rollouts: ArtifactRef) -> ArtifactRef:
        ...
        return stage.commit(table, summary={"mean": 0.5})

    ref = reward(run, iteration, prompts, rollouts)           # in the flow
    future = reward.submit(run, iteration, prompts, rollouts)  # side by side with others

The body runs only when no manifest with its key exists. Prefect's cache has the same key, but the store is the truth:
without a manifest in the store the task runs, whatever Prefect remembers.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from prefect import task
from prefect.context import TaskRunContext
from pydantic import JsonValue

from grpo_lib.errors import (
    NobodyOffersError,
    RankLostError,
    ServerLostError,
    StoreUnreachableError,
    TrackingError,
    WorkerLostError,
)
from grpo_lib.patience import AWAY
from grpo_lib.placement.calls import worker_role
from grpo_lib.placement.local import Workers, workers
from grpo_lib.progress import progress
from grpo_lib.run import Run
from grpo_lib.storage.keys import ConfigView, StageSpec
from grpo_lib.storage.lease import check_lease
from grpo_lib.storage.local import full_disk_errors
from grpo_lib.storage.stages import ArtifactRef, Attempt, InputRef
from tasks.elsewhere import run_on_worker
from tasks.futures import KnownResult, StageFuture, forget_results
from tasks.logs import log_stage
from tasks.planner import current_planner

Input = ArtifactRef | Sequence[ArtifactRef] | None


class Stage:
    """What a stage's body sees: its slice of the configuration, its inputs' data, and its commit."""

    def __init__(
        self,
        run: Run,
        spec: StageSpec,
        iteration: int | None,
        shard: int,
        key: str,
        attempt: Attempt,
        external: Mapping[str, str],
    ) -> None:
        self.run = run
        self.name = spec.name
        self.config = ConfigView(run.at(spec.name, iteration, shard).config, spec)
        self.iteration = iteration
        self.shard = shard
        self.key = key
        self.external = dict(external)
        self._attempt = attempt
        self._started = time.perf_counter()

    @property
    def k(self) -> int:
        """The iteration, in stages that have one."""
        assert self.iteration is not None, f"stage {self.name} runs before the first iteration"
        return self.iteration

    def table(self, refs: ArtifactRef | Sequence[ArtifactRef]) -> pa.Table:
        """All rows of the given artifacts, verified."""
        return self.run.stages.table(refs)

    def summary(self, ref: ArtifactRef) -> dict[str, Any]:
        """The small results in an artifact's manifest."""
        return dict(self.run.stages.manifest(ref).summary)

    def input_ref(self, ref: ArtifactRef) -> dict[str, JsonValue]:
        """A lasting pointer to an artifact, as JSON."""
        return InputRef(stage=ref.stage, manifest=ref.manifest, digest=ref.digest).model_dump(mode="json")

    def workers(self, policy: ArtifactRef) -> Workers:
        """The warm engines; of what a branch shares those of the run that it branched off."""
        return workers(self.run.at(self.name, self.iteration, self.shard), policy)

    def advanced(self, done: int, total: int, tokens: int = 0) -> None:
        """Reports progress in rows or steps."""
        progress().stage_advanced(self.name, self.iteration, done, total, tokens)

    @property
    def again(self) -> bool:
        """Whether the stage was done before, and what it committed has been damaged."""
        return self._attempt.remake is not None

    def write_file(self, name: str, source: Any) -> None:
        self._attempt.write_file(name, source)

    def keep(self, table: pa.Table) -> None:
        """Keeps rows that were paid for when the stage fails; see `StageStore.kept`."""
        self.run.stages.keep(self.name, self.iteration, self.key, table)

    def commit(
        self,
        table: pa.Table | None = None,
        *,
        rows: int | None = None,
        tokens: int = 0,
        summary: Mapping[str, JsonValue] | None = None,
    ) -> ArtifactRef:
        """Commits the dataset; the seconds in its manifest are those of the body until here."""
        seconds = time.perf_counter() - self._started
        if table is not None:
            self._attempt.write_table(table)
        return self._attempt.commit(rows=rows, tokens=tokens, summary=summary, seconds=seconds)


class StageTask:
    """A stage as the flow calls it."""

    def __init__(self, spec: StageSpec, body: Callable[..., ArtifactRef], role: str | None) -> None:
        self.spec = spec
        self.body = body
        self.role = role
        options: dict[str, Any] = {
            "name": spec.name,
            "description": body.__doc__,
            "task_run_name": _task_run_name,
            "cache_key_fn": _cache_key,
            "persist_result": True,
            "result_serializer": "json",
            "retries": 2,
            "retry_delay_seconds": [2, 10],
            "retry_condition_fn": _worth_a_retry,
        }

        def run_stage(
            run: Run,
            iteration: int | None,
            inputs: tuple[Input, ...],
            shard: int,
            key: str,
            stage: str,
            external: dict[str, str],
        ) -> ArtifactRef:
            return self._run(run, iteration, inputs, shard, key, external)

        self._reuse = task(run_stage, **options)
        self._compute = task(run_stage, **(options | {"refresh_cache": True}))

    def __call__(
        self, run: Run, iteration: int | None, *inputs: Input, shard: int = 0, external: Mapping[str, str] | None = None
    ) -> ArtifactRef:
        """Runs the stage here and returns the reference to its dataset.

        Args:
            external: what else the result depends on: digests of data files or of a user's functions, a column asked
                for. Part of its key; the body sees it as ``stage.external``.
        """
        planner = current_planner()
        if planner is not None:
            return planner(self, run, iteration, inputs, shard, dict(external or {}))
        known, chosen, arguments = self._prepare(run, iteration, inputs, shard, external)
        made = chosen(**arguments)
        return known or made

    def submit(
        self, run: Run, iteration: int | None, *inputs: Input, shard: int = 0, external: Mapping[str, str] | None = None
    ) -> "StageFuture":
        """Starts the stage on the flow's task runner."""
        planner = current_planner()
        if planner is not None:
            return KnownResult(planner(self, run, iteration, inputs, shard, dict(external or {})))
        known, chosen, arguments = self._prepare(run, iteration, inputs, shard, external)
        return StageFuture(chosen.submit(**arguments), known)

    def known(
        self, run: Run, iteration: int | None, *inputs: Input, shard: int = 0, external: Mapping[str, str] | None = None
    ) -> bool:
        """Whether a call with these arguments would find its dataset committed."""
        key = run.key(self.spec, artifacts(inputs), iteration, shard, external)
        return run.stages.peek(self.spec, key, iteration, shard) is not None

    def _prepare(
        self,
        run: Run,
        iteration: int | None,
        inputs: tuple[Input, ...],
        shard: int,
        external: Mapping[str, str] | None = None,
    ) -> tuple[ArtifactRef | None, Any, dict[str, Any]]:
        check_lease(run)
        forget_results()
        key = run.key(self.spec, artifacts(inputs), iteration, shard, external)
        known = run.stages.find(self.spec, key, iteration, shard)
        if known is None:
            run.check_may_make(self.spec.name, iteration, shard)
        else:
            _report(known)
        arguments = {
            "run": run,
            "iteration": iteration,
            "inputs": inputs,
            "shard": shard,
            "key": key,
            "stage": self.spec.name,
            "external": dict(external or {}),
        }
        return known, (self._compute if known is None else self._reuse), arguments

    def _run(
        self,
        run: Run,
        iteration: int | None,
        inputs: tuple[Input, ...],
        shard: int,
        key: str,
        external: Mapping[str, str],
    ) -> ArtifactRef:
        role = worker_role(run.config.placement, self.role)
        if role is None:
            ref = self.compute(run, iteration, inputs, shard, key, external)
        else:
            known = run.stages.find(self.spec, key, iteration, shard)
            name = f"{self.body.__module__}:{self.body.__name__}"
            ref = known or run_on_worker(role, name, self.spec.name, run, iteration, inputs, shard, key, external)
        if not ref.reused:
            _report(ref)
        return ref

    def compute(
        self,
        run: Run,
        iteration: int | None,
        inputs: tuple[Input, ...],
        shard: int,
        key: str,
        external: Mapping[str, str],
    ) -> ArtifactRef:
        """Runs the stage in this process, unless it was committed in the meantime."""
        ref = run.stages.find(self.spec, key, iteration, shard)
        if ref is not None:
            return ref
        progress().stage_started(self.spec.name, iteration)
        config = run.at(self.spec.name, iteration, shard).config
        outside = run.external(self.spec.name, iteration, external)
        attempt = run.stages.attempt(self.spec, config, key, artifacts(inputs), iteration, shard, outside)
        with full_disk_errors(), attempt:
            return self.body(Stage(run, self.spec, iteration, shard, key, attempt, external), *inputs)


def stage_task(spec: StageSpec, role: str | None = None) -> Callable[[Callable[..., ArtifactRef]], StageTask]:
    """Decorator: a body ``(stage, *inputs) -> ArtifactRef`` becomes a stage.

    Args:
        role: kind of worker that runs it where there are workers: rollout, train or score; None: the flow's process.
    """
    return lambda body: StageTask(spec, body, role)


def _report(ref: ArtifactRef) -> None:
    progress().stage_ended(
        ref.stage, ref.iteration, rows=ref.rows, tokens=ref.tokens, seconds=ref.seconds, reused=ref.reused
    )
    log_stage(ref)


def artifacts(inputs: Sequence[Input]) -> list[ArtifactRef]:
    """All references among the inputs, in order."""
    flat: list[ArtifactRef] = []
    for each in inputs:
        if isinstance(each, ArtifactRef):
            flat.append(each)
        elif each is not None:
            flat += each
    return flat


def _cache_key(context: TaskRunContext, arguments: dict[str, Any]) -> str:
    """The stage's key, in its store and run: another store has data of its own."""
    run = arguments["run"]
    return hashlib.sha256(f"{run.place}|{arguments['stage']}|{arguments['key']}".encode()).hexdigest()


def _task_run_name() -> str:
    from prefect.runtime import task_run

    arguments = task_run.get_parameters()
    iteration, shard = arguments["iteration"], arguments["shard"]
    place = "setup" if iteration is None else f"{iteration:06d}"
    return f"{arguments['run'].name}/{place}/{arguments['stage']}" + (f".{shard}" if shard else "")


def _worth_a_retry(task: Any, task_run: Any, state: Any) -> bool:
    """Only what may pass by itself: a disk that is full for a moment, generation servers that don't answer, a rank or
    worker that is gone and starts anew.

    All else fails the same way again, or was waited for already.
    """
    try:
        state.result()
    except (*AWAY, NobodyOffersError):
        return False
    except (StoreUnreachableError, TrackingError, RankLostError, ServerLostError, WorkerLostError):
        return True
    except BaseException:
        return False
    return False
