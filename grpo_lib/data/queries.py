"""SQL over the committed datasets of an iteration (DuckDB on Arrow)."""

from typing import Any

import pyarrow as pa

from grpo_lib.data.schemas import ADVANTAGES, REWARDS
from grpo_lib.errors import ConfigError, NotFoundError
from grpo_lib.storage.manifests import latest
from grpo_lib.storage.stages import StageStore

SCHEMAS = {"reward": REWARDS, "advantage": ADVANTAGES}
VIEW = """
    select r.rollout_id, p.prompt, r.text, p.reference, p.data_source, w.value,
           w.components['correct'] >= 1 as correct, w.reason,
           list_sum(a.advantages) / nullif(list_sum(a.response_mask), 0) as advantage,
           len(r.response_ids) as tokens, -list_sum(r.rollout_logprobs) / list_sum(r.response_mask) as surprise,
           r.finish_reason, r.policy_version
    from rollouts r
    join prompts p on p.prompt_row = r.prompt_row
    left join rewards w using (rollout_id)
    left join advantages a using (rollout_id)
"""


def select_rollouts(stages: StageStore, iteration: int, *, where: str | None, limit: int) -> list[dict[str, Any]]:
    """Rollouts of an iteration with prompt, reward and advantage, those that fulfil a SQL condition.

    Raises:
        NotFoundError: the iteration has no rollouts.
        ConfigError: the condition is no SQL.
    """
    import duckdb

    condition = f"where {where}" if where else ""
    try:
        answer = _connected(stages, iteration).execute(f"select * from ({VIEW}) {condition} limit {int(limit)}")
        return answer.to_arrow_table().to_pylist()
    except duckdb.Error as error:
        raise ConfigError(f"--where {where!r}: {str(error).splitlines()[0]}; columns are listed in --help") from None


def telling_rollouts(stages: StageStore, iteration: int) -> dict[str, dict[str, Any]]:
    """The best, the median and the worst rollout of an iteration by reward, with columns as ``select_rollouts``.

    Raises:
        NotFoundError: the iteration has no rollouts.
    """
    place = "row_number() over (order by value desc, rollout_id) as place, count(*) over () as n"
    numbered = f"select *, {place} from ({VIEW}) where value is not null"
    answer = _connected(stages, iteration).execute(f"from ({numbered}) where place in (1, (n + 1) // 2, n)")
    rows = {row["place"]: row for row in answer.to_arrow_table().to_pylist()}
    if not rows:
        return {}
    n = rows[1]["n"]
    return {"best": rows[1], "median": rows[(n + 1) // 2], "worst": rows[n]}


def _connected(stages: StageStore, iteration: int) -> Any:
    """DuckDB with the tables of ``VIEW``."""
    import duckdb

    tables = {stage: _table(stages, iteration, stage) for stage in ("prompts", "rollout", "reward", "advantage")}
    prompts, made = tables["prompts"], tables["rollout"]
    if prompts is None or made is None:
        raise NotFoundError(f"run {stages.run!r} has no rollouts of iteration {iteration}; `grpo show {stages.run}`")
    connection = duckdb.connect(config={"enable_external_access": "false"})
    rows = pa.array(range(prompts.num_rows), type=pa.int32())
    connection.register("prompts", prompts.append_column("prompt_row", rows))
    connection.register("rollouts", made)
    for name, stage in (("rewards", "reward"), ("advantages", "advantage")):
        table = tables[stage]
        connection.register(name, table if table is not None else SCHEMAS[stage].empty_table())
    return connection


def _table(stages: StageStore, iteration: int, stage: str) -> pa.Table | None:
    found = latest(stages.manifests(iteration=iteration), stage)
    return stages.table([each.to_ref(reused=True) for each in found]) if found else None
