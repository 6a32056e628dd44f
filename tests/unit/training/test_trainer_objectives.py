"""The loss of an update with each term and each loss that an algorithm may ask for."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lib.algorithms.kl import k2
from grpo_lib.algorithms.losses import LOSSES, gspo, ppo_clip, reinforce
from grpo_lib.algorithms.rollout_correction import Importance, Rejection, correct_rows
from grpo_lib.data.ragged import Ragged, repeat_rows, segment_sum
from grpo_lib.errors import AlgorithmError
from grpo_lib.seeds import derive_seed
from grpo_lib.training.base import KlTerm, Objective, StepMetrics, UpdateBatch
from grpo_lib.training.minibatches import token_draws
from grpo_lib.training.trainer import Trainer
from tests.tiny_models import tiny_model
from tests.unit.training.test_logprobs import logits_one_row_at_a_time, perturbed
from tests.unit.training.trainers import (
    BATCHING,
    KL,
    ROWS,
    gradients,
    make_batch,
    make_objective,
    make_trainer,
    only_group,
    parameters,
)

# --- a KL penalty and its gradient ------------------------------------------------------------------------------------


def other_policy() -> Any:
    return perturbed(tiny_model())


def by_hand(
    model: Any, batch: UpdateBatch, kl: Callable[[Tensor, Tensor], Tensor], reference: Any
) -> tuple[float, dict[str, Tensor]]:
    """Token-mean of -A lp + 0.1 KL from the model's own logits; ``kl`` is of ``log_p [n, V]`` and ``log_q [n, V]``."""
    valid = batch.mask.values.bool()
    log_p = logits_one_row_at_a_time(model, batch.sequences, 0.8).log_softmax(-1)
    with torch.no_grad():
        log_q = logits_one_row_at_a_time(reference, batch.sequences, 0.8).log_softmax(-1)
    logprobs = of_tokens(log_p, batch)
    loss = (-batch.advantages.values * logprobs + 0.1 * kl(log_p, log_q))[valid].mean()
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters()}


def of_tokens(log_p: Tensor, batch: UpdateBatch) -> Tensor:
    return log_p.gather(1, batch.sequences.responses.values.long()[:, None]).squeeze(1)


