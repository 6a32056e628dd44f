import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from grpo_lib.config import RunConfig
from grpo_lib.config_files import make_config
from grpo_lib.data.ragged import Ragged
from grpo_lib.data.schemas import FLOATS, MASK, TOKENS, UPDATES
from grpo_lib.errors import DataError
from grpo_lib.seeds import derive_seed
from grpo_lib.storage.keys import ConfigView, StageSpec, stage_key
from grpo_lib.storage.local import LocalStore
from grpo_lib.storage.stages import ArtifactRef, StageStore
from grpo_lib.training.base import Batching, KlTerm, Objective, StepMetrics, UpdateBatch
from grpo_lib.training.scoring import Progress
from grpo_lib.training.updates import UPDATE, objective, run_update, update_batch, update_summary, update_table

Commit = Callable[..., ArtifactRef]
IDS = ["0-0-0", "0-0-1", "0-1-0"]


def prompts() -> pa.Table:
    return pa.table({"prompt_ids": pa.array([[1, 2], [3]], TOKENS)})


def rollouts() -> pa.Table:
    columns = {
        "rollout_id": IDS,
        "prompt_row": pa.array([0, 0, 1], pa.int32()),
        "group_id": pa.array([40, 40, 41], pa.int64()),
        "response_ids": pa.array([[5], [6, 7], [8, 9]], TOKENS),
        "response_mask": pa.array([[1], [1, 1], [1, 1]], MASK),
        "rollout_logprobs": pa.array([[-0.5], [-1.0, -1.5], [-2.0, -2.5]], FLOATS),
        "seed": pa.array([11, 12, 13], pa.int64()),
    }
    return pa.table(columns)


def advantages(**more: pa.Array) -> pa.Table:
    columns = {
        "rollout_id": IDS,
        "advantages": pa.array([[0.25], [-0.25, -0.25], [0, 0]], FLOATS),
        "response_mask": pa.array([[1], [1, 1], [0, 0]], MASK),
    }
    return pa.table(columns | more)


def logprobs(name: str, shift: float = 0.0) -> pa.Table:
    values = [[-0.25 + shift], [-0.75 + shift, -1.25 + shift], [-1.75 + shift, -2.25 + shift]]
    return pa.table({"rollout_id": IDS, name: pa.array(values, FLOATS)})


def config_of(*overrides: str) -> RunConfig:
    return make_config({"data": {"problem": "countdown"}, "warm_start": {}}, overrides)


@pytest.fixture
def stages(tmp_path: Path) -> StageStore:
    return StageStore(LocalStore(tmp_path / "store"), "demo")


@pytest.fixture
def commit(stages: StageStore) -> Commit:
    def write(stage: str, *tables: pa.Table, shard: int = 0) -> ArtifactRef:
        spec, config = StageSpec(name=stage, version=1, reads=()), config_of()
        key = stage_key(spec, config, (), 0, shard)
        with stages.attempt(spec, config, key, (), 0, shard) as attempt:
            for table in tables:
                attempt.write_table(table)
            return attempt.commit()

    return write


@pytest.fixture
def inputs(commit: Commit) -> list[ArtifactRef]:
    """All datasets of an iteration, in no special order."""
    return [
        commit("advantage", advantages()),
        commit("ref_logprobs", logprobs("ref_logprobs", 0.125)),
        commit("rollout", rollouts()),
        commit("old_logprobs", logprobs("old_logprobs")),
        commit("prompts", prompts()),
    ]


def lists(rows: Ragged | None) -> list[list[float]]:
    assert rows is not None
    starts = rows.offsets.tolist()
    return [rows.values[a:b].tolist() for a, b in itertools.pairwise(starts)]


def prompts_of(batch: UpdateBatch) -> Ragged:
    """Row by row."""
    return batch.sequences.prompts.gather(batch.sequences.prompt_rows)


def without(inputs: list[ArtifactRef], *stage: str) -> list[ArtifactRef]:
    return [ref for ref in inputs if ref.stage not in stage]


def test_the_datasets_of_an_iteration_are_joined_by_position(stages: StageStore, inputs: list[ArtifactRef]) -> None:
    batch = update_batch(stages, inputs)
    assert lists(prompts_of(batch)) == [[1, 2], [1, 2], [3]]
    assert lists(batch.sequences.responses) == [[5], [6, 7], [8, 9]]
    assert lists(batch.advantages) == [[0.25], [-0.25, -0.25], [0, 0]]
    assert lists(batch.old_logprobs) == [[-0.25], [-0.75, -1.25], [-1.75, -2.25]]
    assert lists(batch.ref_logprobs) == [[-0.125], [-0.625, -1.125], [-1.625, -2.125]]
    assert batch.group_ids.tolist() == [40, 40, 41]
    assert batch.row_seeds.tolist() == [11, 12, 13]
    assert lists(batch.mask) == [[1], [1, 1], [0, 0]]  # of the advantages: rows without a reward are taken out
    assert (batch.is_weights, batch.values, batch.returns) == (None, None, None)


