import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.kl import k2, k3
from grpo_lib.algorithms.losses import ppo_clip
from grpo_lib.config import OptimizerConfig
from grpo_lib.data.ragged import repeat_rows, segment_sum
from grpo_lib.errors import ConfigError, NonFiniteError
from grpo_lib.training import torch_backend
from grpo_lib.training.base import Batching, Objective, StepMetrics, UpdateBatch
from grpo_lib.training.microbatches import Sequences
from grpo_lib.training.torch_backend import TorchTrainer, mini_batches

MakeTrainer = Callable[..., TorchTrainer]
MakeBatch = Callable[..., UpdateBatch]
ROWS = 12
BATCHING = Batching(epochs=1, mini_batch_groups=None, max_tokens=10_000, seed=3, max_skipped=0)
EVERY_AGGREGATION = pytest.mark.parametrize("aggregation", AGGREGATIONS.names())


def make_objective(aggregation: str = "token-mean", **changes: Any) -> Objective:
    standard = Objective(
        policy_loss=partial(ppo_clip, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
        aggregation=partial(AGGREGATIONS[aggregation], max_response_length=12),
        kl=k3,
        kl_coef=0.0,
        entropy_coef=0.0,
        temperature=0.8,
    )
    return replace(standard, **changes)


@pytest.fixture
def make_trainer(make_model: Callable[..., Any]) -> MakeTrainer:
    """A trainer of the same tiny Qwen3 each time."""

    def make(decay_steps: int = 100, **optimizer: Any) -> TorchTrainer:
        chosen = OptimizerConfig(**{"lr": 1e-3, "max_grad_norm": 1e6, **optimizer})
        return TorchTrainer(make_model(), chosen, decay_steps=decay_steps, dtype=torch.float32, max_tokens=10_000)

    return make


@pytest.fixture
def make_batch(make_trainer: MakeTrainer, make_sequences: Callable[[int, int], Sequences]) -> MakeBatch:
    """Groups of 1 to 5 rows; some tokens, and one whole row, are masked; group 3 has no signal."""

    def make(seed: int = 0, *, ref: bool = False, noise: float = 0.2) -> UpdateBatch:
        generator = torch.Generator().manual_seed(seed)
        sequences = make_sequences(seed, ROWS)
        offsets = sequences.responses.offsets
        tokens = int(offsets[-1])
        mask = (torch.rand(tokens, generator=generator) < 0.85).to(torch.uint8)
        mask[offsets[0]] = 1
        mask[offsets[4] : offsets[5]] = 0
        group_ids = torch.tensor([5, 3, 5, 8, 8, 1, 8, 3, 8, 5, 3, 8])
        advantages = torch.randn(ROWS, generator=generator)
        advantages[group_ids == 3] = 0
        scored, _ = make_trainer().logprobs(sequences, 0.8)
        old = scored.values + noise * torch.randn(tokens, generator=generator)
        reference = scored.values + 0.5 * torch.randn(tokens, generator=generator)
        return UpdateBatch(
            sequences=sequences,
            mask=scored.with_values(mask),
            old_logprobs=scored.with_values(old),
            advantages=scored.with_values(repeat_rows(advantages, offsets) * mask),
            ref_logprobs=scored.with_values(reference) if ref else None,
            group_ids=group_ids,
        )

    return make


def parameters(trainer: TorchTrainer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def gradients(trainer: TorchTrainer) -> dict[str, Tensor]:
    """Of the last step."""
    return {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}


def only_group(batch: UpdateBatch, group: int) -> UpdateBatch:
    rows = torch.nonzero(batch.group_ids == group).squeeze(1)
    return UpdateBatch(
        sequences=batch.sequences.gather(rows),
        mask=batch.mask.gather(rows),
        old_logprobs=batch.old_logprobs.gather(rows),
        advantages=batch.advantages.gather(rows),
        ref_logprobs=None if batch.ref_logprobs is None else batch.ref_logprobs.gather(rows),
        group_ids=batch.group_ids[rows],
    )


def with_infinite_advantages(batch: UpdateBatch, group: int) -> UpdateBatch:
    bad = repeat_rows(batch.group_ids == group, batch.advantages.offsets)
    return replace(batch, advantages=batch.advantages.with_values(batch.advantages.values.masked_fill(bad, math.inf)))


# --- the loss ---------------------------------------------------------------------------------------------------------


@EVERY_AGGREGATION
def test_the_loss_of_a_step_is_that_of_the_formulas(
    make_trainer: MakeTrainer, make_batch: MakeBatch, aggregation: str
) -> None:
    batch, trainer = make_batch(4, ref=True), make_trainer()
    scored, entropy = trainer.logprobs(batch.sequences, 0.8)
    assert batch.ref_logprobs is not None
    columns = (scored, batch.old_logprobs, batch.ref_logprobs, batch.advantages, entropy, batch.mask)
    rows = []
    for row in range(ROWS):
        tokens = zip(*(column.gather(torch.tensor([row])).values.tolist() for column in columns), strict=True)
        losses = []
        for lp, old, ref, advantage, spread, valid in tokens:
            if valid:
                rho = math.exp(lp - old)
                policy = max(-advantage * rho, -advantage * min(max(rho, 0.8), 1.28))
                policy = min(policy, -3 * advantage) if advantage < 0 else policy
                losses.append(policy - 0.01 * spread + 0.1 * min(10.0, math.exp(ref - lp) - 1 - (ref - lp)))
        if losses:
            rows.append(losses)
    sums, count = [sum(row) for row in rows], sum(map(len, rows))
    expected = {
        "token-mean": sum(sums) / count,
        "token-sum": sum(sums),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "seq-mean-token-sum": sum(sums) / len(rows),
        "seq-mean-token-sum-norm": sum(sums) / len(rows) / 12,
    }[aggregation]
    objective = make_objective(aggregation, kl_coef=0.1, entropy_coef=0.01)
    (step,) = trainer.update(batch, objective, replace(BATCHING, max_tokens=40))
    assert step.values["loss"] == pytest.approx(expected, rel=1e-4)
    assert (step.rows, step.tokens, step.optimizer_step) == (ROWS, count, 1)


def test_metrics_are_means_over_valid_tokens(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    batch, trainer = make_batch(2, ref=True), make_trainer()
    scored, entropy = trainer.logprobs(batch.sequences, 0.8)
    valid = batch.mask.values.bool()
    ratio = (scored.values - batch.old_logprobs.values)[valid].exp()
    advantages = batch.advantages.values[valid]
    assert batch.ref_logprobs is not None
    (step,) = trainer.update(batch, make_objective(kl=k2, kl_coef=0.1), replace(BATCHING, max_tokens=30))
    expected = {
        "entropy": entropy.values[valid].mean(),
        "approx_kl": (batch.old_logprobs.values - scored.values)[valid].mean(),
        "kl": ((scored.values - batch.ref_logprobs.values)[valid] ** 2 / 2).mean(),
        "ratio": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "clip_fraction_high": ((ratio > 1.28) & (advantages > 0)).float().mean(),
        "clip_fraction_low": ((ratio < 0.8) & (advantages < 0)).float().mean(),
        "trained_rows": (segment_sum(batch.mask.values.long(), batch.mask.offsets) > 0).sum(),
        "skipped": torch.tensor(0.0),
        "lr": torch.tensor(1e-3),
    }
    for name, value in expected.items():
        assert step.values[name] == pytest.approx(float(value), rel=1e-4, abs=1e-6), name
    assert step.values["clip_fraction_high"] > 0 and step.values["clip_fraction_low"] > 0
    assert 0 < step.values["padded_fraction"] < 1 and step.values["trained_rows"] < ROWS


def test_at_the_old_policy_the_gradient_is_that_of_the_plain_policy_gradient(
    make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    batch = make_batch(1, noise=0.0)

    def plain(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Any:
        clipped = ppo_clip(logprobs, old, advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
        return replace(clipped, values=-advantages * logprobs)

    clipped, simple = make_trainer(), make_trainer()
    clipped.update(batch, make_objective(), BATCHING)
    simple.update(batch, make_objective(policy_loss=plain), BATCHING)
    torch.testing.assert_close(gradients(clipped), gradients(simple), rtol=1e-4, atol=1e-6)
    assert max(float(gradient.abs().max()) for gradient in gradients(clipped).values()) > 1e-3


def test_the_gradient_norm_is_clipped_and_reported_before_clipping(
    make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    batch, free, clipped = make_batch(1), make_trainer(), make_trainer(max_grad_norm=0.01)
    before = free.update(batch, make_objective(), BATCHING)[0].values["grad_norm"]
    after = clipped.update(batch, make_objective(), BATCHING)[0].values["grad_norm"]
    norms = [
        math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients(trainer).values()))
        for trainer in (free, clipped)
    ]
    assert (before, after) == (pytest.approx(norms[0], rel=1e-5), pytest.approx(before, rel=1e-6))
    assert norms[1] == pytest.approx(0.01, rel=1e-3)


# --- what must not matter ---------------------------------------------------------------------------------------------


@EVERY_AGGREGATION
def test_three_steps_give_the_same_parameters_for_any_size_of_micro_batch(
    make_trainer: MakeTrainer, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, aggregation: str
) -> None:
    batch, counts, results = make_batch(7, ref=True), [], []
    backward = TorchTrainer._backward

    def counted(self: TorchTrainer, *arguments: Any) -> None:
        counts[-1] += 1
        backward(self, *arguments)

    monkeypatch.setattr(TorchTrainer, "_backward", counted)
    for max_tokens in (10_000, 70, 18):
        counts.append(0)
        trainer = make_trainer(eps=1e-5)
        objective = make_objective(aggregation, kl_coef=0.1, entropy_coef=0.01)
        trainer.update(batch, objective, replace(BATCHING, epochs=3, max_tokens=max_tokens))
        assert trainer.optimizer_step == 3
        results.append(parameters(trainer))
    assert counts[0] == 3 and counts[0] < counts[1] < counts[2] and counts[2] >= 24
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=1e-6)
    start = parameters(make_trainer())
    assert max(float((results[0][name] - start[name]).abs().max()) for name in start) > 1e-3


def test_leaving_out_rows_without_signal_changes_nothing(
    make_trainer: MakeTrainer, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(5)
    silent = int((batch.group_ids == 3).sum()) + 1  # and the row without a valid token
    batching = replace(BATCHING, epochs=2)
    fast = make_trainer(eps=1e-5)
    steps = fast.update(batch, make_objective(), batching)
    assert [step.values["trained_rows"] for step in steps] == [ROWS - silent] * 2
    monkeypatch.setattr(torch_backend, "_rows_with_gradient", lambda part, objective: torch.arange(ROWS))
    slow = make_trainer(eps=1e-5)
    slow_steps = slow.update(batch, make_objective(), batching)
    assert [step.values["trained_rows"] for step in slow_steps] == [ROWS] * 2
    torch.testing.assert_close(parameters(fast), parameters(slow), rtol=0, atol=1e-6)
    assert [step.values["loss"] for step in steps] == pytest.approx([step.values["loss"] for step in slow_steps])


@pytest.mark.parametrize("changes", [{"kl_coef": 0.1}, {"entropy_coef": 0.1}])
def test_rows_of_advantage_0_are_trained_where_another_term_pulls_at_them(
    make_trainer: MakeTrainer, make_batch: MakeBatch, changes: dict[str, float]
) -> None:
    batch = only_group(make_batch(5, ref="kl_coef" in changes), 3)
    trainer = make_trainer()
    (step,) = trainer.update(batch, make_objective(**changes), BATCHING)
    assert step.values["trained_rows"] == 3
    assert step.values["grad_norm"] > 1e-3


def test_a_step_without_any_signal_is_a_step_with_gradient_0(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer = make_trainer()
    before = trainer.digest()
    (step,) = trainer.update(only_group(make_batch(5), 3), make_objective(), BATCHING)
    assert (step.values["grad_norm"], step.values["trained_rows"], step.values["loss"]) == (0.0, 0.0, 0.0)
    assert trainer.optimizer_step == 1 and trainer.digest() == before


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("column", ["old_logprobs", "ref_logprobs", "advantages"])
@pytest.mark.parametrize("kl", [k2, k3])
def test_what_stands_at_a_masked_token_has_no_influence(
    make_trainer: MakeTrainer, make_batch: MakeBatch, column: str, poison: float, kl: Any
) -> None:
    batch = make_batch(6, ref=True)
    masked = batch.mask.values == 0
    rows = getattr(batch, column)
    poisoned = replace(batch, **{column: rows.with_values(rows.values.masked_fill(masked, poison))})
    objective = make_objective(kl=kl, kl_coef=0.1)
    clean, other = make_trainer(), make_trainer()
    expected = clean.update(batch, objective, BATCHING)[0].values
    assert other.update(poisoned, objective, BATCHING)[0].values == expected
    assert other.digest() == clean.digest()


def test_extreme_log_ratios_give_finite_steps(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    batch = make_batch(6, ref=True)
    assert batch.ref_logprobs is not None
    shifts = torch.tensor([50.0, -50.0]).repeat(len(batch.mask.values))[: len(batch.mask.values)]
    batch = replace(
        batch,
        old_logprobs=batch.old_logprobs.with_values(batch.old_logprobs.values + shifts),
        ref_logprobs=batch.ref_logprobs.with_values(batch.ref_logprobs.values - shifts),
    )
    (step,) = make_trainer().update(batch, make_objective(kl_coef=0.1), BATCHING)
    assert step.values["skipped"] == 0.0
    assert all(math.isfinite(value) for value in step.values.values())


# --- gradients that are not finite ------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_leaves_weights_and_optimizer_as_they_were(
    make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    batch, trainer = make_batch(1), make_trainer()
    trainer.update(batch, make_objective(), BATCHING)
    before = trainer.digest()
    bad = only_group(with_infinite_advantages(batch, 8), 8)
    (step,) = trainer.update(bad, make_objective(), replace(BATCHING, max_skipped=1))
    assert (step.values["skipped"], step.optimizer_step, trainer.digest()) == (1.0, 1, before)
    # The next step is as if the bad one had never been.
    other = make_trainer()
    for _ in range(2):
        other.update(batch, make_objective(), BATCHING)
    trainer.update(batch, make_objective(), BATCHING)
    assert trainer.digest() == other.digest()


def test_skipped_steps_are_counted_and_too_many_stop_the_update(
    make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    batch = with_infinite_advantages(make_batch(1), 8)
    batching = replace(BATCHING, mini_batch_groups=1, epochs=2, max_skipped=2)
    trainer = make_trainer()
    steps = trainer.update(batch, make_objective(), batching)
    assert sum(step.values["skipped"] for step in steps) == 2.0
    assert (len(steps), trainer.optimizer_step) == (8, 6)
    with pytest.raises(
        NonFiniteError, match=r"2 gradients of one iteration were NaN or infinite \(trainer\.max_skipped=1\)"
    ):
        make_trainer().update(batch, make_objective(), replace(batching, max_skipped=1))


# --- optimizer --------------------------------------------------------------------------------------------------------


def test_the_learning_rate_follows_the_schedule_step_by_step(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer = make_trainer(decay_steps=6, lr=0.01, schedule="linear", warmup_steps=2, final_lr_fraction=0.2)
    steps: list[StepMetrics] = []
    for _ in range(2):
        steps += trainer.update(make_batch(1), make_objective(), replace(BATCHING, epochs=4))
    rates = [step.values["lr"] for step in steps]
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.008, 0.006, 0.004, 0.002, 0.002])
    assert [step.optimizer_step for step in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [step.epoch for step in steps] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_weight_decay_shrinks_matrices_and_leaves_vectors(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer = make_trainer(lr=0.1, weight_decay=0.5)
    before = parameters(trainer)
    trainer.update(only_group(make_batch(5), 3), make_objective(), BATCHING)  # no signal: nothing but decay
    kinds = set()
    for name, after in parameters(trainer).items():
        kinds.add(after.ndim)
        factor = 1 - 0.1 * 0.5 if after.ndim >= 2 else 1.0
        torch.testing.assert_close(after, before[name] * factor, rtol=1e-6, atol=0)
    assert kinds == {1, 2}


def test_the_first_step_of_adamw_moves_by_the_learning_rate(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer = make_trainer(lr=0.002, eps=1e-12)
    before = parameters(trainer)
    trainer.update(make_batch(1), make_objective(), BATCHING)
    for name, gradient in gradients(trainer).items():
        moved = before[name] - parameters(trainer)[name]
        clear = gradient.abs() > 1e-6
        torch.testing.assert_close(moved[clear], 0.002 * gradient[clear].sign(), rtol=1e-3, atol=1e-6)


# --- save and restore -------------------------------------------------------------------------------------------------


def test_a_restored_trainer_goes_on_bit_for_bit(
    make_trainer: MakeTrainer, make_batch: MakeBatch, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"decay_steps": 6, "schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.1}
    batching = replace(BATCHING, mini_batch_groups=2)

    def iteration(trainer: TorchTrainer, number: int) -> list[StepMetrics]:
        return trainer.update(make_batch(number), make_objective(), replace(batching, seed=number))[:1]

    through = make_trainer(**options)
    for number in range(3):
        iteration(through, number)
    at_save = through.digest()
    through.save(tmp_path)
    assert through.digest() == at_save
    expected = [iteration(through, number) for number in range(3, 6)]

    resumed = make_trainer(**options)
    iteration(resumed, 9)  # whatever it held before must not matter
    resumed.restore(tmp_path)
    assert (resumed.digest(), resumed.optimizer_step) == (at_save, 6)
    assert [iteration(resumed, number) for number in range(3, 6)] == expected
    assert resumed.digest() == through.digest() != at_save
    assert resumed.optimizer_step == 12


@pytest.mark.parametrize("holds_a_training_state", [False, True])
def test_going_back_to_the_initial_policy_forgets_all_training_state(
    make_trainer: MakeTrainer,
    make_batch: MakeBatch,
    make_model: Callable[..., Any],
    tmp_path: Path,
    holds_a_training_state: bool,
) -> None:
    used, fresh = make_trainer(), make_trainer()
    used.update(make_batch(1), make_objective(), BATCHING)
    if holds_a_training_state:
        used.save(tmp_path)
    make_model().save_pretrained(tmp_path)
    used.restore_weights(tmp_path)
    assert (used.optimizer_step, used.digest()) == (0, fresh.digest())
    for trainer in (used, fresh):
        trainer.update(make_batch(2), make_objective(), BATCHING)
    assert used.digest() == fresh.digest()


# --- mini-batches -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(
    group_ids=st.lists(st.integers(-3, 6), min_size=1, max_size=30),
    size=st.none() | st.integers(1, 10),
    seed=st.integers(0, 2**62),
)
def test_mini_batches_are_whole_groups_and_hold_every_row_once(
    group_ids: list[int], size: int | None, seed: int
) -> None:
    batches = mini_batches(torch.tensor(group_ids), replace(BATCHING, mini_batch_groups=size, seed=seed), 0)
    assert sorted(row for rows in batches for row in rows.tolist()) == list(range(len(group_ids)))
    groups = [{group_ids[row] for row in rows.tolist()} for rows in batches]
    assert sum(map(len, groups)) == len(set(group_ids))  # no group is in two of them
    assert all(len(each) == (size or len(set(group_ids))) for each in groups[:-1]) and groups[-1]


def test_the_shuffle_follows_from_seed_and_epoch_alone() -> None:
    group_ids = torch.arange(40) // 2

    def order(seed: int, epoch: int) -> list[list[int]]:
        batching = replace(BATCHING, mini_batch_groups=3, seed=seed)
        return [rows.tolist() for rows in mini_batches(group_ids, batching, epoch)]

    first = order(0, 0)
    torch.manual_seed(99)
    assert order(0, 0) == first
    assert order(0, 1) != first and order(1, 0) != first and order(0, 1) != order(1, 0)


def test_an_update_does_not_touch_the_global_random_state(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    batch, trainer = make_batch(1), make_trainer()
    before = torch.get_rng_state()
    trainer.update(batch, make_objective(), replace(BATCHING, mini_batch_groups=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_row_longer_than_the_budget_is_an_error_that_names_the_setting(
    make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    with pytest.raises(ConfigError, match=r"does not fit into trainer\.max_tokens=4"):
        make_trainer().update(make_batch(1), make_objective(), replace(BATCHING, max_tokens=4))


def test_bfloat16_passes_keep_float32_weights_and_give_nearly_the_same_gradient(
    make_trainer: MakeTrainer, make_batch: MakeBatch, make_model: Callable[..., Any]
) -> None:
    exact = make_trainer()
    optimizer = OptimizerConfig(lr=1e-3, max_grad_norm=1e6)
    mixed = TorchTrainer(make_model(), optimizer, decay_steps=100, dtype=torch.bfloat16, max_tokens=10_000)
    batch = make_batch()
    for trainer in (exact, mixed):
        trainer.update(batch, make_objective(), BATCHING)
    assert {parameter.dtype for parameter in parameters(mixed).values()} == {torch.float32}
    ours, theirs = (torch.cat([each.flatten() for each in gradients(t).values()]) for t in (mixed, exact))
    assert not torch.equal(ours, theirs), "the passes really were in bfloat16"
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.98
