"""`rollout`: responses of the policy to a shard of the iteration's prompts; `greedy_rollout`: its most likely ones."""

from grpo_lib.generation.parity import check_parity
from grpo_lib.generation.rollouts import generate_rollouts, rollout_summary
from grpo_lib.placement.engines import SAMPLING, sampling_of
from grpo_lib.seeds import derive_seed
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from tasks.base import Stage, stage_task

GREEDY = StageSpec(
    name="greedy_rollout",
    version=1,
    reads=(*SAMPLING, "rollout.max_batch_rows", "model.dtype"),
)
ROLLOUT = StageSpec(
    name="rollout",
    version=1,
    reads=(
        *SAMPLING,
        "rollout.samples",
        "rollout.shards",
        "rollout.max_batch_rows",
        "model.dtype",
        "parity.rows",
        "parity_bound",
        "seed",
    ),
)


@stage_task(ROLLOUT)
def rollout(stage: Stage, prompts: list[ArtifactRef], policy: ArtifactRef) -> ArtifactRef:
    """Generates this shard's groups, of the last batch of prompts; some rows prove that the engine is the policy."""
    settings = stage.config.rollout
    table, batch = stage.table(prompts), prompts[-1].rows
    earlier, shard = table.num_rows - batch, stage.shard % settings.shards
    first, last = (earlier + batch * each // settings.shards for each in (shard, shard + 1))
    workers, sampling = stage.workers(policy), sampling_of(stage.config)
    with workers.engine_at(policy) as engine:
        rollouts = generate_rollouts(
            engine,
            table.slice(first, last - first),
            workers.tokenizer,
            first_prompt=first,
            samples=settings.samples,
            sampling=sampling,
            seed=derive_seed(stage.config.seed, "rollout", stage.k),
            iteration=stage.k,
            policy_version=stage.summary(policy)["policy_version"],
            on_progress=stage.advanced,
        )
        with workers.trainer_at(policy) as trainer:
            parity = check_parity(
                lambda few: trainer.score_few(few, sampling),
                lambda: trainer.digests()[0],
                table,
                rollouts,
                engine=engine,
                rows=stage.config.parity.rows,
                max_mean=stage.config.parity_bound,
                sampling=sampling,
            )
    tokens = len(rollouts.column("response_ids").combine_chunks().flatten())
    return stage.commit(rollouts, tokens=tokens, summary=rollout_summary(rollouts) | parity)


@stage_task(GREEDY)
def greedy_rollout(stage: Stage, prompts: list[ArtifactRef], policy: ArtifactRef) -> ArtifactRef:
    """One response of the most likely tokens to each prompt of the iteration: a baseline, not trained on."""
    workers = stage.workers(policy)
    with workers.engine_at(policy) as engine:
        rollouts = generate_rollouts(
            engine,
            stage.table(prompts),
            workers.tokenizer,
            first_prompt=0,
            samples=1,
            sampling=sampling_of(stage.config, greedy=True),
            seed=0,
            iteration=stage.k,
            policy_version=stage.summary(policy)["policy_version"],
            on_progress=stage.advanced,
        )
    tokens = len(rollouts.column("response_ids").combine_chunks().flatten())
    return stage.commit(rollouts, tokens=tokens, summary=rollout_summary(rollouts))
