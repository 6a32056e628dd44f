"""`dataset`: all prompts of the run, both splits, tokenised; once, before the first iteration."""

from functools import lru_cache

import pyarrow as pa

from grpo_lib.data.prompts import build_dataset, split_of
from grpo_lib.models import run_tokenizer
from grpo_lib.problems import get_problem
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef, StageStore
from tasks.base import Stage, stage_task

DATASET = StageSpec(
    name="dataset",
    version=2,
    reads=(
        "data",
        "model.path",
        "model.prompt_format",
        "model.system_prompt",
        "rollout.max_prompt_tokens",
        "rollout.long_prompts",
        "seed",
    ),
)


@stage_task(DATASET)
def dataset(stage: Stage) -> ArtifactRef:
    """Builds, renders, tokenises and checks the prompts."""
    problem = get_problem(stage.config.data.problem)
    table, long = build_dataset(problem, stage.config, run_tokenizer(stage.config.model.path, problem))
    return stage.commit(table, summary=dict(long))


@lru_cache(maxsize=4)
def split(stages: StageStore, dataset: ArtifactRef, name: str) -> pa.Table:
    """The rows of one split, verified and filtered once a process."""
    return split_of(stages.table(dataset), name)
