"""The training run: every stage of every iteration is a task that commits one dataset."""

import sys
from dataclasses import dataclass
from typing import Any

from prefect import Flow, flow
from prefect.client.schemas.objects import FlowRun
from prefect.task_runners import ThreadPoolTaskRunner

from flows.batches import Batch, Batches, drop_done, evaluation, hand_over, is_evaluated, results
from flows.fork import go_on_from_base
from flows.live import live_page, show_on_page
from flows.report import RunReport, report
from grpo_lib.config import RunConfig
from grpo_lib.generation.agents import agent_digests
from grpo_lib.mending import mended
from grpo_lib.patience import impatient
from grpo_lib.placement.clusters import attach, stop_clusters
from grpo_lib.placement.devices import use_threads
from grpo_lib.placement.local import end_processes
from grpo_lib.preflight import check_surroundings, data_digests, model_digests
from grpo_lib.progress import progress
from grpo_lib.recipe import extra_stages, plugin_digests
from grpo_lib.rewards.judges import reward_digests
from grpo_lib.run import Run, open_run
from grpo_lib.start import checkpoint_to_start_from
from grpo_lib.storage.lease import held_by_another, holding
from grpo_lib.storage.stages import ArtifactRef
from grpo_lib.tracking.address import tracking_uri
from grpo_lib.tracking.mlflow import tracker_for
from tasks.advantage import advantage
from tasks.dataset import dataset
from tasks.futures import StageFuture
from tasks.logprobs import old_logprobs, ref_logprobs, values
from tasks.policy import inherited, pretrained, warm_start
from tasks.publish import publish, published_elsewhere
from tasks.reference import reference, reference_model
from tasks.reward import greedy_reward
from tasks.rollout import greedy_rollout
from tasks.update import checkpoint, update

Publications = list[StageFuture]


@dataclass(frozen=True, kw_only=True)
class State:
    """What an iteration leaves to the next."""

    policy: ArtifactRef
    advantages: ArtifactRef | None = None
    reference: ArtifactRef | None = None
    """Of the KL; None: the policy that the run starts from."""


def flow_run_name() -> str:
    from prefect.runtime import flow_run

    return f"train {flow_run.get_parameters()['config'].run_name}"


def mark_failed(flow: Flow[..., Any], flow_run: FlowRun, state: Any) -> None:
    """Closes the MLflow run as failed; resuming opens it again. A run that never got as far has none."""
    if "mlflow" not in sys.modules:
        return
    run = Run(RunConfig.model_validate(flow_run.parameters["config"]))
    with impatient():
        if not held_by_another(run):  # this flow was refused, or overtaken
            tracker_for(run).finish("FAILED")


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
    except BaseException as error:
        if not isinstance(error, Exception):  # cancelled or interrupted: what works elsewhere stops too
            stop_clusters()
        raise
    finally:
        end_processes()


def run_training(config: RunConfig) -> RunReport:
    """Iterations from the first policy to the last."""
    check_surroundings(config)
    use_threads(config.placement.threads)
    run = Run(config)
    with holding(run) as lease, mended(run), live_page(run):
        attach(config, lease.epoch)
        data = dataset(run, None, external=data_digests(config))
        open_run(config)
        go_on_from_base(run)
        results(every_stage(run, data))
        return report(run)


def every_stage(run: Run, data: ArtifactRef) -> Publications:
    """From the first policy to the last iteration; returns what still has to be waited for."""
    config = run.config
    initial = first_policy(run, data)
    begins = first_reference(run, initial)
    published = [announce(run, None, [each for each in (data, initial, begins) if each is not None])]
    before = evaluation(run, 0, data, initial)
    published.append(announce(run, 0, [before]))
    state = State(policy=initial, reference=begins)
    batches = Batches(run, data)
    try:
        for k in range(config.iterations):
            progress().stage_advanced("iteration", None, k, config.iterations, 0)
            state = iterate(run, k, batches.take(k, state.policy), initial, state, published)
            published += milestones(run, k + 1, data, state.policy)
            drop_done(published)
    except BaseException as error:
        batches.close(wait=isinstance(error, Exception))
        raise
    batches.close(wait=True)
    progress().stage_advanced("iteration", None, config.iterations, config.iterations, 0)
    return published