def test_weights_returns_and_values_are_read_where_the_algorithm_made_them(
    stages: StageStore, commit: Commit, inputs: list[ArtifactRef]
) -> None:
    more = {
        "is_weights": pa.array([[1.5], [0.5, 2.0], [0, 0]], FLOATS),
        "returns": pa.array([[1.0], [2.0, 3.0], [0, 0]], FLOATS),
    }
    richer = [commit("advantage", advantages(**more), shard=1), commit("values", logprobs("values"))]
    batch = update_batch(stages, [*richer, *without(inputs, "advantage")])
    assert lists(batch.is_weights) == [[1.5], [0.5, 2.0], [0, 0]]
    assert lists(batch.returns) == [[1.0], [2.0, 3.0], [0, 0]]
    assert lists(batch.values) == [[-0.25], [-0.75, -1.25], [-1.75, -2.25]]


def test_a_row_that_was_drawn_several_times_stands_several_times_and_one_that_was_not_drawn_is_gone(
    stages: StageStore, commit: Commit, inputs: list[ArtifactRef]
) -> None:
    more = {
        "copies": pa.array([0, 2, 1], pa.int32()),
        "is_weights": pa.array([[1.5], [0.5, 2.0], [0, 0]], FLOATS),
        "returns": pa.array([[1.0], [2.0, 3.0], [0, 0]], FLOATS),
    }
    drawn = [commit("advantage", advantages(**more), shard=1), commit("values", logprobs("values"))]
    batch = update_batch(stages, [*drawn, *without(inputs, "advantage")])
    assert lists(prompts_of(batch)) == [[1, 2], [1, 2], [3]]
    assert lists(batch.sequences.responses) == [[6, 7], [6, 7], [8, 9]]
    assert lists(batch.mask) == [[1, 1], [1, 1], [0, 0]]
    assert lists(batch.advantages) == [[-0.25, -0.25], [-0.25, -0.25], [0, 0]]
    assert lists(batch.old_logprobs) == [[-0.75, -1.25], [-0.75, -1.25], [-1.75, -2.25]]
    assert lists(batch.ref_logprobs) == [[-0.625, -1.125], [-0.625, -1.125], [-1.625, -2.125]]
    assert lists(batch.is_weights) == [[0.5, 2.0], [0.5, 2.0], [0, 0]]
    assert lists(batch.returns) == [[2.0, 3.0], [2.0, 3.0], [0, 0]]
    assert lists(batch.values) == [[-0.75, -1.25], [-0.75, -1.25], [-1.75, -2.25]]
    assert batch.group_ids.tolist() == [40, 40, 41] and batch.row_seeds.tolist() == [12, 12, 13]


def test_without_recomputed_log_probs_the_engine_s_are_the_anchor(
    stages: StageStore, inputs: list[ArtifactRef]
) -> None:
    batch = update_batch(stages, without(inputs, "old_logprobs", "ref_logprobs"))
    assert lists(batch.old_logprobs) == [[-0.5], [-1.0, -1.5], [-2.0, -2.5]]
    assert batch.ref_logprobs is None


def test_rollouts_of_several_shards_are_put_together_in_order(
    stages: StageStore, commit: Commit, inputs: list[ArtifactRef]
) -> None:
    shards = [commit("rollout", rollouts().slice(0, 2), shard=1), commit("rollout", rollouts().slice(2), shard=2)]
    whole, parts = update_batch(stages, inputs), update_batch(stages, [*shards, *without(inputs, "rollout")])
    assert lists(parts.sequences.responses) == lists(whole.sequences.responses)
    assert lists(prompts_of(parts)) == lists(prompts_of(whole))
    assert torch.equal(parts.group_ids, whole.group_ids)


@pytest.mark.parametrize(
    ("stage", "table"),
    [
        ("advantage", advantages()),
        ("old_logprobs", logprobs("old_logprobs")),
        ("ref_logprobs", logprobs("ref_logprobs")),
        ("values", logprobs("values")),
    ],
)
def test_a_dataset_of_other_rollouts_is_refused_by_name(
    stages: StageStore, commit: Commit, inputs: list[ArtifactRef], stage: str, table: pa.Table
) -> None:
    other = commit(stage, table.take(pa.array([1, 0, 2])), shard=1)
    with pytest.raises(DataError, match=f"^{stage}: the rows do not belong to the same rollouts"):
        update_batch(stages, [other, *without(inputs, stage)])


