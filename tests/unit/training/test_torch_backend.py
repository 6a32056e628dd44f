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
from grpo_lib.algorithms.losses import LOSSES, gspo, ppo_clip, reinforce
from grpo_lib.algorithms.rollout_correction import Importance, Rejection, correct_rows
from grpo_lib.config import OptimizerConfig
from grpo_lib.data.ragged import Ragged, repeat_rows, segment_sum
from grpo_lib.errors import AlgorithmError, ConfigError, NonFiniteError
from grpo_lib.seeds import derive_seed
from grpo_lib.training import torch_backend
from grpo_lib.training.base import Batching, KlTerm, Objective, StepMetrics, UpdateBatch
from grpo_lib.training.microbatches import Sequences
from grpo_lib.training.minibatches import mini_batches, token_draws
from grpo_lib.training.torch_backend import TorchTrainer
from tests.unit.training.test_logprobs import logits_one_row_at_a_time, perturbed

MakeTrainer = Callable[..., TorchTrainer]
MakeBatch = Callable[..., UpdateBatch]
ROWS = 12
KL = KlTerm(coef=0.1, estimator=k3)
BATCHING = Batching(epochs=1, mini_batch_groups=None, max_tokens=10_000, seed=3, max_skipped=0)
EVERY_AGGREGATION = pytest.mark.parametrize("aggregation", AGGREGATIONS.names())


def make_objective(aggregation: str = "token-mean", **changes: Any) -> Objective:
    standard = Objective(
        policy_loss=partial(ppo_clip, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
        aggregation=lambda mask, offsets: AGGREGATIONS[aggregation].function(mask, offsets, 12),
        temperature=0.8,
    )
    return replace(standard, **changes)


@pytest.fixture
def make_trainer(make_model: Callable[..., Any]) -> MakeTrainer:
    """A trainer of the same tiny Qwen3 each time."""

    def make(decay_steps: int = 100, reference: Any = None, **optimizer: Any) -> TorchTrainer:
        chosen = OptimizerConfig(**{"lr": 1e-3, "max_grad_norm": 1e6, **optimizer})
        return TorchTrainer(
            make_model(),
            chosen,
            decay_steps=decay_steps,
            dtype=torch.float32,
            max_tokens=10_000,
            reference=reference,
        )

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
            row_seeds=100 + torch.arange(ROWS),
        )

    return make


