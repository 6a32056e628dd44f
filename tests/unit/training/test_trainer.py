import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.kl import k2, k3
from grpo_lib.algorithms.losses import reinforce
from grpo_lib.data.ragged import segment_sum
from grpo_lib.errors import ConfigError, ModelError, NonFiniteError
from grpo_lib.training import trainer as trainer_module
from grpo_lib.training.base import KlTerm, StepMetrics, UpdateBatch
from grpo_lib.training.flops import FlopCounter
from grpo_lib.training.learner import TorchLearner
from grpo_lib.training.updates import update_summary
from tests.tiny_models import VOCABULARY, random_sequences, tiny_model
from tests.unit.training.test_logprobs import logits_one_row_at_a_time
from tests.unit.training.trainers import (
    BATCHING,
    EXACT_KL,
    KL,
    LORA,
    ROWS,
    assert_same,
    gradients,
    make_batch,
    make_objective,
    make_reference,
    make_trainer,
    one_by_one,
    only_group,
    parameters,
    state,
    with_infinite_advantages,
)

EVERY_AGGREGATION = pytest.mark.parametrize("aggregation", AGGREGATIONS.names())

# --- the loss ---------------------------------------------------------------------------------------------------------


@EVERY_AGGREGATION
def test_the_loss_of_a_step_is_that_of_the_formulas(aggregation: str) -> None:
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
    objective = make_objective(aggregation, kl=KL, entropy_coef=0.01)
    (step,) = trainer.update(batch, objective, replace(BATCHING, max_tokens=40))
    assert step.values["loss"] == pytest.approx(expected, rel=1e-4)
    assert (step.rows, step.tokens, step.optimizer_step) == (ROWS, count, 1)


def test_metrics_are_means_over_valid_tokens() -> None:
    batch, trainer = make_batch(2, ref=True), make_trainer(settings={"layout": "padded"})
    scored, entropy = trainer.logprobs(batch.sequences, 0.8)
    valid = batch.mask.values.bool()
    ratio = (scored.values - batch.old_logprobs.values)[valid].exp()
    advantages = batch.advantages.values[valid]
    assert batch.ref_logprobs is not None
    (step,) = trainer.update(batch, make_objective(kl=KlTerm(coef=0.1, estimator=k2)), replace(BATCHING, max_tokens=30))
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


def test_at_the_old_policy_the_gradient_is_that_of_the_plain_policy_gradient() -> None:
    batch = make_batch(1, noise=0.0)

    clipped, simple = make_trainer(), make_trainer()
    clipped.update(batch, make_objective(), BATCHING)
    simple.update(batch, make_objective(policy_loss=reinforce), BATCHING)
    torch.testing.assert_close(gradients(clipped), gradients(simple), rtol=1e-4, atol=1e-6)
    assert max(float(gradient.abs().max()) for gradient in gradients(clipped).values()) > 1e-3


def test_the_gradient_norm_is_clipped_and_reported_before_clipping() -> None:
    batch, free, clipped = make_batch(1), make_trainer(), make_trainer(max_grad_norm=0.01)
    before = free.update(batch, make_objective(), BATCHING)[0].values["grad_norm"]
    after = clipped.update(batch, make_objective(), BATCHING)[0].values["grad_norm"]
    norms = [
        math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients(trainer).values()))
        for trainer in (free, clipped)
    ]
    assert (before, after) == (pytest.approx(norms[0], rel=1e-5), pytest.approx(before, rel=1e-6))
    assert norms[1] == pytest.approx(0.01, rel=1e-3)


def test_sums_of_squared_probabilities_come_back_in_the_rows_order() -> None:
    sequences = make_batch(1).sequences
    trainer = make_trainer(settings={"max_tokens": 40})
    found = trainer.sum_squared_probs(sequences, 0.8)
    with torch.no_grad():
        expected = logits_one_row_at_a_time(tiny_model(), sequences, 0.8).softmax(-1).square().sum(-1)
    assert torch.equal(found.offsets, sequences.responses.offsets) and not found.values.requires_grad
    torch.testing.assert_close(found.values.double(), expected, rtol=1e-4, atol=1e-6)


