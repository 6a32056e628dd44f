"""The training run: every stage of every iteration is a task that commits one dataset."""

import sys
from typing import Any

from prefect import Flow, State, flow
from prefect.client.schemas.objects import FlowRun
from prefect.task_runners import ThreadPoolTaskRunner

from flows.report import RunReport, report
from grpo_lib.config import RunConfig
from grpo_lib.placement.devices import use_threads
from grpo_lib.preflight import check_surroundings, data_digests, model_digests
from grpo_lib.progress import progress
from grpo_lib.run import Run, open_run
from grpo_lib.storage.stages import ArtifactRef
from grpo_lib.tracking.mlflow import tracker_for, tracking_uri
from tasks.advantage import advantage
from tasks.base import StageFuture
from tasks.dataset import dataset
from tasks.evaluate import evaluate
from tasks.logprobs import old_logprobs, ref_logprobs
from tasks.policy import pretrained, warm_start
from tasks.prompts import prompts
from tasks.publish import publish
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.update import checkpoint, update

Publications = list[StageFuture]


def flow_run_name() -> str:
    from prefect.runtime import flow_run

    return f"train {flow_run.get_parameters()['config'].run_name}"


def mark_failed(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
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
    """Trains a policy with GRPO. A stage that is committed already is not run again: run the flow again to resume."""
    check_surroundings(config)
    use_threads(config.placement.threads)
    run = Run(config)
    data = dataset(run, None, external=data_digests(config))
    open_run(config)
    initial = first_policy(run, data)
    published = [announce(run, None, [data, initial])]
    before = evaluate(run, 0, data, initial)
    published.append(announce(run, 0, [before]))
    policy = initial
    for k in range(config.iterations):
        progress().stage_advanced("iteration", None, k, config.iterations, 0)
        policy = iterate(run, k, data, initial, policy, published)
        done = k + 1
        last, due = done == config.iterations, []
        if last or done % config.checkpoint.every == 0:
            due.append(checkpoint(run, k, policy))
        if last or done % config.evaluation.every == 0:
            due.append(evaluate(run, done, data, policy))
        if due:
            published.append(announce(run, done, due))
    progress().stage_advanced("iteration", None, config.iterations, config.iterations, 0)
    results(published)
    return report(run)


def first_policy(run: Run, data: ArtifactRef) -> ArtifactRef:
    """The policy that the run starts from: made on the spot, or pretrained."""
    if run.config.model.path is None:
        return warm_start(run, None, data)
    return pretrained(run, None, external=model_digests(run.config))


def iterate(
    run: Run, k: int, data: ArtifactRef, initial: ArtifactRef, policy: ArtifactRef, published: Publications
) -> ArtifactRef:
    """One iteration: policy k to policy k+1."""
    config = run.config
    asked = prompts(run, k, data)
    rollouts, rewards = [], []
    for shard in range(config.rollout.shards):  # a shard is judged while the next is generated
        rollouts.append(rollout(run, k, asked, policy, shard=shard))
        rewards.append(reward.submit(run, k, asked, rollouts[shard], shard=shard))

    # Side by side: neither needs the other.
    old = old_logprobs.submit(run, k, asked, rollouts, policy) if config.needs_old_logprobs else None
    ref = ref_logprobs.submit(run, k, asked, rollouts, initial) if config.needs_ref_logprobs else None
    scores = results(rewards)
    old_scores, ref_scores = (future.result() if future is not None else None for future in (old, ref))

    advantages = advantage(run, k, rollouts, scores)
    updated = update(run, k, policy, asked, rollouts, old_scores, ref_scores, advantages)

    stages = [asked, *rollouts, *scores, old_scores, ref_scores, advantages, updated]
    published.append(announce(run, k, [each for each in stages if each is not None]))
    return updated


def announce(run: Run, iteration: int | None, stages: list[ArtifactRef]) -> StageFuture:
    """Tells MLflow; to which MLflow is part of the key, so that a new one is told everything."""
    return publish.submit(run, iteration, stages, external={"tracking": tracking_uri(run.config)})


def results(futures: Publications) -> list[ArtifactRef]:
    """Waits for all, then raises the first failure if there is one."""
    for future in futures:
        future.wait()
    return [future.result() for future in futures]
