"""`rollout`: responses of the policy to a shard of the iteration's prompts."""

from grpo_lib.generation.base import Sampling
from grpo_lib.generation.rollouts import check_parity, generate_rollouts, rollout_summary
from grpo_lib.seeds import derive_seed
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from tasks.base import Stage, stage_task

ROLLOUT = StageSpec(
    name="rollout",
    version=1,
    reads=(
        "rollout.engine",
        "rollout.samples",
        "rollout.shards",
        "rollout.temperature",
        "rollout.max_new_tokens",
        "rollout.max_batch_rows",
        "model.dtype",
        "parity.rows",
        "parity_bound",
        "seed",
    ),
)


@stage_task(ROLLOUT)
def rollout(stage: Stage, prompts: ArtifactRef, policy: ArtifactRef) -> ArtifactRef:
    """Generates this shard's groups and proves on some rows that the engine is the policy."""
    settings = stage.config.rollout
    table = stage.table(prompts)
    first, last = (table.num_rows * each // settings.shards for each in (stage.shard, stage.shard + 1))
    workers = stage.workers(policy)
    with workers.engine_at(policy) as engine:
        rollouts = generate_rollouts(
            engine,
            table.slice(first, last - first),
            workers.tokenizer,
            first_prompt=first,
            samples=settings.samples,
            sampling=Sampling(temperature=settings.temperature, max_new_tokens=settings.max_new_tokens),
            seed=derive_seed(stage.config.seed, "rollout", stage.k),
            iteration=stage.k,
            policy_version=stage.summary(policy)["policy_version"],
            on_progress=stage.advanced,
        )
        with workers.trainer_at(policy) as trainer:
            parity = check_parity(
                trainer,
                table,
                rollouts,
                engine=engine,
                rows=stage.config.parity.rows,
                max_mean=stage.config.parity_bound,
                temperature=settings.temperature,
            )
    tokens = len(rollouts.column("response_ids").combine_chunks().flatten())
    return stage.commit(rollouts, tokens=tokens, summary=rollout_summary(rollouts) | parity)
