"""What iterations learn from: prompts, rollouts, rewards and filters; with pipeline.max_staleness ahead of training."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass

from grpo_lib.data.samplers import sampler_digests
from grpo_lib.generation.agents import agent_digests
from grpo_lib.recipe import plugin_digests
from grpo_lib.rewards.judges import reward_digests
from grpo_lib.run import Run, hands_over
from grpo_lib.storage.stages import ArtifactRef
from tasks.evaluate import evaluate
from tasks.filter import filter_rows
from tasks.futures import StageFuture
from tasks.prompts import prompts
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.sampler import sampler
from tasks.weights import weights


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What an iteration learns from."""

    prompts: list[ArtifactRef]
    rollouts: list[ArtifactRef]
    rewards: list[StageFuture]
    selection: ArtifactRef | None
    """What the filters left of them."""
    learned: ArtifactRef | None
    """What the sampler knew of prompts when these were drawn."""


class Batches:
    """The batch of each iteration. That of iteration k is drawn by policy ``max(0, k - pipeline.max_staleness)``, so
    that the next ones are generated, in a thread of their own, while the trainer makes newer policies.
    """

    def __init__(self, run: Run, data: ArtifactRef) -> None:
        self._run, self._data = run, data
        self._ahead = run.config.pipeline.max_staleness
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollouts")  # one after another: each follows the last
        self._asked: dict[int, Future[Batch]] = {}
        self._next = 0
        self._last: Batch | Future[Batch] | None = None
        """The newest that was asked for."""

    def take(self, k: int, policy: ArtifactRef) -> Batch:
        """The batch of iteration ``k``, which starts from ``policy``: the call for k follows that for k - 1."""
        if not self._ahead:
            self._last = self._make(k, policy, self._last)
            return self._last
        while self._next < min(k + self._ahead + 1, self._run.config.iterations):  # the first time several, then one
            last = self._pool.submit(copy_context().run, self._make, self._next, policy, self._last)
            self._asked[self._next] = self._last = last
            self._next += 1
        return self._asked.pop(k).result()

    def close(self, wait: bool) -> None:
        """Asks for no more; what is being generated is paid for, and is waited for if there is time."""
        self._pool.shutdown(wait=wait, cancel_futures=True)

    def _make(self, k: int, policy: ArtifactRef, before: "Batch | Future[Batch] | None") -> Batch:
        """After one that failed nothing is generated: it would follow the wrong one."""
        return rollouts_and_rewards(
            self._run, k, self._data, policy, before.result() if isinstance(before, Future) else before
        )


def rollouts_and_rewards(run: Run, k: int, data: ArtifactRef, policy: ArtifactRef, before: Batch | None) -> Batch:
    """Prompts, responses and their rewards; with filters so many batches of prompts that enough are left."""
    config, filters = run.at("rollout", k).config, run.at("filter", k).config.algorithm
    asked: list[ArtifactRef] = []
    rollouts: list[ArtifactRef] = []
    rewards: list[StageFuture] = []
    partial = config.rollout.partial is not None
    selected = None if before is None else before.selection
    earlier = before if partial else None  # what goes on of it
    going = (None, None) if earlier is None else (earlier.prompts, earlier.rollouts)
    judges = reward_digests(run.at("reward", k).config)
    own = sampler_digests(config.rollout.sampler, config.algorithm.plugins)
    learned = None if config.rollout.sampler is None or before is None else learn(run, k, before, own)
    while True:
        drawn = len(asked)
        asked.append(prompts(run, k, data, selected, *going, learned, shard=drawn, external=own))
        shards = range(drawn * config.rollout.shards, (drawn + 1) * config.rollout.shards)
        for shard, made in zip(shards, _rollouts(run, k, asked, policy, going[1], shards), strict=True):
            rollouts.append(made)
            # while the next is generated
            rewards.append(reward.submit(run, k, asked, made, shard=shard, external=judges))
        if not filters.filters and not partial:
            return Batch(prompts=asked, rollouts=rollouts, rewards=rewards, selection=None, learned=learned)
        theirs = plugin_digests(filters, "filters", "grouping")
        selection = filter_rows(run, k, asked, rollouts, results(rewards), selected, shard=drawn, external=theirs)
        if run.stages.manifest(selection).summary["full"]:
            return Batch(prompts=asked, rollouts=rollouts, rewards=rewards, selection=selection, learned=learned)


def learn(run: Run, k: int, before: Batch, own: dict[str, str]) -> ArtifactRef:
    """What the sampler knows of prompts when those of iteration ``k`` are drawn."""
    return sampler(run, k, before.prompts, before.rollouts, results(before.rewards), before.learned, external=own)


def _rollouts(
    run: Run,
    k: int,
    asked: list[ArtifactRef],
    policy: ArtifactRef,
    earlier: list[ArtifactRef] | None,
    shards: range,
) -> Iterable[ArtifactRef]:
    """The shards in order, as they are generated: side by side where there are several workers."""
    agent = run.at("rollout", k, shards[0]).config.rollout.agent
    tools, placement = agent_digests(agent), run.config.placement
    asked = list(asked)  # as it is now
    if not all(rollout.known(run, k, asked, policy, earlier, shard=each, external=tools) for each in shards):
        hand_over(run, policy)
    if placement.kind == "ray" and placement.ray.rollout_workers > 1:
        futures = [rollout.submit(run, k, asked, policy, earlier, shard=each, external=tools) for each in shards]
        yield from (each.result() for each in futures)
    else:
        for each in shards:
            yield rollout(run, k, asked, policy, earlier, shard=each, external=tools)


def hand_over(run: Run, policy: ArtifactRef) -> None:
    """Commits the weights of a policy for engines that can't get them from the trainer."""
    if hands_over(run.config) and policy.stage == "update" and not weights.known(run, policy.iteration, policy):
        weights(run, policy.iteration, policy)


def evaluation(run: Run, done: int, data: ArtifactRef, policy: ArtifactRef) -> ArtifactRef:
    """Held-out accuracy of a policy after ``done`` updates."""
    if not is_evaluated(run, done, data, policy):
        hand_over(run, policy)
    return evaluate(run, done, data, policy, external=_own_of_evaluation(run, done))


def is_evaluated(run: Run, done: int, data: ArtifactRef, policy: ArtifactRef) -> bool:
    """Whether that accuracy is there."""
    return evaluate.known(run, done, data, policy, external=_own_of_evaluation(run, done))


def _own_of_evaluation(run: Run, done: int) -> dict[str, str]:
    """Digests of the user's own tools and reward functions."""
    config = run.at("evaluate", done).config
    return agent_digests(config.rollout.agent) | reward_digests(config)


def results(futures: list[StageFuture]) -> list[ArtifactRef]:
    """Waits for all, then raises the first failure if there is one."""
    for future in futures:
        future.wait()
    return [future.result() for future in futures]


def drop_done(futures: list[StageFuture]) -> None:
    """Forgets those that are done; raises the first failure among them."""
    for future in [each for each in futures if each.done]:
        future.result()
        futures.remove(future)