def check_against(trainer: Trainer, steps: list[StepMetrics], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert steps[0].values["loss"] == pytest.approx(expected[0], rel=1e-4, abs=1e-5)
    torch.testing.assert_close(gradients(trainer), expected[1], rtol=2e-3, atol=5e-6)


@pytest.mark.parametrize("max_tokens", [10_000, 30])
@pytest.mark.parametrize("importance", [False, True])
def test_the_exact_kl_is_that_of_the_full_logits_of_both_models(max_tokens: int, importance: bool) -> None:
    batch, reference = make_batch(2), other_policy()
    trainer = make_trainer(reference=other_policy)
    term = KlTerm(coef=0.1, estimator=None, importance=importance)
    objective = make_objective(policy_loss=reinforce, kl=term)
    steps = trainer.update(batch, objective, replace(BATCHING, max_tokens=max_tokens))
    values: list[Tensor] = []

    def exact(log_p: Tensor, log_q: Tensor) -> Tensor:
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        kl = kl * (of_tokens(log_p, batch) - batch.old_logprobs.values).exp() if importance else kl
        values.append(kl.detach()[batch.mask.values.bool()])
        return kl

    check_against(trainer, steps, by_hand(tiny_model(), batch, exact, reference))
    assert steps[0].values["kl"] == pytest.approx(float(values[0].mean()), rel=1e-4)
    assert trainer.reference is not None
    assert all(parameter.grad is None for parameter in trainer.reference.model.parameters())


def test_the_exact_kl_with_a_plus_has_its_value_and_the_gradient_of_k2() -> None:
    batch, reference = make_batch(2), other_policy()
    plus, plain = (make_trainer(reference=other_policy) for _ in range(2))
    term = KlTerm(coef=0.1, estimator=None)
    straight = replace(term, straight_through=True)
    (step,) = plus.update(batch, make_objective(policy_loss=reinforce, kl=straight), BATCHING)
    (other,) = plain.update(batch, make_objective(policy_loss=reinforce, kl=term), BATCHING)
    assert {name: step.values[name] for name in ("loss", "kl")} == {name: other.values[name] for name in ("loss", "kl")}

    def squares(log_p: Tensor, log_q: Tensor) -> Tensor:
        return (of_tokens(log_p, batch) - of_tokens(log_q, batch)).square() / 2

    _, gradient = by_hand(tiny_model(), batch, squares, reference)
    torch.testing.assert_close(gradients(plus), gradient, rtol=2e-3, atol=5e-6)
    assert any(not torch.allclose(gradients(plus)[name], gradients(plain)[name], rtol=0.05) for name in gradient)


def test_a_kl_with_importance_has_a_gradient_through_the_ratio() -> None:
    batch, reference = make_batch(2), other_policy()
    scored = make_trainer(reference=other_policy).ref_logprobs(batch.sequences, 0.8)
    batch = replace(batch, ref_logprobs=scored)
    trainer = make_trainer()
    term = KlTerm(coef=0.1, estimator=k2, importance=True)
    steps = trainer.update(batch, make_objective(policy_loss=reinforce, kl=term), BATCHING)

    def squares(log_p: Tensor, log_q: Tensor) -> Tensor:
        ratio = (of_tokens(log_p, batch) - batch.old_logprobs.values).exp()
        return ratio * (of_tokens(log_p, batch) - of_tokens(log_q, batch)).square() / 2

    check_against(trainer, steps, by_hand(tiny_model(), batch, squares, reference))


# --- rollout correction -----------------------------------------------------------------------------------------------


def random_weights(batch: UpdateBatch) -> Ragged:
    generator = torch.Generator().manual_seed(1)
    return batch.mask.with_values(0.1 + 2 * torch.rand(len(batch.mask.values), generator=generator))


@pytest.mark.parametrize("loss", [reinforce, partial(ppo_clip, clip_low=0.1, clip_high=0.1), gspo])
def test_importance_weights_multiply_the_loss_of_their_tokens_and_no_other_term(loss: Any) -> None:
    batch = make_batch(3, ref=True)
    weights = random_weights(batch)
    weighed = replace(batch, is_weights=weights)
    scaled = replace(batch, advantages=batch.advantages.with_values(batch.advantages.values * weights.values))
    objective = make_objective(policy_loss=loss, kl=KL, entropy_coef=0.01)
    ours, theirs, without = make_trainer(), make_trainer(), make_trainer()
    (step,) = ours.update(weighed, objective, replace(BATCHING, max_tokens=40))
    (other,) = theirs.update(scaled, objective, BATCHING)
    assert step.values["loss"] == pytest.approx(other.values["loss"], rel=1e-4)
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-3, atol=1e-6)
    valid = batch.mask.values.bool()
    assert step.values["is_weight"] == pytest.approx(float(weights.values[valid].mean()))
    (plain,) = without.update(batch, objective, BATCHING)
    assert plain.values["loss"] != pytest.approx(step.values["loss"], rel=1e-2) and "is_weight" not in plain.values


def bypass(batch: UpdateBatch, trainer: Trainer) -> tuple[Tensor, Tensor]:
    """Ratio of the current policy to the engine's, ``[N]``; and rows' ratio over their valid tokens, ``[B]``."""
    scored, _ = trainer.logprobs(batch.sequences, 0.8)
    valid = batch.mask.values.bool()
    log_ratio = (scored.values - batch.old_logprobs.values).masked_fill(~valid, 0.0)
    return log_ratio.exp(), segment_sum(log_ratio, batch.mask.offsets).exp()


