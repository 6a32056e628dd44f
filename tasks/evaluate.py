"""`evaluate`: held-out accuracy of a policy."""

import pyarrow as pa

from grpo_lib.evaluation import evaluate_mode, evaluation_summary
from grpo_lib.generation.agents import make_agent
from grpo_lib.placement.engines import SAMPLING, sampling_of
from grpo_lib.problems import get_problem
from grpo_lib.rewards.judges import REWARD_SETTINGS, run_reward
from grpo_lib.seeds import derive_seed
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from tasks.base import Stage, stage_task
from tasks.dataset import split

EVALUATE = StageSpec(
    name="evaluate",
    version=3,
    reads=(
        "evaluation.prompts",
        "evaluation.samples",
        "evaluation.greedy",
        "evaluation.pass_k",
        *SAMPLING,
        "rollout.agent",
        "rollout.max_batch_rows",
        "model.dtype",
        *REWARD_SETTINGS,
        "data",
        "seed",
    ),
)


@stage_task(EVALUATE, role="rollout")
def evaluate(stage: Stage, dataset: ArtifactRef, policy: ArtifactRef) -> ArtifactRef:
    """Greedy and sampled responses to held-out prompts, judged. The same seeds each time: a paired comparison."""
    config, settings = stage.config, stage.config.evaluation
    heldout = split(stage.run.stages, dataset, "heldout").slice(0, settings.prompts)
    whole = stage.run.at(stage.name, stage.iteration, stage.shard).config  # how functions run is in no key
    reward = run_reward(get_problem(config.data.problem), whole, stage.external)
    workers = stage.workers(policy)
    modes = [("greedy", 1)] if settings.greedy else []
    modes += [("sampled", settings.samples)] if settings.samples else []
    tables = []
    with workers.engine_at(policy) as engine:
        for mode, samples in modes:
            tables.append(
                evaluate_mode(
                    engine,
                    heldout,
                    workers.tokenizer,
                    reward,
                    mode=mode,
                    samples=samples,
                    sampling=sampling_of(config, greedy=mode == "greedy"),
                    seed=derive_seed(config.seed, "evaluate"),
                    agent=make_agent(config.rollout.agent, workers.tokenizer),
                    on_progress=stage.advanced,
                )
            )
    table = pa.concat_tables(tables)
    tokens = sum(len(each.column("response_ids").combine_chunks().flatten()) for each in tables)
    summary = evaluation_summary(table, settings.pass_k) | {"policy_version": stage.summary(policy)["policy_version"]}
    return stage.commit(table, tokens=tokens, summary=summary)
