"""What a run would do, without doing it: the flow's own code calls the stages, and a plan notes the calls.

    plan = Plan(run, iteration=7)
    with planned_by(plan.called):
        ...                       # the flow
    for call in plan.calls: ...

Nothing runs and nothing is written. A stage that is not committed stands in the plan with what the run, or its base,
has at the same place, so that the plan goes on as if it came out the same; what follows from it is uncertain.
"""

import threading
from dataclasses import dataclass

from grpo_lib.config_branch import DRAWN
from grpo_lib.errors import NotFoundError
from grpo_lib.run import Run
from grpo_lib.storage.explain import Difference, key_differences
from grpo_lib.storage.keys import stage_key
from grpo_lib.storage.manifests import ArtifactRef, Manifest
from tasks.base import Input, StageTask, artifacts

UNKNOWN = "0" * 64


class PlanEndError(Exception):
    """The flow has come further than the plan goes."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A stage as the flow calls it."""

    task: StageTask
    run: Run
    iteration: int | None
    inputs: tuple[Input, ...]
    shard: int
    external: dict[str, str]
    outside: dict[str, str]
    """What else its key depends on: ``external`` and, of a branch's first stage, the branch."""
    key: str
    committed: Manifest | None
    """With exactly this key; None: the stage would run."""
    before: Manifest | None
    """What the run or its base has at this place, whatever its key: the newest."""
    uncertain: tuple[str, ...]
    """Stages among the inputs that would run, or follow from such: their content is assumed to stay."""
    damage: str | None = None
    """What is wrong with what is committed at this place."""

    @property
    def stage(self) -> str:
        return self.task.spec.name

    @property
    def differences(self) -> list[Difference]:
        """Why the key is not that of ``before``."""
        if self.before is None:
            return []
        config = self.run.at(self.stage, self.iteration, self.shard).config
        found = key_differences(self.before, self.task.spec, config, artifacts(self.inputs), self.outside)
        if not found and self.before.key != self.key:
            found = [Difference(component="key", name=self.stage, old=self.before.key, new=self.key)]
        return found


class Plan:
    """The calls of one iteration of a run, and of those before it.

    Args:
        iteration: the last that is planned; None: only what comes before the first.
        anew: the first stage of a branch runs in any case; False: only if something differs.
    """

    def __init__(self, run: Run, iteration: int | None, *, anew: bool = True) -> None:
        self.calls: list[Call] = []
        self._iteration, self._anew = iteration, anew
        self._lock = threading.Lock()
        self._pending: set[str] = set()  # manifests that stand in for what would run, or may come out differently
        self._known: dict[tuple[str, int | None, str], Manifest] = {}
        self._newest: dict[tuple[str, int | None, int], Manifest] = {}
        self._damaged: dict[tuple[str, int | None, str], str] = {}
        for owner in reversed(run.lineage):
            found, damaged = owner.stages.survey()
            for each in found:
                self._known[each.stage, each.iteration, each.key] = each
                self._newest[each.stage, each.iteration, each.shard] = each
            self._damaged |= damaged

    def called(
        self,
        task: StageTask,
        run: Run,
        iteration: int | None,
        inputs: tuple[Input, ...],
        shard: int,
        external: dict[str, str],
    ) -> ArtifactRef:
        stage, last = task.spec.name, self._iteration
        ahead = iteration is not None and (last is None or iteration > last)
        if ahead and stage not in (*DRAWN, "evaluate", "publish"):
            raise PlanEndError
        with self._lock:
            return self._note(task, run, iteration, inputs, shard, external)

    def _note(
        self,
        task: StageTask,
        run: Run,
        iteration: int | None,
        inputs: tuple[Input, ...],
        shard: int,
        external: dict[str, str],
    ) -> ArtifactRef:
        stage, refs = task.spec.name, artifacts(inputs)
        outside, key = run.external(stage, iteration, external), run.key(task.spec, refs, iteration, shard, external)
        if not self._anew and not run.shares(stage, iteration, shard):
            outside, key = external, stage_key(task.spec, run.config, refs, iteration, shard, external)
        place = (stage, iteration, key)
        committed = self._known.get(place)
        if committed is None and place not in self._damaged:
            committed = run.stages.peek(task.spec, key, iteration, shard)
        before = self._newest.get((stage, iteration, shard))
        uncertain = tuple(dict.fromkeys(ref.stage for ref in refs if ref.manifest in self._pending))
        self.calls.append(
            Call(
                task=task,
                run=run,
                iteration=iteration,
                inputs=inputs,
                shard=shard,
                external=external,
                outside=outside,
                key=key,
                committed=committed,
                before=before,
                uncertain=uncertain,
                damage=self._damaged.get(place),
            )
        )
        standing = committed or before
        ref = standing.to_ref(reused=True) if standing is not None else _unknown(run, stage, iteration, shard, key)
        if committed is None or uncertain:
            self._pending.add(ref.manifest)
        return ref


def _unknown(run: Run, stage: str, iteration: int | None, shard: int, key: str) -> ArtifactRef:
    """Of something that was never made."""
    return ArtifactRef(
        stage=stage, run=run.name, iteration=iteration, shard=shard, key=key, manifest=f"planned/{stage}/{key}",
        digest=UNKNOWN, rows=0, tokens=0, seconds=0.0,
    )  # fmt: skip


def is_planned(error: NotFoundError) -> bool:
    """Whether somebody wanted to read what a plan only assumes."""
    return "planned/" in str(error)