RULES: dict[str, dict[str, Any]] = {
    "token": {"importance": Importance(level="token", upper=1.1), "rejections": [Rejection(kind="token", upper=1.3)]},
    "sequence": {
        "importance": Importance(level="sequence", upper=1.15, lower=0.8),
        "rejections": [Rejection(kind="sequence", upper=1.4)],
    },
    "rejection only": {"importance": None, "rejections": [Rejection(kind="token", upper=1.3)]},
}


def corrected_by_hand(batch: UpdateBatch, trainer: Trainer, rule: str) -> UpdateBatch:
    """The batch with mask and weights as the current policy makes them."""
    tokens, rows = bypass(batch, trainer)
    by_token = repeat_rows(rows, batch.mask.offsets)
    kept, weights = {
        "token": ((tokens >= 1 / 1.3) & (tokens <= 1.3), tokens.clamp(max=1.1)),
        "sequence": (
            (by_token >= 1 / 1.4) & (by_token <= 1.4),
            by_token.masked_fill((by_token < 0.8) | (by_token > 1.15), 0.0),
        ),
        "rejection only": ((tokens >= 1 / 1.3) & (tokens <= 1.3), None),
    }[rule]
    mask = batch.mask.values.bool() & kept
    assert 0 < int(mask.sum()) < int(batch.mask.values.sum())
    return replace(
        batch,
        mask=batch.mask.with_values(mask.to(torch.uint8)),
        is_weights=None if weights is None else batch.mask.with_values(weights),
    )


@pytest.mark.parametrize("loss", [reinforce, gspo])
@pytest.mark.parametrize("rule", RULES)
def test_in_bypass_mode_weights_and_rejection_follow_the_policy_from_step_to_step(rule: str, loss: Any) -> None:
    batch = make_batch(3, ref=True)
    trainer, other = make_trainer(lr=0.01, eps=1e-4), make_trainer(lr=0.01, eps=1e-4)
    # A sum: of what is rejected nothing is left in the denominator either.
    objective = make_objective("token-sum", policy_loss=loss, kl=KL, entropy_coef=0.01)
    steps = trainer.update(
        batch,
        replace(objective, correction=partial(correct_rows, **RULES[rule])),
        replace(BATCHING, epochs=3, max_tokens=40),
    )
    masks = []
    for step in steps:
        by_hand = corrected_by_hand(batch, other, rule)
        masks.append(by_hand.mask.values)
        (expected,) = other.update(by_hand, objective, BATCHING)
        given, left = (int(each.mask.values.sum()) for each in (batch, by_hand))
        assert step.values["rejected_fraction"] == pytest.approx(1 - left / given)
        for name in ("loss", "kl", "entropy", "ratio", "approx_kl", "grad_norm"):
            assert step.values[name] == pytest.approx(expected.values[name], rel=2e-3, abs=1e-5), name
        assert ("is_weight" in step.values) == (rule != "rejection only")
    assert not torch.equal(masks[0], masks[-1]), "the policy moved, and with it what is rejected"
    # Three steps of up to 0.01; Adam turns rounding of small gradients into some thousandths of a step.
    torch.testing.assert_close(parameters(trainer), parameters(other), rtol=0, atol=5e-5)


def test_in_bypass_mode_the_denominator_counts_what_was_given() -> None:
    """It has to be known before the first backward pass."""
    batch, correction = make_batch(3), partial(correct_rows, **RULES["token"])
    losses = {}
    for aggregation in ("token-sum", "token-mean"):
        objective = make_objective(aggregation, correction=correction)
        losses[aggregation] = make_trainer().update(batch, objective, BATCHING)[0].values["loss"]
    assert losses["token-mean"] * int(batch.mask.values.sum()) == pytest.approx(losses["token-sum"], rel=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -1e30])
@pytest.mark.parametrize("column", ["advantages", "ref_logprobs"])
def test_a_token_that_is_rejected_in_bypass_mode_has_no_influence(column: str, poison: float) -> None:
    batch = make_batch(3, ref=True)
    clean, other = make_trainer(), make_trainer()
    tokens, _ = bypass(batch, clean)
    rejected = (tokens < 1 / 1.3) | (tokens > 1.3)
    rows = getattr(batch, column)
    poisoned = replace(batch, **{column: rows.with_values(rows.values.masked_fill(rejected, poison))})
    objective = make_objective(kl=KL, correction=partial(correct_rows, **RULES["token"]))
    expected = clean.update(batch, objective, BATCHING)[0].values
    assert other.update(poisoned, objective, BATCHING)[0].values == expected
    assert other.digest() == clean.digest() and expected["rejected_fraction"] > 0.05


