"""The training run: every stage of every iteration is a task that commits one dataset."""

import sys
from dataclasses import dataclass
from typing import Any

from prefect import Flow, flow
from prefect.client.schemas.objects import FlowRun
from prefect.task_runners import ThreadPoolTaskRunner

from flows.report import RunReport, report
from grpo_lib.config import RunConfig
from grpo_lib.generation.agents import agent_digests
from grpo_lib.placement.devices import use_threads
from grpo_lib.placement.local import end_processes
from grpo_lib.preflight import check_surroundings, data_digests, model_digests
from grpo_lib.progress import progress
from grpo_lib.recipe import full_kl, plugin_digests, wanted
from grpo_lib.run import Run, open_run
from grpo_lib.storage.stages import ArtifactRef
from grpo_lib.tracking.mlflow import tracker_for, tracking_uri
from tasks.advantage import advantage
from tasks.base import StageFuture
from tasks.dataset import dataset
from tasks.evaluate import evaluate
from tasks.filter import filter_rows
from tasks.logprobs import old_logprobs, ref_logprobs, values
from tasks.policy import pretrained, warm_start
from tasks.prompts import prompts
from tasks.publish import publish
from tasks.reference import reference, reference_model
from tasks.reward import greedy_reward, reward
from tasks.rollout import greedy_rollout, rollout
from tasks.update import checkpoint, update

Publications = list[StageFuture]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What an iteration learns from."""

    prompts: list[ArtifactRef]
    rollouts: list[ArtifactRef]
    rewards: list[StageFuture]
    selection: ArtifactRef | None
    """What the filters left of them."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What an iteration leaves to the next."""

    policy: ArtifactRef
    advantages: ArtifactRef | None = None
    batch: Batch | None = None
    reference: ArtifactRef | None = None
    """Of the KL; None: the policy that the run starts from."""


def flow_run_name() -> str:
    from prefect.runtime import flow_run

    return f"train {flow_run.get_parameters()['config'].run_name}"


def mark_failed(flow: Flow[..., Any], flow_run: FlowRun, state: Any) -> None:
    """Closes the MLflow run as failed; resuming opens it again. A run that never got as far has none."""
    if "mlflow" in sys.modules:
        tracker_for(Run(RunConfig.model_validate(flow_run.parameters["config"]))).finish("FAILED")


@flow(
    name="train",
    flow_run_name=flow_run_name,
    task_runner=ThreadPoolTaskRunner(max_workers=16),  # type: ignore[arg-type]
    on_failure=[mark_failed],
    on_crashed=[mark_failed],
    on_cancellation=[mark_failed],
)
def train(config: RunConfig) -> RunReport:
    """Trains a policy. A stage that is committed already is not run again: run the flow again to resume."""
    try:
        return run_training(config)
    finally:
        end_processes()


def run_training(config: RunConfig) -> RunReport:
    """Iterations from the first policy to the last."""
    check_surroundings(config)
    use_threads(config.placement.threads)
    run = Run(config)
    data = dataset(run, None, external=data_digests(config))
    open_run(config)
    initial = first_policy(run, data)
    begins = first_reference(run, initial)
    published = [announce(run, None, [each for each in (data, initial, begins) if each is not None])]
    tools = agent_digests(config.rollout.agent)
    before = evaluate(run, 0, data, initial, external=tools)
    published.append(announce(run, 0, [before]))
    state = State(policy=initial, reference=begins)
    for k in range(config.iterations):
        progress().stage_advanced("iteration", None, k, config.iterations, 0)
        state = iterate(run, k, data, initial, state, published)
        done = k + 1
        last, due = done == config.iterations, []
        if last or done % config.checkpoint.every == 0:
            due.append(checkpoint(run, k, state.policy))
        if last or done % config.evaluation.every == 0:
            due.append(evaluate(run, done, data, state.policy, external=tools))
        if due:
            published.append(announce(run, done, due))
    progress().stage_advanced("iteration", None, config.iterations, config.iterations, 0)
    results(published)
    return report(run)


def first_policy(run: Run, data: ArtifactRef) -> ArtifactRef:
    """The policy that the run starts from: made on the spot, or pretrained."""
    if run.config.model.path is None:
        return warm_start(run, None, data)
    return pretrained(run, None, external=model_digests(run.config.model.path))


def first_reference(run: Run, initial: ArtifactRef) -> ArtifactRef | None:
    """Another model than the policy that the run starts from, if one is configured."""
    if run.config.reference.path is None:
        return None
    return reference_model(run, None, initial, external=model_digests(run.config.reference.path))


