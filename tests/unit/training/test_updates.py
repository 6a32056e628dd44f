import itertools
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
from grpo_lib.training.base import Batching, Objective, StepMetrics, UpdateBatch
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
    }
    return pa.table(columns)


def advantages() -> pa.Table:
    columns = {
        "rollout_id": IDS,
        "advantages": pa.array([[0.25], [-0.25, -0.25], [0, 0]], FLOATS),
        "response_mask": pa.array([[1], [1, 1], [0, 0]], MASK),
    }
    return pa.table(columns)


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


def without(inputs: list[ArtifactRef], *stage: str) -> list[ArtifactRef]:
    return [ref for ref in inputs if ref.stage not in stage]


def test_the_datasets_of_an_iteration_are_joined_by_position(stages: StageStore, inputs: list[ArtifactRef]) -> None:
    batch = update_batch(stages, inputs)
    assert lists(batch.sequences.prompts) == [[1, 2], [1, 2], [3]]
    assert lists(batch.sequences.responses) == [[5], [6, 7], [8, 9]]
    assert lists(batch.advantages) == [[0.25], [-0.25, -0.25], [0, 0]]
    assert lists(batch.old_logprobs) == [[-0.25], [-0.75, -1.25], [-1.75, -2.25]]
    assert lists(batch.ref_logprobs) == [[-0.125], [-0.625, -1.125], [-1.625, -2.125]]
    assert batch.group_ids.tolist() == [40, 40, 41]
    assert lists(batch.mask) == [[1], [1, 1], [0, 0]]  # of the advantages: rows without a reward are taken out


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
    assert lists(parts.sequences.prompts) == lists(whole.sequences.prompts)
    assert torch.equal(parts.group_ids, whole.group_ids)


@pytest.mark.parametrize(
    ("stage", "table"),
    [
        ("advantage", advantages()),
        ("old_logprobs", logprobs("old_logprobs")),
        ("ref_logprobs", logprobs("ref_logprobs")),
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

    def update(self, batch: UpdateBatch, objective: Objective, batching: Batching) -> list[StepMetrics]:
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


def test_the_objective_is_made_of_what_the_stage_declares() -> None:
    config = config_of(
        "algorithm.clip_low=0.1",
        "algorithm.clip_high=0.5",
        "algorithm.dual_clip=2",
        "algorithm.aggregation=seq-mean-token-sum-norm",
        "algorithm.kl.estimator=k2",
        "algorithm.kl.coef=0.25",
        "algorithm.entropy_coef=0.5",
        "rollout.temperature=0.75",
        "rollout.max_new_tokens=20",
    )
    made = objective(ConfigView(config, UPDATE))
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    ratio = torch.tensor([2.0, 0.5, 3.0, 1.2])
    loss = made.policy_loss(old + ratio.log(), old, torch.tensor([1.0, -1.0, -1.0, 1.0]))
    assert loss.values.tolist() == pytest.approx([-1.5, 0.9, 2.0, -1.2])
    weights = made.aggregation(torch.tensor([1, 1, 0, 1], dtype=torch.uint8), torch.tensor([0, 3, 4]))
    assert weights.tolist() == pytest.approx([1 / 40, 1 / 40, 0.0, 1 / 40])
    assert made.kl(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist() == [2.0]
    assert (made.kl_coef, made.entropy_coef, made.temperature) == (0.25, 0.5, 0.75)


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