def test_a_mini_batch_that_is_rejected_as_a_whole_stops_the_update() -> None:
    batch = make_batch(3)
    far = replace(batch, old_logprobs=batch.old_logprobs.with_values(batch.old_logprobs.values - 5))
    correction = partial(correct_rows, importance=None, rejections=[Rejection(kind="token", upper=2.0)])
    with pytest.raises(
        AlgorithmError, match=r"every token that could change the policy \(optimizer step 1\) is rejected; loosen"
    ):
        make_trainer().update(far, make_objective(correction=correction), replace(BATCHING, max_tokens=40))
    silent = replace(only_group(far, 3), is_weights=None)  # without a signal nobody asks
    (step,) = make_trainer().update(silent, make_objective(correction=correction), BATCHING)
    assert step.values["grad_norm"] == 0.0


# --- every loss -------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 0.05, "clip_high": 0.05},
    "clip_cov": {"clip_cov_ratio": 0.5, "cov_low": -100.0, "cov_high": 100.0},
    "kl_cov": {"kl_cov_ratio": 0.3},
}
EVERY_LOSS = pytest.mark.parametrize("name", [entry.name for entry in LOSSES])


def objective_of(name: str, **changes: Any) -> Objective:
    loss, options = LOSSES[name], OPTIONS.get(name, {})
    return make_objective(
        str(loss.traits.get("aggregation", "token-mean")),
        policy_loss=loss.bind(options, "test"),
        select=loss.bind_helper(options, "test"),
        zero_without_advantage=bool(loss.traits.get("zero_without_advantage", True)),
        **changes,
    )


@EVERY_LOSS
def test_an_update_depends_neither_on_micro_batches_nor_on_the_order_of_rows(name: str) -> None:
    batch = make_batch(7)
    batch = replace(batch, is_weights=random_weights(batch))
    turned = batch.gather(torch.tensor([7, 2, 11, 0, 5, 9, 4, 1, 10, 3, 8, 6]))
    batching = replace(BATCHING, epochs=2, mini_batch_groups=2)
    results = []
    for rows, max_tokens in ((batch, 10_000), (batch, 18), (turned, 40)):
        trainer = make_trainer(eps=1e-4)
        steps = trainer.update(rows, objective_of(name), replace(batching, max_tokens=max_tokens))
        assert trainer.optimizer_step == 4
        results.append((parameters(trainer), [step.values["loss"] for step in steps]))
    for other, losses in results[1:]:
        torch.testing.assert_close(other, results[0][0], rtol=0, atol=1e-5)
        assert losses == pytest.approx(results[0][1], rel=1e-3, abs=1e-5)
    start = parameters(make_trainer())
    assert max(float((results[0][0][name] - start[name]).abs().max()) for name in start) > 1e-3


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_are_chosen_once_among_all_valid_tokens_of_the_mini_batch(name: str) -> None:
    batch, trainer = make_batch(7), make_trainer()
    scored, _ = trainer.logprobs(batch.sequences, 0.8)
    valid = batch.mask.values.bool()
    draws = token_draws(batch.row_seeds, batch.mask.offsets, derive_seed(BATCHING.seed, "select", 0))
    objective = objective_of(name)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    taken: list[Tensor] = []
    assert objective.select is not None
    choose = objective.select

    def select(logprobs: Tensor, advantages: Tensor, draws: Tensor) -> Tensor:
        seen.append((logprobs, advantages, draws))
        columns = (logprobs, advantages, draws) if name == "clip_cov" else (logprobs, advantages)
        chosen: Tensor = choose(*columns)
        return chosen

    def loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, selected: Tensor) -> Any:
        taken.append(selected)
        return objective.policy_loss(logprobs, old_logprobs, advantages, selected)

    trainer.update(batch, replace(objective, select=select, policy_loss=loss), replace(BATCHING, max_tokens=18))
    ((logprobs, advantages, given),) = seen
    assert torch.equal(logprobs, scored.values[valid]) and torch.equal(advantages, batch.advantages.values[valid])
    assert torch.equal(given, draws[valid])
    columns = (logprobs, advantages, given) if name == "clip_cov" else (logprobs, advantages)
    expected, count = int(choose(*columns).sum()), sum(int(each.sum()) for each in taken)
    assert 0 < expected < int(valid.sum()) and len(taken) > 4
    if name == "kl_cov":  # rows of zero advantages are trained too
        assert count == expected
    else:
        assert count <= expected


