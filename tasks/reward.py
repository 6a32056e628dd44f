"""`reward`: scores of a shard's rollouts; `greedy_reward`: of the greedy ones."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pyarrow as pa

from grpo_lib.errors import RewardError
from grpo_lib.problems import get_problem
from grpo_lib.rewards.judges import REWARD_SETTINGS, run_reward
from grpo_lib.rewards.runner import check_failures
from grpo_lib.rewards.scoring import judged_before, reward_summary, reward_table, samples_of
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from grpo_lib.types import Problem
from tasks.base import Stage, stage_task

READS = (*REWARD_SETTINGS, "data")
REWARD = StageSpec(name="reward", version=2, reads=READS)
GREEDY = StageSpec(name="greedy_reward", version=2, reads=READS)


@stage_task(REWARD, role="score")
def reward(stage: Stage, prompts: list[ArtifactRef], rollouts: ArtifactRef) -> ArtifactRef:
    """Judges every response; what can't be judged is null with a reason."""
    return _judge(stage, prompts, rollouts)


@stage_task(GREEDY, role="score")
def greedy_reward(stage: Stage, prompts: list[ArtifactRef], rollouts: ArtifactRef) -> ArtifactRef:
    """Judges the greedy response to each prompt."""
    return _judge(stage, prompts, rollouts)


def _judge(stage: Stage, prompts: list[ArtifactRef], rollouts: ArtifactRef) -> ArtifactRef:
    config = stage.run.at(stage.name, stage.iteration, stage.shard).config  # how functions run is in no key
    problem = get_problem(stage.config.data.problem)
    reward = run_reward(problem, config, stage.external)
    asked, made = stage.table(prompts), stage.table(rollouts)
    table, scores = reward_table(
        asked,
        made,
        reward,
        lambda done: stage.advanced(done, made.num_rows),
        known=judged_before(_earlier(stage)) if config.reward.functions and config.reward.runner.cache else None,
        decode=lambda ids: _tokenizer(config.model.path, problem).decode(ids, skip_special_tokens=True),
    )
    try:
        check_failures(scores, stage.config.reward.max_failed, samples_of(asked, made))
    except RewardError:
        if "verdicts" in table.column_names:
            stage.keep(table.select(["verdicts"]))
        raise
    return stage.commit(table, summary=reward_summary(scores))


@lru_cache(maxsize=2)
def _tokenizer(path: str | None, problem: Problem) -> Any:
    from grpo_lib.models import run_tokenizer  # takes seconds, and only scores of steps need it

    return run_tokenizer(path, problem)


def _earlier(stage: Stage) -> Iterator[pa.Table]:
    """What the run, and those that it branched off, judged in this iteration before, with whatever settings."""
    for run in stage.run.lineage:
        yield from run.stages.kept(stage.name, stage.iteration)
        for manifest in run.stages.manifests(stage.iteration):
            if manifest.stage == stage.name:
                yield run.stages.table(manifest.to_ref(reused=True))
