"""`rollout`: responses of the policy to a shard of the iteration's prompts; `greedy_rollout`: its most likely ones."""

from grpo_lib.generation.agents import make_agent
from grpo_lib.generation.base import Budget
from grpo_lib.generation.parity import check_parity
from grpo_lib.generation.rollouts import generate_rollouts, rollout_summary
from grpo_lib.placement.engines import SAMPLING, sampling_of
from grpo_lib.seeds import derive_seed
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from tasks.base import Stage, stage_task

GREEDY = StageSpec(
    name="greedy_rollout",
    version=2,
    reads=(*SAMPLING, "rollout.agent", "rollout.max_batch_rows", "model.dtype"),
)
ROLLOUT = StageSpec(
    name="rollout",
    version=2,
    reads=(
        *SAMPLING,
        "rollout.agent",
        "rollout.partial",
        "rollout.samples",
        "rollout.shards",
        "rollout.max_batch_rows",
        "model.dtype",
        "parity.rows",
        "parity_bound",
        "seed",
    ),
)


@stage_task(ROLLOUT, role="rollout")
def rollout(
    stage: Stage, prompts: list[ArtifactRef], policy: ArtifactRef, earlier: list[ArtifactRef] | None = None
) -> ArtifactRef:
    """Generates this shard's groups, of the last batch of prompts; some rows prove that the engine is the policy.

    ``earlier``: rollouts of the iteration before, of which some go on.
    """
    settings = stage.config.rollout
    table, batch = stage.table(prompts), prompts[-1].rows
    drawn, shard = table.num_rows - batch, stage.shard % settings.shards
    first, last = (drawn + batch * each // settings.shards for each in (shard, shard + 1))
    workers, sampling, partial = stage.workers(policy), sampling_of(stage.config), settings.partial
    version = stage.summary(policy)["policy_version"]
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
            policy_version=version,
            agent=make_agent(settings.agent, workers.tokenizer),
            budget=None if partial is None else Budget(seconds=partial.seconds, tokens=partial.tokens),
            earlier=stage.table(earlier) if earlier else None,
            on_progress=stage.advanced,
        )
        with workers.scoring_at(policy) as scoring:
            parity = check_parity(
                lambda few: scoring.score_few(few, sampling),
                scoring.digest,
                table,
                rollouts,
                engine=engine,
                rows=stage.config.parity.rows,
                max_mean=stage.config.parity_bound,
                sampling=sampling,
                policy_version=version,
            )
    tokens = len(rollouts.column("response_ids").combine_chunks().flatten())
    return stage.commit(rollouts, tokens=tokens, summary=rollout_summary(rollouts) | parity)


@stage_task(GREEDY, role="rollout")
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
            agent=make_agent(stage.config.rollout.agent, workers.tokenizer),
            on_progress=stage.advanced,
        )
    tokens = len(rollouts.column("response_ids").combine_chunks().flatten())
    return stage.commit(rollouts, tokens=tokens, summary=rollout_summary(rollouts))