# --- what must not matter ---------------------------------------------------------------------------------------------


@EVERY_AGGREGATION
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_three_steps_give_the_same_parameters_for_any_size_of_micro_batch(
    monkeypatch: pytest.MonkeyPatch, layout: str, aggregation: str
) -> None:
    batch = make_batch(7, ref=True)
    counts: list[int] = []
    results: list[dict[str, Tensor]] = []
    backward = TorchLearner.backward

    def counted(self: TorchLearner, loss: Tensor) -> None:
        counts[-1] += 1
        backward(self, loss)

    monkeypatch.setattr(TorchLearner, "backward", counted)
    for max_tokens in (10_000, 70, 18):
        counts.append(0)
        trainer = make_trainer(eps=1e-5, settings={"layout": layout})
        objective = make_objective(aggregation, kl=KL, entropy_coef=0.01)
        trainer.update(batch, objective, replace(BATCHING, epochs=3, max_tokens=max_tokens))
        assert trainer.optimizer_step == 3
        results.append(parameters(trainer))
    assert counts[0] == 3 and counts[0] < counts[1] < counts[2] and counts[2] >= 24
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=1e-6)
    start = parameters(make_trainer())
    assert max(float((results[0][name] - start[name]).abs().max()) for name in start) > 1e-3


def test_leaving_out_rows_without_signal_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(5)
    silent = int((batch.group_ids == 3).sum()) + 1  # and the row without a valid token
    batching = replace(BATCHING, epochs=2)
    fast = make_trainer(eps=1e-5)
    steps = fast.update(batch, make_objective(), batching)
    assert [step.values["trained_rows"] for step in steps] == [ROWS - silent] * 2
    monkeypatch.setattr(trainer_module, "rows_with_gradient", lambda *_: torch.arange(ROWS))
    slow = make_trainer(eps=1e-5)
    slow_steps = slow.update(batch, make_objective(), batching)
    assert [step.values["trained_rows"] for step in slow_steps] == [ROWS] * 2
    torch.testing.assert_close(parameters(fast), parameters(slow), rtol=0, atol=1e-6)
    assert [step.values["loss"] for step in steps] == pytest.approx([step.values["loss"] for step in slow_steps])


@pytest.mark.parametrize("changes", [{"kl": KL}, {"entropy_coef": 0.1}])
def test_rows_of_advantage_0_are_trained_where_another_term_pulls_at_them(changes: dict[str, Any]) -> None:
    batch = only_group(make_batch(5, ref="kl" in changes), 3)
    trainer = make_trainer()
    (step,) = trainer.update(batch, make_objective(**changes), BATCHING)
    assert step.values["trained_rows"] == 3
    assert step.values["grad_norm"] > 1e-3


def test_a_step_without_any_signal_is_a_step_with_gradient_0() -> None:
    trainer = make_trainer()
    before = trainer.digest()
    (step,) = trainer.update(only_group(make_batch(5), 3), make_objective(), BATCHING)
    assert (step.values["grad_norm"], step.values["trained_rows"], step.values["loss"]) == (0.0, 0.0, 0.0)
    assert trainer.optimizer_step == 1 and trainer.digest() == before


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("column", ["old_logprobs", "ref_logprobs", "advantages"])
@pytest.mark.parametrize("kl", [k2, k3])
def test_what_stands_at_a_masked_token_has_no_influence(column: str, poison: float, kl: Any) -> None:
    batch = make_batch(6, ref=True)
    masked = batch.mask.values == 0
    rows = getattr(batch, column)
    poisoned = replace(batch, **{column: rows.with_values(rows.values.masked_fill(masked, poison))})
    objective = make_objective(kl=KlTerm(coef=0.1, estimator=kl))
    clean, other = make_trainer(), make_trainer()
    expected = clean.update(batch, objective, BATCHING)[0].values
    assert other.update(poisoned, objective, BATCHING)[0].values == expected
    assert other.digest() == clean.digest()


