"""Another reward function over the stored rollouts of a run: what would have been rewarded otherwise."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from grpo_lib.data.schemas import REWARDS
from grpo_lib.errors import NotFoundError
from grpo_lib.rewards.judges import Reward
from grpo_lib.rewards.scoring import reward_table
from grpo_lib.run import Run
from grpo_lib.storage.manifests import Manifest, latest

RESCORED = pa.schema(
    {
        "iteration": pa.int32(),
        "rollout_id": pa.string(),
        "group_id": pa.int64(),
        "data_source": pa.string(),
        "policy_version": pa.int32(),
        "judged": pa.bool_(),  # by a committed reward stage
        "old_value": pa.float64(),
        "new_value": pa.float64(),
        "old_reason": pa.string(),  # why there is no old value
        "new_reason": pa.string(),
        "old_right": pa.bool_(),  # component `correct`, or the value where there is none, is at least 1
        "new_right": pa.bool_(),
        "components": REWARDS.field("components").type,  # of the new reward
    }
)


@dataclass(frozen=True, kw_only=True)
class StoredRollouts:
    """What a run has of one iteration."""

    iteration: int
    prompts: list[Manifest]
    rollouts: list[Manifest]
    rewards: list[Manifest | None]
    """Beside each of the rollouts; None: not judged yet."""

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.rollouts)


def stored_rollouts(run: Run, first: int = 0, last: int | None = None) -> list[StoredRollouts]:
    """By iteration, from ``first`` to ``last``.

    Raises:
        NotFoundError: there are none; the message names the iterations that there are.
    """
    manifests = run.manifests()
    made, asked = latest(manifests, "rollout"), latest(manifests, "prompts")
    judged = [each for each in manifests if each.stage == "reward"]
    there = sorted({each.iteration for each in made if each.iteration is not None})
    chosen = [k for k in there if first <= k and (last is None or k <= last)]
    if not chosen:
        found = f"of iterations {there[0]} to {there[-1]}" if there else "at all yet"
        asked_for = f"from iteration {first} on" if last is None else f"of iterations {first} to {last}"
        raise NotFoundError(f"run {run.name!r} has no rollouts {asked_for}; it has some {found}")
    return [
        StoredRollouts(
            iteration=k,
            prompts=[each for each in asked if each.iteration == k],
            rollouts=[each for each in made if each.iteration == k],
            rewards=[_reward_of(each, judged) for each in made if each.iteration == k],
        )
        for k in chosen
    ]


def rescore(
    run: Run,
    iterations: Sequence[StoredRollouts],
    reward: Reward,
    on_progress: Callable[[int], None] | None = None,
) -> pa.Table:
    """Scores every rollout with ``reward``, beside the reward that it had: the columns of ``RESCORED``.

    The run is read and nothing else. ``on_progress`` is called with the number of rollouts done.
    """
    done, tables = 0, []

    def advanced(rows: int) -> None:
        if on_progress is not None:
            on_progress(done + rows)

    for each in iterations:
        prompts = run.stages.table([ref.to_ref(reused=True) for ref in each.prompts])
        for rollouts, before in zip(each.rollouts, each.rewards, strict=True):
            made = run.stages.table(rollouts.to_ref(reused=True))
            new, _ = reward_table(prompts, made, reward, advanced)
            old = None if before is None else run.stages.table(before.to_ref(reused=True))
            tables.append(_beside(each.iteration, prompts, made, old, new))
            done += made.num_rows
    return pa.concat_tables(tables)


def _reward_of(rollouts: Manifest, judged: Sequence[Manifest]) -> Manifest | None:
    """The newest reward that was made from exactly these rollouts."""
    found = [each for each in judged if any(ref.digest == rollouts.digest for ref in each.inputs)]
    return found[-1] if found else None


def _beside(iteration: int, prompts: pa.Table, rollouts: pa.Table, old: pa.Table | None, new: pa.Table) -> pa.Table:
    count = rollouts.num_rows
    before = old if old is not None else pa.table(
        {name: pa.nulls(count, kind) for name, kind in zip(REWARDS.names, REWARDS.types, strict=True)}
    )  # fmt: skip
    columns = {
        "iteration": pa.repeat(pa.scalar(iteration, pa.int32()), count),
        "rollout_id": rollouts.column("rollout_id"),
        "group_id": rollouts.column("group_id"),
        "data_source": prompts.column("data_source").take(rollouts.column("prompt_row")),
        "policy_version": rollouts.column("policy_version"),
        "judged": pa.repeat(old is not None, count),
        "old_value": before.column("value"),
        "new_value": new.column("value"),
        "old_reason": before.column("reason"),
        "new_reason": new.column("reason"),
        "old_right": _right(before),
        "new_right": _right(new),
        "components": new.column("components"),
    }
    return pa.table(columns, schema=RESCORED)


def _right(rewards: pa.Table) -> pa.ChunkedArray:
    """Whether a reward says that the answer is right; null where there is no reward."""
    correct = pc.map_lookup(rewards.column("components"), "correct", "first")
    value = rewards.column("value")
    return pc.if_else(pc.is_null(value), None, pc.greater_equal(pc.coalesce(correct, value), 1.0))


def parts(table: pa.Table) -> Iterator[tuple[str, str, pa.Table]]:
    """Kind, name and rows of what is reported: all, each iteration, each data source."""
    yield "all", "all", table
    for kind in ("iteration", "data_source"):
        column = table.column(kind)
        names = column.unique().sort()
        for name in names:
            yield kind, str(name.as_py()), table.filter(pc.equal(column, name))