@EVERY_LOSS
def test_rows_of_advantage_0_are_trained_by_the_losses_that_say_so(name: str) -> None:
    batch, trainer = only_group(make_batch(5), 3), make_trainer()
    (step,) = trainer.update(batch, objective_of(name), BATCHING)
    if name in ("dro", "kl_cov"):
        assert step.values["trained_rows"] == 3 and step.values["grad_norm"] > 1e-3
    else:
        assert step.values["trained_rows"] == step.values["grad_norm"] == 0.0
        made = make_trainer()
        forced = replace(objective_of(name), zero_without_advantage=False)
        (all_rows,) = made.update(batch, forced, BATCHING)
        assert all_rows.values["trained_rows"] == 3 and all_rows.values["grad_norm"] == 0.0  # rightly left out


def test_a_row_that_stands_twice_counts_twice() -> None:
    batch = make_batch(1)

    def gradient(*rows: int) -> Tensor:
        trainer = make_trainer()
        (step,) = trainer.update(batch.gather(torch.tensor(rows)), make_objective("token-sum"), BATCHING)
        assert (step.rows, step.tokens) == (len(rows), sum(int(tokens[row]) for row in rows))
        return torch.cat([each.flatten() for each in gradients(trainer).values()])

    tokens = segment_sum(batch.mask.values.long(), batch.mask.offsets)
    torch.testing.assert_close(gradient(0, 5, 0, 0), 3 * gradient(0) + gradient(5), rtol=1e-3, atol=1e-5)
    assert float(gradient(0).abs().max()) > 1e-3 and float(gradient(5).abs().max()) > 1e-3


def test_groups_without_a_token_left_make_no_optimizer_step() -> None:
    batch = make_batch(1)
    gone = repeat_rows((batch.group_ids == 5) | (batch.group_ids == 1), batch.mask.offsets)
    batch = replace(batch, mask=batch.mask.with_values(batch.mask.values.masked_fill(gone, 0)))
    trainer = make_trainer()
    steps = trainer.update(batch, make_objective(), replace(BATCHING, mini_batch_groups=1, epochs=2))
    assert [step.rows for step in steps if step.epoch == 0] in ([3, 5], [5, 3])
    assert trainer.optimizer_step == 4
    nothing = replace(batch, mask=batch.mask.with_values(torch.zeros_like(batch.mask.values)))
    (step,) = make_trainer().update(nothing, make_objective(kl=None), replace(BATCHING, mini_batch_groups=1))
    assert (step.values["grad_norm"], step.values["loss"], step.tokens, step.rows) == (0.0, 0.0, 0, ROWS)


def test_every_epoch_draws_anew_for_the_choice_of_tokens() -> None:
    objective, seen = objective_of("clip_cov"), []

    def select(logprobs: Tensor, advantages: Tensor, draws: Tensor) -> Tensor:
        seen.append(draws)
        return torch.zeros(len(draws), dtype=torch.bool)

    make_trainer().update(make_batch(7), replace(objective, select=select), replace(BATCHING, epochs=2))
    first, second = seen
    assert len(first) == len(second) and not bool((first == second).any())