def test_extreme_log_ratios_give_finite_steps() -> None:
    batch = make_batch(6, ref=True)
    assert batch.ref_logprobs is not None
    shifts = torch.tensor([50.0, -50.0]).repeat(len(batch.mask.values))[: len(batch.mask.values)]
    batch = replace(
        batch,
        old_logprobs=batch.old_logprobs.with_values(batch.old_logprobs.values + shifts),
        ref_logprobs=batch.ref_logprobs.with_values(batch.ref_logprobs.values - shifts),
    )
    (step,) = make_trainer().update(batch, make_objective(kl=KL), BATCHING)
    assert step.values["skipped"] == 0.0
    assert all(math.isfinite(value) for value in step.values.values())


def test_an_update_does_not_touch_the_global_random_state() -> None:
    batch, trainer = make_batch(1), make_trainer()
    before = torch.get_rng_state()
    trainer.update(batch, make_objective(), replace(BATCHING, mini_batch_groups=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_row_longer_than_the_budget_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"does not fit into trainer\.max_tokens=4"):
        make_trainer().update(make_batch(1), make_objective(), replace(BATCHING, max_tokens=4))


def test_bfloat16_passes_keep_float32_weights_and_give_nearly_the_same_gradient() -> None:
    exact = make_trainer()
    mixed = make_trainer(dtype=torch.bfloat16)
    batch = make_batch()
    for trainer in (exact, mixed):
        trainer.update(batch, make_objective(), BATCHING)
    assert {parameter.dtype for parameter in parameters(mixed).values()} == {torch.float32}
    ours, theirs = (torch.cat([each.flatten() for each in gradients(t).values()]) for t in (mixed, exact))
    assert not torch.equal(ours, theirs), "the passes really were in bfloat16"
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.98


# --- gradients that are not finite ------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_leaves_weights_and_optimizer_as_they_were() -> None:
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


def test_skipped_steps_are_counted_and_too_many_stop_the_update() -> None:
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


def test_the_learning_rate_follows_the_schedule_step_by_step() -> None:
    trainer = make_trainer(decay_steps=6, lr=0.01, schedule="linear", warmup_steps=2, final_lr_fraction=0.2)
    steps: list[StepMetrics] = []
    for _ in range(2):
        steps += trainer.update(make_batch(1), make_objective(), replace(BATCHING, epochs=4))
    rates = [step.values["lr"] for step in steps]
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.008, 0.006, 0.004, 0.002, 0.002])
    assert [step.optimizer_step for step in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [step.epoch for step in steps] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_weight_decay_shrinks_matrices_and_leaves_vectors() -> None:
    trainer = make_trainer(lr=0.1, weight_decay=0.5)
    before = parameters(trainer)
    trainer.update(only_group(make_batch(5), 3), make_objective(), BATCHING)  # no signal: nothing but decay
    kinds = set()
    for name, after in parameters(trainer).items():
        kinds.add(after.ndim)
        factor = 1 - 0.1 * 0.5 if after.ndim >= 2 else 1.0
        torch.testing.assert_close(after, before[name] * factor, rtol=1e-6, atol=0)
    assert kinds == {1, 2}


def test_the_first_step_of_adamw_moves_by_the_learning_rate() -> None:
    trainer = make_trainer(lr=0.002, eps=1e-12)
    before = parameters(trainer)
    trainer.update(make_batch(1), make_objective(), BATCHING)
    for name, gradient in gradients(trainer).items():
        moved = before[name] - parameters(trainer)[name]
        clear = gradient.abs() > 1e-6
        torch.testing.assert_close(moved[clear], 0.002 * gradient[clear].sign(), rtol=1e-3, atol=1e-6)


# --- what ends early, and what learns alone ---------------------------------------------------------------------------

CRITIC = {"lr": 1e-2, "value_clip": None}


def moving_away(critic: bool = False) -> UpdateBatch:
    """Every token becomes less likely from step to step, so that the distance to the old policy grows."""
    batch = make_batch(1, noise=0.0, values=critic)
    return replace(batch, advantages=batch.advantages.with_values(-torch.ones_like(batch.advantages.values)))


@pytest.mark.parametrize("settings", [{}, LORA], ids=["plain", "LoRA"])
def test_a_step_beyond_the_bound_on_the_kl_is_not_taken_and_ends_the_iteration(settings: dict[str, Any]) -> None:
    batch, objective, batching = moving_away(), make_objective(policy_loss=reinforce), replace(BATCHING, epochs=5)
    options: dict[str, Any] = {"settings": settings, "lr": 1e-2}
    free = [step.values["approx_kl"] for step in make_trainer(**options).update(batch, objective, batching)]
    assert free[0] == pytest.approx(0.0, abs=1e-6) and sorted(free) == free and free[2] > 1.5 * free[1] > 0.001
    stopped, expected = make_trainer(**options), make_trainer(**options)
    bounded = replace(batching, max_kl=(free[1] + free[2]) / 2)
    steps = stopped.update(batch, objective, bounded)
    expected.update(batch, objective, replace(batching, epochs=2))
    assert [step.values["stopped_early"] for step in steps] == [0.0, 0.0, 1.0]
    assert [step.optimizer_step for step in steps] == [1, 2, 2]
    assert [step.values["approx_kl"] for step in steps] == pytest.approx(free[:3], rel=1e-5)
    assert ["grad_norm" in step.values for step in steps] == [True, True, False]
    assert_same(state(stopped), state(expected))
    for trainer in (stopped, expected):  # and nothing of its gradient is left
        trainer.update(make_batch(2), make_objective(), BATCHING)
    assert_same(state(stopped), state(expected))


def test_every_mini_batch_is_held_to_the_bound() -> None:
    batch, objective = moving_away(), make_objective(policy_loss=reinforce)
    batching = replace(BATCHING, mini_batch_groups=1, epochs=3, max_kl=1e-9)
    steps = make_trainer().update(batch, objective, batching)
    assert len(steps) < 12 and [step.values["stopped_early"] for step in steps] == [0.0] * (len(steps) - 1) + [1.0]


def test_without_a_bound_an_iteration_goes_on_and_says_nothing_of_stopping() -> None:
    trainer = make_trainer(lr=0.05)
    objective = make_objective(policy_loss=reinforce)
    steps = trainer.update(moving_away(), objective, replace(BATCHING, epochs=5))
    assert (len(steps), trainer.optimizer_step) == (5, 5) and steps[-1].values["approx_kl"] > 1
    assert not any("stopped_early" in step.values for step in steps)


def test_progress_tells_steps_done_and_tokens() -> None:
    batch, seen = moving_away(), []
    count = int(batch.mask.values.sum())
    make_trainer().update(batch, make_objective(), replace(BATCHING, epochs=2), lambda *numbers: seen.append(numbers))
    assert seen == [(1, 2, count), (2, 2, 2 * count)]


@pytest.mark.parametrize("settings", [{}, LORA], ids=["plain", "LoRA"])
def test_while_the_critic_warms_up_the_policy_stays_bit_for_bit(settings: dict[str, Any]) -> None:
    batch = make_batch(1, values=True)
    trainer, fresh = (make_trainer(settings=settings, critic=CRITIC) for _ in range(2))
    for each in (trainer, fresh):
        each.update(batch, make_objective(), BATCHING)  # so that there are moments
    before = state(trainer)
    warm_up = replace(BATCHING, epochs=4, train_policy=False, max_kl=1e-9)
    steps = trainer.update(batch, make_objective(kl=EXACT_KL, entropy_coef=0.1), warm_up)
    after = state(trainer)
    assert after[0] == before[0] == 1 and [step.optimizer_step for step in steps] == [1] * 4
    assert_same(after[1], before[1])
    errors = [step.values["value_error"] for step in steps]
    assert errors[-1] < 0.9 * errors[0] and sorted(errors, reverse=True) == errors
    assert not {"loss", "entropy", "grad_norm", "lr", "model_tflop", "stopped_early"} & steps[0].values.keys()
    # The critic learns what it learns beside a policy, and the policy goes on as if nothing had been.
    fresh.update(batch, make_objective(), replace(BATCHING, epochs=4))
    assert_same(state(trainer)[2], state(fresh)[2])
    for each in (trainer, fresh):
        each.policy.load(before[1][0], before[1][1])
        each.optimizer_step = 1
        each.update(make_batch(2, values=True), make_objective(), BATCHING)
    assert_same(state(trainer), state(fresh))


def test_a_loss_that_chooses_tokens_is_not_asked_while_the_critic_warms_up() -> None:
    def select(logprobs: Tensor, advantages: Tensor) -> Tensor:
        raise AssertionError("nobody needs it")

    objective = make_objective(select=select)
    trainer = make_trainer(critic=CRITIC)
    (step,) = trainer.update(make_batch(1, values=True), objective, replace(BATCHING, train_policy=False))
    assert step.values["critic_grad_norm"] > 0


# --- numbers of a step ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "max_tokens", "prompts"),
    [("packed", 10_000, "once"), ("packed", 1, "each"), ("padded", 30, "each"), ("padded", 10_000, "each")],
)
def test_work_is_counted_without_padding_a_shared_prompt_once(
    monkeypatch: pytest.MonkeyPatch, layout: str, max_tokens: int, prompts: str
) -> None:
    if max_tokens == 1:
        monkeypatch.setattr(trainer_module, "plan_sequences", one_by_one)
    batch = make_batch(2, ref=True)
    trainer = make_trainer(settings={"layout": layout})
    objective = make_objective(kl=KlTerm(coef=0.1, estimator=k2))
    (step,) = trainer.update(batch, objective, replace(BATCHING, max_tokens=max_tokens))
    rows = batch.sequences.gather(segment_sum(batch.mask.values.long(), batch.mask.offsets).nonzero().squeeze(1))
    alone, again = rows.prompts.lengths, rows.prompt_lengths
    assert len(alone) < len(again)
    tokens, squares = int(rows.lengths.sum()), float(rows.lengths.square().sum())
    if prompts == "once":
        tokens += int(alone.sum() - again.sum())
        squares += float(alone.square().sum() - again.square().sum())
    assert step.values["model_tokens"] == tokens
    flop = FlopCounter(tiny_model()).count(tokens, squares, len(rows.responses.values))
    assert step.values["model_tflop"] == pytest.approx(flop / 1e12)
    assert (step.values["padded_fraction"] == 0) == (layout == "packed")