@dataclass
class Recorder:
    """A trainer that only takes down what it was asked to do."""

    calls: list[tuple[UpdateBatch, Objective, Batching]] = field(default_factory=list)

    def update(
        self, batch: UpdateBatch, objective: Objective, batching: Batching, on_progress: Progress | None
    ) -> list[StepMetrics]:
        self.calls.append((batch, objective, batching))
        return []


def test_an_update_is_cut_as_the_configuration_says_and_shuffled_by_its_iteration(
    stages: StageStore, inputs: list[ArtifactRef]
) -> None:
    config = config_of(
        "seed=7", "trainer.epochs=2", "trainer.mini_batch_prompts=4", "trainer.max_tokens=500", "trainer.max_skipped=1"
    )
    recorder: Any = Recorder()
    for iteration in (3, 4):
        assert run_update(recorder, stages, inputs, ConfigView(config, UPDATE), iteration) == []
    (batch, _, third), (_, _, fourth) = recorder.calls
    assert (third.epochs, third.mini_batch_groups, third.max_tokens, third.max_skipped) == (2, 4, 500, 1)
    assert (third.seed, fourth.seed) == (derive_seed(7, "update", 3), derive_seed(7, "update", 4))
    assert batch.group_ids.tolist() == [40, 40, 41]
    assert (third.max_kl, third.train_policy) == (None, True)


def test_a_bound_on_the_kl_and_the_critic_s_warm_up_come_from_the_configuration(
    stages: StageStore, inputs: list[ArtifactRef]
) -> None:
    config = config_of(
        "algorithm.advantage=gae", "critic={warmup_iterations: 2}", "trainer.max_kl=0.5", "trainer.epochs=2"
    )
    recorder: Any = Recorder()
    for iteration in range(4):
        run_update(recorder, stages, inputs, ConfigView(config, UPDATE), iteration)
    assert [batching.train_policy for _, _, batching in recorder.calls] == [False, False, True, True]
    assert {batching.max_kl for _, _, batching in recorder.calls} == {0.5}


def objective_of(*overrides: str) -> Objective:
    return objective(ConfigView(config_of(*overrides), UPDATE))


def test_the_objective_is_made_of_what_the_stage_declares() -> None:
    made = objective_of(
        "algorithm.loss_options={clip_low: 0.1, clip_high: 0.5, dual_clip: 2}",
        "algorithm.aggregation=seq-mean-token-sum-norm",
        "algorithm.kl.estimator=k2",
        "algorithm.kl.coef=0.25",
        "algorithm.entropy_coef=0.5",
        "rollout.temperature=0.75",
        "rollout.max_new_tokens=20",
    )
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    ratio = torch.tensor([2.0, 0.5, 3.0, 1.2])
    loss = made.policy_loss(old + ratio.log(), old, torch.tensor([1.0, -1.0, -1.0, 1.0]))
    assert loss.values.tolist() == pytest.approx([-1.5, 0.9, 2.0, -1.2])
    weights = made.aggregation(torch.tensor([1, 1, 0, 1], dtype=torch.uint8), torch.tensor([0, 3, 4]))
    assert weights.tolist() == pytest.approx([1 / 40, 1 / 40, 0.0, 1 / 40])
    assert made.kl is not None and made.kl.estimator is not None
    assert made.kl.estimator(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist() == [2.0]
    assert (made.kl.coef, made.kl.straight_through, made.kl.importance) == (0.25, False, False)
    assert (made.entropy_coef, made.temperature) == (0.5, 0.75)
    assert made.select is None and made.correction is None and made.zero_without_advantage


def test_a_kl_with_a_plus_keeps_its_value_and_has_the_gradient_of_k2() -> None:
    made = objective_of("algorithm.kl={estimator: k3+, coef: 0.5, importance: true}").kl
    assert made is not None and made.estimator is not None and made.importance
    logprobs = torch.tensor([-1.0], requires_grad=True)
    value = made.estimator(logprobs, torch.tensor([-2.0]))
    value.sum().backward()
    assert value.tolist() == [pytest.approx(math.exp(-1.0))] and logprobs.grad is not None
    assert logprobs.grad.tolist() == [1.0]  # k3's own would be 1 - exp(-1)


@pytest.mark.parametrize(("name", "straight"), [("full", False), ("full+", True)])
def test_the_exact_kl_is_left_to_the_trainer(name: str, straight: bool) -> None:
    made = objective_of(f"algorithm.kl={{estimator: {name}, coef: 0.5}}").kl
    assert made == KlTerm(coef=0.5, estimator=None, straight_through=straight)


@pytest.mark.parametrize("kl", ["{coef: 0}", "{coef: 0.1, place: reward}"])
def test_a_kl_that_is_off_or_in_the_reward_is_no_term_of_the_loss(kl: str) -> None:
    assert objective_of(f"algorithm.kl={kl}").kl is None


def test_a_loss_brings_its_helper_its_aggregation_and_what_has_to_be_known_of_it() -> None:
    made = objective_of("algorithm.loss=kl_cov", "algorithm.loss_options={kl_cov_ratio: 0.5, coef: 2}")
    logprobs, advantages = torch.tensor([-1.0, -2.0, -3.0, -5.0]), torch.tensor([2.0, 2.0, 0.0, 0.0])
    assert made.select is not None and not made.zero_without_advantage
    selected = made.select(logprobs, advantages)  # covariances 1.75, 0.75, 0.25, 2.25
    assert selected.tolist() == [True, False, False, True]
    loss = made.policy_loss(logprobs, logprobs - 1, torch.zeros(4), selected)
    assert loss.values.tolist() == [2.0, 0.0, 0.0, 2.0]
    weights = objective_of("algorithm.loss=gspo").aggregation(torch.tensor([1, 1, 1, 1]), torch.tensor([0, 3, 4]))
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])


