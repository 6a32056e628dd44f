"""`filter`: which rows of an iteration take part, and whether more prompts have to be drawn."""

from grpo_lib.algorithms.filters import FILTERS
from grpo_lib.algorithms.groupings import GROUPINGS
from grpo_lib.data.iteration import Iteration
from grpo_lib.data.selection import Filter, selection_table, what_was_seen
from grpo_lib.errors import AlgorithmError
from grpo_lib.seeds import derive_seed
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from tasks.base import Stage, stage_task

FILTER = StageSpec(
    name="filter",
    version=2,
    reads=(
        "algorithm.filters",
        "algorithm.grouping",
        "rollout.prompts",
        "rollout.partial",
        "rollout.max_gen_batches",
        "seed",
    ),
)


@stage_task(FILTER)
def filter_rows(
    stage: Stage,
    prompts: list[ArtifactRef],
    rollouts: list[ArtifactRef],
    rewards: list[ArtifactRef],
    previous: ArtifactRef | None,
) -> ArtifactRef:
    """Of all batches of the iteration so far; ``stage.shard`` counts them. ``previous``: of the iteration before."""
    config, batches = stage.config, stage.shard + 1
    partial = config.rollout.partial is not None
    data = Iteration(prompts=stage.table(prompts), rollouts=stage.table(rollouts), rewards=stage.table(rewards))
    filters = [
        Filter(
            name=each.name,
            function=FILTERS[each.name].bind(each.options, "algorithm.filters"),
            resamples=bool(FILTERS[each.name].traits.get("resamples")),
        )
        for each in config.algorithm.filters
    ]
    table, summary = selection_table(
        data,
        filters,
        GROUPINGS[config.algorithm.grouping],
        prompts_wanted=None if partial else config.rollout.prompts,
        seed=derive_seed(config.seed, "filter", stage.k),
    )
    if partial and not summary["full"]:
        raise AlgorithmError(
            f"iteration {stage.k}: no prompt has all its responses finished ({what_was_seen(data, table)}); raise "
            "rollout.partial, or lower rollout.max_new_tokens"
        )
    if not summary["full"] and batches == config.rollout.max_gen_batches:
        raise AlgorithmError(
            f"iteration {stage.k}: after {batches} batches of {config.rollout.prompts} prompts only "
            f"{summary['prompts_kept']:.0f} of {config.rollout.prompts} wanted are left "
            f"({what_was_seen(data, table)}). Raise rollout.max_gen_batches or rollout.samples, take "
            "prompts of another difficulty, or remove the filter"
        )
    carried = sum(int(stage.summary(each).get("carried", 0)) for each in prompts)
    # No selection before: the first iteration, or the first with filters in a branch.
    before = stage.k * config.rollout.prompts if previous is None else stage.summary(previous)["next_prompt"]
    following = before + data.prompts.num_rows - carried
    return stage.commit(table, summary=summary | {"batches": batches, "next_prompt": following})