def iterate(run: Run, k: int, data: ArtifactRef, initial: ArtifactRef, before: State, published: Publications) -> State:
    """One iteration: policy k to policy k+1."""
    config, policy = run.config, before.policy
    batch = rollouts_and_rewards(run, k, data, policy, before.batch)
    asked, rollouts, selection = batch.prompts, batch.rollouts, batch.selection

    # Side by side: none needs the others.
    needs = wanted(config.algorithm)
    kl = config.algorithm.kl
    squares = {"sum_squared_probs": "asked"} if "sum_squared_probs" in needs else {}
    futures: dict[str, StageFuture] = {}
    if config.algorithm.old_logprobs == "decoupled":
        futures["old"] = old_logprobs.submit(run, k, asked, rollouts, policy, selection, external=squares)
    if kl.coef > 0 and not full_kl(config.algorithm):
        futures["ref"] = ref_logprobs.submit(run, k, asked, rollouts, initial, before.reference, selection)
    if "values" in needs:
        futures["values"] = values.submit(run, k, asked, rollouts, policy, selection)
    greedy = []
    if "greedy_rewards" in needs:
        greedy.append(greedy_rollout(run, k, asked, policy, external=agent_digests(config.rollout.agent)))
        greedy.append(greedy_reward(run, k, asked, greedy[0]))
    scores = results(batch.rewards)
    made = {name: future.result() for name, future in futures.items()}
    old, ref, v = (made.get(name) for name in ("old", "ref", "values"))

    own = plugin_digests(config.algorithm, "advantage", "grouping", "metrics", "kl.estimator")
    previous = before.advantages if kl.controller == "adaptive" else None
    baseline = greedy[1] if greedy else None
    advantages = advantage(run, k, asked, rollouts, scores, old, ref, v, baseline, selection, previous, external=own)
    own = plugin_digests(config.algorithm, "loss", "aggregation", "kl.estimator")
    exact = before.reference if kl.coef > 0 and full_kl(config.algorithm) else None
    updated = update(run, k, policy, asked, rollouts, old, ref, v, advantages, exact, external=own)
    followed = before.reference
    if config.reference.every is not None and (k + 1) % config.reference.every == 0:
        followed = reference(run, k, updated, initial, before.reference)

    moved = followed if followed is not before.reference else None
    stages = [*asked, *rollouts, *scores, *greedy, selection, old, ref, v, advantages, updated, moved]
    published.append(announce(run, k, [each for each in stages if each is not None]))
    return State(policy=updated, advantages=advantages, batch=batch, reference=followed)


def rollouts_and_rewards(run: Run, k: int, data: ArtifactRef, policy: ArtifactRef, before: Batch | None) -> Batch:
    """Prompts, responses and their rewards; with filters so many batches of prompts that enough are left."""
    config, tools = run.config, agent_digests(run.config.rollout.agent)
    asked: list[ArtifactRef] = []
    rollouts: list[ArtifactRef] = []
    rewards: list[StageFuture] = []
    partial = config.rollout.partial is not None
    selected = None if before is None else before.selection
    earlier = before if partial else None  # what goes on of it
    going = (None, None) if earlier is None else (earlier.prompts, earlier.rollouts)
    while True:
        drawn = len(asked)
        asked.append(prompts(run, k, data, selected, *going, shard=drawn))
        for shard in range(drawn * config.rollout.shards, (drawn + 1) * config.rollout.shards):
            rollouts.append(rollout(run, k, asked, policy, going[1], shard=shard, external=tools))
            rewards.append(reward.submit(run, k, asked, rollouts[-1], shard=shard))  # while the next is generated
        if not config.algorithm.filters and not partial:
            return Batch(prompts=asked, rollouts=rollouts, rewards=rewards, selection=None)
        own = plugin_digests(config.algorithm, "filters", "grouping")
        selection = filter_rows(run, k, asked, rollouts, results(rewards), selected, shard=drawn, external=own)
        if run.stages.manifest(selection).summary["full"]:
            return Batch(prompts=asked, rollouts=rollouts, rewards=rewards, selection=selection)


def announce(run: Run, iteration: int | None, stages: list[ArtifactRef]) -> StageFuture:
    """Tells MLflow; to which MLflow is part of the key, so that a new one is told everything."""
    return publish.submit(run, iteration, stages, external={"tracking": tracking_uri(run.config)})


def results(futures: Publications) -> list[ArtifactRef]:
    """Waits for all, then raises the first failure if there is one."""
    for future in futures:
        future.wait()
    return [future.result() for future in futures]