def milestones(run: Run, done: int, data: ArtifactRef, policy: ArtifactRef) -> Publications:
    """After ``done`` iterations: checkpoint and evaluation, where they are due; of what a branch shares those that are
    there."""
    config, due = run.config, []
    last = done == config.iterations
    saved, judged = last or done % config.checkpoint.every == 0, last or done % config.evaluation.every == 0
    if run.shares("checkpoint", done - 1):
        saved = checkpoint.known(run, done - 1, policy)
    if run.shares("evaluate", done):
        judged = is_evaluated(run, done, data, policy)
    if saved:
        due.append(checkpoint(run, done - 1, policy))
    if judged:
        due.append(evaluation(run, done, data, policy))
    return [announce(run, done, due)] if due else []


def first_policy(run: Run, data: ArtifactRef) -> ArtifactRef:
    """The policy that the run starts from: another run's, made on the spot, or pretrained."""
    if run.config.model.start is not None:
        return inherited(run, None, checkpoint_to_start_from(run.config).to_ref(reused=True))
    if run.config.model.path is None:
        return warm_start(run, None, data)
    return pretrained(run, None, external=model_digests(run.config.model.path))


def first_reference(run: Run, initial: ArtifactRef) -> ArtifactRef | None:
    """Another model than the policy that the run starts from, if one is configured."""
    if run.config.reference.path is None:
        return None
    return reference_model(run, None, initial, external=model_digests(run.config.reference.path))


def iterate(run: Run, k: int, batch: Batch, initial: ArtifactRef, before: State, published: Publications) -> State:
    """One iteration: policy k to policy k+1."""
    config, policy = run.at("advantage", k).config, before.policy
    asked, rollouts, selection = batch.prompts, batch.rollouts, batch.selection

    # Side by side: none needs the others.
    needs = extra_stages(config.algorithm)
    squares = {"sum_squared_probs": "asked"} if "sum_squared_probs" in needs else {}
    futures: dict[str, StageFuture] = {}
    if "old_logprobs" in needs:
        futures["old"] = old_logprobs.submit(run, k, asked, rollouts, policy, selection, external=squares)
    if "ref_logprobs" in needs:
        futures["ref"] = ref_logprobs.submit(run, k, asked, rollouts, initial, before.reference, selection)
    if "values" in needs:
        futures["values"] = values.submit(run, k, asked, rollouts, policy, selection)
    greedy = []
    if "greedy_rollout" in needs:
        tools = agent_digests(run.at("greedy_rollout", k).config.rollout.agent)
        if not greedy_rollout.known(run, k, asked, policy, external=tools):
            hand_over(run, policy)
        greedy.append(greedy_rollout(run, k, asked, policy, external=tools))
        judges = reward_digests(run.at("greedy_reward", k).config)
        greedy.append(greedy_reward(run, k, asked, greedy[0], external=judges))
    scores = results(batch.rewards)
    made = {name: future.result() for name, future in futures.items()}
    old, ref, v = (made.get(name) for name in ("old", "ref", "values"))

    own = plugin_digests(config.algorithm, "advantage", "grouping", "metrics", "kl.estimator")
    previous = before.advantages if carries_coefficient(run, k) else None
    baseline = greedy[1] if greedy else None
    advantages = advantage(run, k, asked, rollouts, scores, old, ref, v, baseline, selection, previous, external=own)
    own = plugin_digests(run.at("update", k).config.algorithm, "loss", "aggregation", "kl.estimator")
    exact = before.reference if "exact_kl" in needs else None
    updated = update(run, k, policy, asked, rollouts, old, ref, v, advantages, exact, external=own)
    if not updated.reused:
        hand_over(run, updated)  # before the trainer goes on
    followed = before.reference
    every = run.at("reference", k).config.reference.every
    if every is not None and (k + 1) % every == 0:
        followed = reference(run, k, updated, initial, before.reference)

    moved = followed if followed is not before.reference else None
    stages = [*asked, *rollouts, *scores, *greedy, selection, old, ref, v, advantages, updated, moved]
    published.append(announce(run, k, [each for each in stages if each is not None]))
    return State(policy=updated, advantages=advantages, reference=followed)


def carries_coefficient(run: Run, k: int) -> bool:
    """Whether the KL's coefficient follows from the iteration before: not where a branch sets the controller anew."""
    now, before = (run.at("advantage", each).config.algorithm.kl for each in (k, k - 1))
    return now.controller == "adaptive" and now == before


def announce(run: Run, iteration: int | None, stages: list[ArtifactRef]) -> StageFuture:
    """Tells MLflow, then Prefect's page; to which MLflow is part of the key, so that a new one is told everything."""
    where = {"tracking": tracking_uri(run.config)} | published_elsewhere(run.config, stages)
    return show_on_page(publish.submit(run, iteration, stages, external=where))