def test_a_step_of_no_rows_says_nothing_of_tokens() -> None:
    """An entropy of 0 would count in the iteration's mean."""
    trainer = make_trainer()
    steps = trainer.update(make_batch(5), make_objective(), replace(BATCHING, mini_batch_groups=1))
    (silent,) = [step for step in steps if step.values["trained_rows"] == 0]  # group 3
    assert set(silent.values) == {"loss", "trained_rows", "model_tokens", "model_tflop", "grad_norm", "lr", "skipped"}
    assert silent.values["model_tokens"] == silent.values["model_tflop"] == 0.0
    assert update_summary(steps)["entropy"] > 1


def test_a_mini_batch_that_ends_the_iteration_does_not_train_the_critic_either() -> None:
    trainer = make_trainer(critic={"lr": 1e-2}, lr=0.1)
    before = trainer.critic_digest()
    batch = make_batch(2, values=True)
    (step,) = trainer.update(batch, make_objective(), replace(BATCHING, max_kl=1e-9, epochs=3))
    assert step.values["stopped_early"] == 1 and trainer.critic_digest() == before
    trainer.update(batch, make_objective(), BATCHING)
    assert trainer.critic_digest() != before


def test_no_rows_have_no_scores() -> None:
    nothing = random_sequences(1, 4).gather(torch.arange(0))
    logprobs, entropy = make_trainer().logprobs(nothing, 1.0)
    assert (logprobs.rows, len(logprobs.values), len(entropy.values)) == (0, 0, 0)


def test_a_reference_of_another_vocabulary_is_refused() -> None:
    def other() -> Any:
        model = tiny_model()
        model.resize_token_embeddings(VOCABULARY + 8)
        return model

    with pytest.raises(ModelError, match=f"a vocabulary of {VOCABULARY + 8} tokens, the policy one of {VOCABULARY}"):
        make_reference(make_trainer(), other)
