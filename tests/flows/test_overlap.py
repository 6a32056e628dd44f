"""Rollouts ahead of training: which policy draws what, that nothing else changes, and that it stays exact."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from grpo_lib.errors import ConfigError
from grpo_lib.run import Run
from grpo_lib.storage.stages import Manifest
from tests.flows.runs import Tiny, fresh_process, of, train

pytestmark = pytest.mark.usefixtures("prefect_here")

AHEAD = ("iterations=5", "algorithm.rollout_correction.preset=decoupled_token_is", "checkpoint.every=2")


def digests(manifests: list[Manifest]) -> dict[tuple[str, int | None, int], str]:
    return {(each.stage, each.iteration, each.shard): each.digest for each in manifests if each.stage != "publish"}


@pytest.mark.parametrize("staleness", [1, 2])
def test_rollouts_are_drawn_by_the_policy_that_many_iterations_before(tiny: Tiny, staleness: int) -> None:
    config = tiny(*AHEAD, f"pipeline.max_staleness={staleness}")
    made = train(config)
    stages = Run(config).stages
    versions = {}
    for each in of(made, "rollout"):
        assert each.iteration is not None
        table = stages.table(each.to_ref(reused=True))
        assert set(table.column("staleness").to_pylist()) == {min(each.iteration, staleness)}
        versions[each.iteration] = set(table.column("policy_version").to_pylist())
    assert versions == {k: {max(0, k - staleness)} for k in range(5)}
    stale = [each.summary["staleness_max"] for each in of(made, "advantage")]
    assert stale == [min(k, staleness) for k in range(5)]
    assert all(each.summary["parity_mean"] < 1e-4 for each in of(made, "rollout")), "proved without the trainer"


def test_an_update_and_the_next_rollouts_run_at_the_same_time(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_lib.placement.local import Workers

    met = threading.Barrier(2, timeout=60)
    training, engine_at = Workers.training, Workers.engine_at
    updates = []

    @contextmanager
    def train_slowly(self, policy, key) -> Iterator[object]:  # type: ignore[no-untyped-def]
        with training(self, policy, key) as trainer:
            updates.append(policy.iteration)
            if len(updates) == 2:  # that of iteration 1: rollouts of iteration 2 are due
                met.wait()
            yield trainer

    @contextmanager
    def generate(self, policy) -> Iterator[object]:  # type: ignore[no-untyped-def]
        with engine_at(self, policy) as engine:
            # Policy 1 draws iteration 2, in two shards, while policy 1 learns.
            if policy.stage == "update" and policy.iteration == 0 and not met.broken and len(updates) <= 2:
                meet.pop()() if meet else None
            yield engine

    meet = [met.wait]
    monkeypatch.setattr(Workers, "training", train_slowly)
    monkeypatch.setattr(Workers, "engine_at", generate)
    train(tiny(*AHEAD, "pipeline.max_staleness=1", "iterations=3"))
    assert not met.broken and meet == []


def test_a_run_ahead_that_is_cut_off_ends_with_the_same_data(tiny: Tiny, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import tasks.advantage

    whole = digests(train(tiny(*AHEAD, "pipeline.max_staleness=1", f"store.uri={tmp_path / 'whole'}")))
    fresh_process()
    body, calls = tasks.advantage.advantage_table, []

    def fails_once(*arguments, **more):  # type: ignore[no-untyped-def]
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("cut off")
        return body(*arguments, **more)

    monkeypatch.setattr(tasks.advantage, "advantage_table", fails_once)
    config = tiny(*AHEAD, "pipeline.max_staleness=1", f"store.uri={tmp_path / 'cut'}")
    with pytest.raises(RuntimeError, match="cut off"):
        train(config)
    assert of(Run(config).manifests(), "rollout", 3), "what was being generated is paid for, and kept"
    fresh_process()
    assert digests(train(config)) == whole


def test_overlap_without_a_correction_is_refused_with_a_preset(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"max_staleness=1 .*preset=decoupled_token_is"):
        tiny("pipeline.max_staleness=1")
    tiny("pipeline.max_staleness=2", "algorithm.old_logprobs=bypass")
    with pytest.raises(ConfigError, match=r"exclude each other"):
        tiny("pipeline.max_staleness=1", "algorithm.old_logprobs=bypass", "rollout.partial.tokens=10")


def test_filters_draw_on_where_the_iteration_before_ended(tiny: Tiny) -> None:
    filters = "algorithm.filters=[{name: dynamic_sampling}]"
    config = tiny(*AHEAD, "pipeline.max_staleness=1", filters, "iterations=3")
    made = train(config)
    assert [each.iteration for each in of(made, "update")] == [0, 1, 2]
    first = [each.summary["next_prompt"] for each in of(made, "filter")]
    assert first == sorted(first)


def test_after_a_batch_that_failed_none_is_generated_that_would_follow_the_wrong_one(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import batches

    asked: list[tuple[int, object]] = []

    def make(run: Run, k: int, data: object, policy: object, before: object) -> str:
        asked.append((k, before))
        if k == 1:
            raise RuntimeError("no")
        return f"batch {k}"

    monkeypatch.setattr(batches, "rollouts_and_rewards", make)
    ahead = batches.Batches(Run(tiny(*AHEAD, "pipeline.max_staleness=2")), None)  # type: ignore[arg-type]
    assert ahead.take(0, None) == "batch 0"  # type: ignore[arg-type, comparison-overlap]
    for k in (1, 2):
        with pytest.raises(RuntimeError, match="no"):
            ahead.take(k, None)  # type: ignore[arg-type]
    ahead.close(wait=True)
    assert asked == [(0, None), (1, "batch 0")]