def test_only_in_bypass_mode_the_update_corrects_by_itself() -> None:
    rule = "algorithm.rollout_correction={rejection: [{kind: token, upper: 2}], token_veto_threshold: 0.01}"
    assert objective_of(rule).correction is None  # the advantage stage has done it
    assert objective_of("algorithm.old_logprobs=bypass").correction is None
    made = objective_of(rule, "algorithm.old_logprobs=bypass").correction
    assert made is not None
    ratio = torch.tensor([1.0, 3.0, 0.4, 1.0, 0.001])
    kept, weights = made(ratio.log(), torch.tensor([0, 3, 5]))
    assert (kept.tolist(), weights) == ([True, False, False, False, False], None)
    weighed = objective_of("algorithm.rollout_correction={preset: pg_is, is_upper: 3}").correction
    assert weighed is not None
    kept, weights = weighed(torch.tensor([2.0, 2.0, 0.5]).log(), torch.tensor([0, 2, 3]))
    assert weights is not None
    assert (kept.tolist(), weights.tolist()) == ([True] * 3, pytest.approx([3.0, 3.0, 0.5]))


def steps() -> list[StepMetrics]:
    values = [
        {"loss": 1.0, "ratio_min": 0.5, "ratio_max": 2.0, "skipped": 1.0, "lr": 0.1, "grad_norm": float("inf")},
        {"loss": 4.0, "ratio_min": 0.25, "ratio_max": 1.5, "skipped": 0.0, "lr": 0.2, "grad_norm": 2.0},
        {"loss": 4.0, "skipped": 1.0, "lr": 0.3, "grad_norm": float("nan"), "kl": 0.5},
    ]
    return [
        StepMetrics(optimizer_step=number, epoch=number // 2, rows=4, tokens=10 + number, values=each)
        for number, each in enumerate(values)
    ]


def test_the_table_has_a_row_for_every_optimizer_step() -> None:
    table = update_table(steps()[:2])
    assert table.schema == UPDATES
    first = table.to_pylist()[1]
    assert (first["optimizer_step"], first["epoch"], first["rows"], first["tokens"]) == (1, 0, 4, 11)
    assert dict(first["metric"]) == steps()[1].values


def test_the_summary_takes_means_extremes_sums_and_the_last_rate_and_only_finite_numbers() -> None:
    assert update_summary(steps()) == {
        "loss": 3.0,
        "ratio_min": 0.25,
        "ratio_max": 2.0,
        "skipped": 2.0,
        "lr": 0.3,
        "kl": 0.5,
    }


def test_the_summary_counts_what_is_counted_and_adds_up_work() -> None:
    values = [
        {"stopped_early": 0.0, "critic_skipped": 1.0, "model_tokens": 10.0, "model_tflop": 0.5, "entropy": 2.0},
        {"stopped_early": 1.0, "critic_skipped": 1.0, "model_tokens": 30.0, "model_tflop": 1.5, "entropy": 1.0},
    ]
    made = [StepMetrics(optimizer_step=1, epoch=0, rows=4, tokens=10, values=each) for each in values]
    assert update_summary(made) == {
        "stopped_early": 1.0,
        "critic_skipped": 2.0,
        "model_tokens": 40.0,
        "model_tflop": 2.0,
        "entropy": 1.5,
    }