def parameters(trainer: TorchTrainer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def gradients(trainer: TorchTrainer) -> dict[str, Tensor]:
    """Of the last step."""
    return {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}


def only_group(batch: UpdateBatch, group: int) -> UpdateBatch:
    return batch.gather(torch.nonzero(batch.group_ids == group).squeeze(1))


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
    objective = make_objective(aggregation, kl=KL, entropy_coef=0.01)
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


def test_at_the_old_policy_the_gradient_is_that_of_the_plain_policy_gradient(
    make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    batch = make_batch(1, noise=0.0)

    clipped, simple = make_trainer(), make_trainer()
    clipped.update(batch, make_objective(), BATCHING)
    simple.update(batch, make_objective(policy_loss=reinforce), BATCHING)
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


# --- a KL penalty and its gradient ------------------------------------------------------------------------------------


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


def check_against(trainer: TorchTrainer, steps: list[StepMetrics], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert steps[0].values["loss"] == pytest.approx(expected[0], rel=1e-4, abs=1e-5)
    torch.testing.assert_close(gradients(trainer), expected[1], rtol=2e-3, atol=5e-6)


@pytest.mark.parametrize("max_tokens", [10_000, 30])
@pytest.mark.parametrize("importance", [False, True])
def test_the_exact_kl_is_that_of_the_full_logits_of_both_models(
    make_trainer: MakeTrainer, make_batch: MakeBatch, make_model: Callable[..., Any], max_tokens: int, importance: bool
) -> None:
    batch, reference = make_batch(2), perturbed(make_model())
    trainer = make_trainer(reference=reference)
    term = KlTerm(coef=0.1, estimator=None, importance=importance)
    objective = make_objective(policy_loss=reinforce, kl=term)
    steps = trainer.update(batch, objective, replace(BATCHING, max_tokens=max_tokens))
    values: list[Tensor] = []

    def exact(log_p: Tensor, log_q: Tensor) -> Tensor:
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        kl = kl * (of_tokens(log_p, batch) - batch.old_logprobs.values).exp() if importance else kl
        values.append(kl.detach()[batch.mask.values.bool()])
        return kl

    check_against(trainer, steps, by_hand(make_model(), batch, exact, reference))
    assert steps[0].values["kl"] == pytest.approx(float(values[0].mean()), rel=1e-4)
    assert all(parameter.grad is None for parameter in reference.parameters())


def test_the_exact_kl_with_a_plus_has_its_value_and_the_gradient_of_k2(
    make_trainer: MakeTrainer, make_batch: MakeBatch, make_model: Callable[..., Any]
) -> None:
    batch, reference = make_batch(2), perturbed(make_model())
    plus, plain = (make_trainer(reference=reference) for _ in range(2))
    term = KlTerm(coef=0.1, estimator=None)
    straight = replace(term, straight_through=True)
    (step,) = plus.update(batch, make_objective(policy_loss=reinforce, kl=straight), BATCHING)
    (other,) = plain.update(batch, make_objective(policy_loss=reinforce, kl=term), BATCHING)
    assert {name: step.values[name] for name in ("loss", "kl")} == {name: other.values[name] for name in ("loss", "kl")}

    def squares(log_p: Tensor, log_q: Tensor) -> Tensor:
        return (of_tokens(log_p, batch) - of_tokens(log_q, batch)).square() / 2

    _, gradient = by_hand(make_model(), batch, squares, reference)
    torch.testing.assert_close(gradients(plus), gradient, rtol=2e-3, atol=5e-6)
    assert any(not torch.allclose(gradients(plus)[name], gradients(plain)[name], rtol=0.05) for name in gradient)


def test_a_kl_with_importance_has_a_gradient_through_the_ratio(
    make_trainer: MakeTrainer, make_batch: MakeBatch, make_model: Callable[..., Any]
) -> None:
    batch, reference = make_batch(2), perturbed(make_model())
    scored, _ = TorchTrainer(
        reference, OptimizerConfig(), decay_steps=None, dtype=torch.float32, max_tokens=999
    ).logprobs(batch.sequences, 0.8)
    batch = replace(batch, ref_logprobs=scored)
    trainer = make_trainer()
    term = KlTerm(coef=0.1, estimator=k2, importance=True)
    steps = trainer.update(batch, make_objective(policy_loss=reinforce, kl=term), BATCHING)

    def squares(log_p: Tensor, log_q: Tensor) -> Tensor:
        ratio = (of_tokens(log_p, batch) - batch.old_logprobs.values).exp()
        return ratio * (of_tokens(log_p, batch) - of_tokens(log_q, batch)).square() / 2

    check_against(trainer, steps, by_hand(make_model(), batch, squares, reference))


# --- rollout correction -----------------------------------------------------------------------------------------------


def random_weights(batch: UpdateBatch) -> Ragged:
    generator = torch.Generator().manual_seed(1)
    return batch.mask.with_values(0.1 + 2 * torch.rand(len(batch.mask.values), generator=generator))


@pytest.mark.parametrize("loss", [reinforce, partial(ppo_clip, clip_low=0.1, clip_high=0.1), gspo])
def test_importance_weights_multiply_the_loss_of_their_tokens_and_no_other_term(
    make_trainer: MakeTrainer, make_batch: MakeBatch, loss: Any
) -> None:
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


def bypass(batch: UpdateBatch, trainer: TorchTrainer) -> tuple[Tensor, Tensor]:
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


def corrected_by_hand(batch: UpdateBatch, trainer: TorchTrainer, rule: str) -> UpdateBatch:
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
def test_in_bypass_mode_weights_and_rejection_follow_the_policy_from_step_to_step(
    make_trainer: MakeTrainer, make_batch: MakeBatch, rule: str, loss: Any
) -> None:
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
    torch.testing.assert_close(parameters(trainer), parameters(other), rtol=0, atol=1e-5)


def test_in_bypass_mode_the_denominator_counts_what_was_given(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    """It has to be known before the first backward pass."""
    batch, correction = make_batch(3), partial(correct_rows, **RULES["token"])
    losses = {}
    for aggregation in ("token-sum", "token-mean"):
        objective = make_objective(aggregation, correction=correction)
        losses[aggregation] = make_trainer().update(batch, objective, BATCHING)[0].values["loss"]
    assert losses["token-mean"] * int(batch.mask.values.sum()) == pytest.approx(losses["token-sum"], rel=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -1e30])
@pytest.mark.parametrize("column", ["advantages", "ref_logprobs"])
def test_a_token_that_is_rejected_in_bypass_mode_has_no_influence(
    make_trainer: MakeTrainer, make_batch: MakeBatch, column: str, poison: float
) -> None:
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


def test_a_mini_batch_that_is_rejected_as_a_whole_stops_the_update(
    make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
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
def test_an_update_depends_neither_on_micro_batches_nor_on_the_order_of_rows(
    make_trainer: MakeTrainer, make_batch: MakeBatch, name: str
) -> None:
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
def test_tokens_are_chosen_once_among_all_valid_tokens_of_the_mini_batch(
    make_trainer: MakeTrainer, make_batch: MakeBatch, name: str
) -> None:
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


def test_draws_belong_to_the_token_of_a_row_wherever_it_stands() -> None:
    offsets, seeds = torch.tensor([0, 3, 4, 9]), torch.tensor([11, 12, 13])
    draws = Ragged(values=token_draws(seeds, offsets, 5), offsets=offsets)
    order = torch.tensor([2, 0, 2, 1])
    moved = draws.gather(order)
    assert torch.equal(token_draws(seeds[order], moved.offsets, 5), moved.values)
    longer = token_draws(seeds, torch.tensor([0, 5, 6, 11]), 5)
    assert torch.equal(longer[:3], draws.values[:3])  # of the position, not of the length
    assert bool(((draws.values >= 0) & (draws.values < 1)).all()) and len(set(draws.values.tolist())) == 9
    assert not bool((token_draws(seeds, offsets, 6) == draws.values).any())


@EVERY_LOSS
def test_rows_of_advantage_0_are_trained_by_the_losses_that_say_so(
    make_trainer: MakeTrainer, make_batch: MakeBatch, name: str
) -> None:
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


def test_a_row_that_stands_twice_counts_twice(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    batch = make_batch(1)

    def gradient(*rows: int) -> Tensor:
        trainer = make_trainer()
        (step,) = trainer.update(batch.gather(torch.tensor(rows)), make_objective("token-sum"), BATCHING)
        assert (step.rows, step.tokens) == (len(rows), sum(int(tokens[row]) for row in rows))
        return torch.cat([each.flatten() for each in gradients(trainer).values()])

    tokens = segment_sum(batch.mask.values.long(), batch.mask.offsets)
    torch.testing.assert_close(gradient(0, 5, 0, 0), 3 * gradient(0) + gradient(5), rtol=1e-3, atol=1e-5)
    assert float(gradient(0).abs().max()) > 1e-3 and float(gradient(5).abs().max()) > 1e-3


def test_groups_without_a_token_left_make_no_optimizer_step(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
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


def test_sums_of_squared_probabilities_come_back_in_the_rows_order(
    make_trainer: MakeTrainer, make_batch: MakeBatch, make_model: Callable[..., Any]
) -> None:
    sequences = make_batch(1).sequences
    trainer = make_trainer()
    trainer.max_tokens = 40
    found = trainer.sum_squared_probs(sequences, 0.8)
    with torch.no_grad():
        expected = logits_one_row_at_a_time(make_model(), sequences, 0.8).softmax(-1).square().sum(-1)
    assert torch.equal(found.offsets, sequences.responses.offsets) and not found.values.requires_grad
    torch.testing.assert_close(found.values.double(), expected, rtol=1e-4, atol=1e-6)


# --- what must not matter ---------------------------------------------------------------------------------------------


@EVERY_AGGREGATION
def test_three_steps_give_the_same_parameters_for_any_size_of_micro_batch(
    make_trainer: MakeTrainer, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, aggregation: str
) -> None:
    batch = make_batch(7, ref=True)
    counts: list[int] = []
    results: list[dict[str, Tensor]] = []
    backward = TorchTrainer._backward

    def counted(self: TorchTrainer, *arguments: Any) -> None:
        counts[-1] += 1
        backward(self, *arguments)

    monkeypatch.setattr(TorchTrainer, "_backward", counted)
    for max_tokens in (10_000, 70, 18):
        counts.append(0)
        trainer = make_trainer(eps=1e-5)
        objective = make_objective(aggregation, kl=KL, entropy_coef=0.01)
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
    monkeypatch.setattr(torch_backend, "rows_with_gradient", lambda *_: torch.arange(ROWS))
    slow = make_trainer(eps=1e-5)
    slow_steps = slow.update(batch, make_objective(), batching)
    assert [step.values["trained_rows"] for step in slow_steps] == [ROWS] * 2
    torch.testing.assert_close(parameters(fast), parameters(slow), rtol=0, atol=1e-6)
    assert [step.values["loss"] for step in steps] == pytest.approx([step.values["loss"] for step in slow_steps])


@pytest.mark.parametrize("changes", [{"kl": KL}, {"entropy_coef": 0.1}])
def test_rows_of_advantage_0_are_trained_where_another_term_pulls_at_them(
    make_trainer: MakeTrainer, make_batch: MakeBatch, changes: dict[str, Any]
) -> None:
    batch = only_group(make_batch(5, ref="kl" in changes), 3)
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
    objective = make_objective(kl=KlTerm(coef=0.1, estimator=kl))
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
    (step,) = make_trainer().update(batch, make_objective(kl=KL), BATCHING)
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


def full(group_ids: Tensor) -> Ragged:
    """A mask of one valid token a row."""
    return Ragged(values=torch.ones(len(group_ids), dtype=torch.uint8), offsets=torch.arange(len(group_ids) + 1))


@settings(deadline=None, max_examples=50)
@given(
    group_ids=st.lists(st.integers(-3, 6), min_size=1, max_size=30),
    size=st.none() | st.integers(1, 10),
    seed=st.integers(0, 2**62),
)
def test_mini_batches_are_whole_groups_and_hold_every_row_once(
    group_ids: list[int], size: int | None, seed: int
) -> None:
    ids = torch.tensor(group_ids)
    batches = mini_batches(full(ids), ids, replace(BATCHING, mini_batch_groups=size, seed=seed), 0)
    assert sorted(row for rows in batches for row in rows.tolist()) == list(range(len(group_ids)))
    groups = [{group_ids[row] for row in rows.tolist()} for rows in batches]
    assert sum(map(len, groups)) == len(set(group_ids))  # no group is in two of them
    assert all(len(each) == (size or len(set(group_ids))) for each in groups[:-1]) and groups[-1]


@settings(deadline=None, max_examples=50)
@given(
    rows=st.lists(st.tuples(st.integers(-3, 6), st.booleans(), st.booleans()), min_size=1, max_size=30),
    size=st.integers(1, 4),
)
def test_groups_without_a_token_left_are_in_no_mini_batch(rows: list[tuple[int, bool, bool]], size: int) -> None:
    """So that every optimizer step is made of ``size`` groups that say something."""
    ids = torch.tensor([group for group, _, _ in rows])
    tokens = torch.tensor([[first, second] for _, first, second in rows], dtype=torch.uint8)
    mask = Ragged(values=tokens.flatten(), offsets=2 * torch.arange(len(rows) + 1))
    alive = {group for group, first, second in rows if first or second}
    batches = mini_batches(mask, ids, replace(BATCHING, mini_batch_groups=size), 0)
    if not alive:
        assert [each.tolist() for each in batches] == [list(range(len(rows)))]  # a step is made all the same
        return
    groups = [{int(ids[row]) for row in each} for each in batches]
    assert set.union(*groups) == alive
    assert [len(each) for each in groups[:-1]] == [size] * (len(batches) - 1) and len(groups[-1]) <= size
    # A group is whole: rows without a token belong to it too.
    assert sorted(int(row) for each in batches for row in each) == [i for i, row in enumerate(rows) if row[0] in alive]


def test_the_shuffle_follows_from_seed_and_epoch_alone() -> None:
    group_ids = torch.arange(40) // 2

    def order(seed: int, epoch: int) -> list[list[int]]:
        batching = replace(BATCHING, mini_batch_groups=3, seed=seed)
        return [rows.tolist() for rows in mini_batches(full(group_ids), group_ids, batching, epoch)]

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


def test_every_epoch_draws_anew_for_the_choice_of_tokens(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    objective, seen = objective_of("clip_cov"), []

    def select(logprobs: Tensor, advantages: Tensor, draws: Tensor) -> Tensor:
        seen.append(draws)
        return torch.zeros(len(draws), dtype=torch.bool)

    make_trainer().update(make_batch(7), replace(objective, select=select), replace(BATCHING, epochs=2))
    first, second = seen
    assert len(first) == len(second) and not bool((first == second).any())
