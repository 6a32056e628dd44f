"""The critic alone, and beside the policy in a trainer."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.losses import ppo_clip
from grpo_lib.algorithms.rollout_correction import Rejection, correct_rows
from grpo_lib.config import CriticConfig, OptimizerConfig
from grpo_lib.data.ragged import segment_sum
from grpo_lib.errors import AlgorithmError, NonFiniteError
from grpo_lib.training.base import Batching, Objective, StepMetrics, UpdateBatch
from grpo_lib.training.critic import Critic
from grpo_lib.training.microbatches import MicroBatch, Sequences, micro_batch
from grpo_lib.training.torch_backend import TorchTrainer

MakeCritic = Callable[..., Critic]
MakeTrainer = Callable[..., TorchTrainer]
MakeBatch = Callable[..., UpdateBatch]
MakeSequences = Callable[[int, int], Sequences]
ROWS = 8
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
BATCHING = Batching(epochs=1, mini_batch_groups=None, max_tokens=10_000, seed=3, max_skipped=1)
OBJECTIVE = Objective(
    policy_loss=partial(ppo_clip, clip_low=0.2, clip_high=0.2, dual_clip=3.0),
    aggregation=lambda mask, offsets: AGGREGATIONS["token-mean"].function(mask, offsets, 12),
    temperature=0.8,
)


@pytest.fixture
def make_critic(make_model: Callable[..., Any]) -> MakeCritic:
    def make(architecture: str = "qwen3", autocast: torch.dtype | None = None, **critic: Any) -> Critic:
        settings = CriticConfig(**{"lr": 1e-2, "value_clip": None, "max_grad_norm": 1e6, **critic})
        return Critic(make_model(architecture), settings, autocast=autocast, max_tokens=10_000)

    return make


@pytest.fixture
def make_trainer(make_model: Callable[..., Any], make_critic: MakeCritic) -> MakeTrainer:
    def make(architecture: str = "qwen3", **critic: Any) -> TorchTrainer:
        return TorchTrainer(
            make_model(architecture),
            OptimizerConfig(lr=1e-3, max_grad_norm=1e6),
            decay_steps=None,
            dtype=torch.float32,
            max_tokens=10_000,
            critic=make_critic(architecture, **critic),
        )

    return make


@pytest.fixture
def make_batch(make_sequences: MakeSequences) -> MakeBatch:
    """Some tokens are masked; returns and old values are random unless given."""

    def make(seed: int = 0, returns: float | None = None) -> UpdateBatch:
        generator = torch.Generator().manual_seed(seed)
        sequences = make_sequences(seed, ROWS)
        responses, tokens = sequences.responses, len(sequences.responses.values)
        mask = (torch.rand(tokens, generator=generator) < 0.8).to(torch.uint8)
        mask[0] = 1
        drawn = torch.randn(3, tokens, generator=generator)
        given = drawn[1] if returns is None else torch.full((tokens,), returns)
        return UpdateBatch(
            sequences=sequences,
            mask=responses.with_values(mask),
            old_logprobs=responses.with_values(-3 - drawn[0].abs()),
            advantages=responses.with_values(drawn[0] * mask),
            ref_logprobs=None,
            group_ids=torch.arange(ROWS) // 2,
            row_seeds=torch.arange(ROWS),
            values=responses.with_values(0.1 * drawn[2]),
            returns=responses.with_values(given),
        )

    return make


def whole(sequences: Sequences) -> MicroBatch:
    return micro_batch(sequences, torch.arange(sequences.responses.rows))


def with_random_head(critic: Critic) -> Critic:
    with torch.no_grad():
        critic.head.weight.copy_(torch.randn(critic.head.weight.shape, generator=torch.Generator().manual_seed(2)))
    return critic


def gradients(critic: Critic) -> dict[str, Tensor]:
    named = {**dict(critic.backbone.named_parameters()), "head": critic.head.weight}
    return {name: p.grad.clone() for name, p in named.items() if p.grad is not None}


def weights(critic: Critic) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in critic.weights().items()}


def policy(trainer: TorchTrainer) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in trainer.weights().items()}


# --- values -----------------------------------------------------------------------------------------------------------


@EVERY_ARCHITECTURE
def test_every_value_is_0_at_the_start(
    make_critic: MakeCritic, make_sequences: MakeSequences, architecture: str
) -> None:
    sequences = make_sequences(1, 5)
    values = make_critic(architecture).values(sequences)
    assert torch.equal(values.offsets, sequences.responses.offsets)
    assert not bool(values.values.any()) and values.values.dtype == torch.float32


@EVERY_ARCHITECTURE
def test_values_are_read_off_before_each_response_token_whatever_the_batching(
    make_critic: MakeCritic, make_sequences: MakeSequences, make_model: Callable[..., Any], architecture: str
) -> None:
    sequences, critic = make_sequences(3, 9), with_random_head(make_critic(architecture))
    backbone, rows = make_model(architecture).base_model, []
    with torch.no_grad():
        for row in range(9):
            alone = sequences.gather(torch.tensor([row]))
            prompt, response = alone.prompts.values.long(), alone.responses.values.long()
            hidden = backbone(input_ids=torch.cat([prompt, response])[None]).last_hidden_state[0]
            rows.append(hidden[len(prompt) - 1 : -1] @ critic.head.weight[0])
    expected = torch.cat(rows)
    assert float(expected.abs().max()) > 0.1
    for critic.max_tokens in (18, 60, 10_000):
        torch.testing.assert_close(critic.values(sequences).values, expected, rtol=1e-4, atol=1e-5)


def test_a_value_knows_nothing_of_its_token_and_what_follows(
    make_critic: MakeCritic, make_sequences: MakeSequences
) -> None:
    sequences, critic = make_sequences(3, 4), with_random_head(make_critic())
    changed = sequences.responses.values.clone()
    last = sequences.responses.offsets[1:] - 1
    changed[last] = (changed[last] + 1) % 23
    other = replace(sequences, responses=sequences.responses.with_values(changed))
    torch.testing.assert_close(critic.values(other).values, critic.values(sequences).values, rtol=0, atol=1e-6)


def test_values_are_float32_under_autocast(make_critic: MakeCritic, make_sequences: MakeSequences) -> None:
    sequences = make_sequences(3, 4)
    exact, reduced = (
        with_random_head(make_critic(autocast=dtype)).values(sequences).values for dtype in (None, torch.bfloat16)
    )
    assert reduced.dtype == torch.float32
    assert 0 < float((exact - reduced).abs().max()) < 0.2


# --- the value loss ---------------------------------------------------------------------------------------------------


def test_the_loss_and_its_gradient_are_those_of_the_formula(
    make_critic: MakeCritic, make_sequences: MakeSequences
) -> None:
    sequences, critic = make_sequences(1, 3), make_critic()
    batch = whole(sequences)
    tokens = len(batch.targets)
    taken = torch.arange(tokens) % 3 != 0
    count = int(taken.sum())
    share, returns = torch.linspace(0.1, 1, count), torch.linspace(-2, 2, count)
    loss, values = critic.backward(batch, taken, torch.zeros(count), returns, share)
    assert not bool(values.any()) and loss == pytest.approx(float((share * returns.square()).sum()) / 2, rel=1e-5)
    with torch.no_grad():
        hidden = critic.backbone(input_ids=batch.input_ids).last_hidden_state.flatten(0, 1)[batch.predicts]
    assert critic.head.weight.grad is not None
    torch.testing.assert_close(
        critic.head.weight.grad[0], -((share * returns)[:, None] * hidden[taken]).sum(0), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("clip", "returns", "expected", "flat"),
    [
        (None, -1.0, 0.5, False),  # (0 + 1)^2 / 2
        (0.2, -1.0, 1.62, True),  # the value is 0, its old one 1: clipped it is 0.8, (0.8 + 1)^2 / 2
        (0.2, 0.9, 0.405, False),  # (0 - 0.9)^2 / 2 is more than (0.8 - 0.9)^2 / 2
        (5.0, -1.0, 0.5, False),
    ],
)
def test_a_value_that_moved_too_far_has_no_gradient(
    make_critic: MakeCritic,
    make_sequences: MakeSequences,
    clip: float | None,
    returns: float,
    expected: float,
    flat: bool,
) -> None:
    critic, batch = make_critic(value_clip=clip), whole(make_sequences(1, 1))  # one token
    every, one = torch.tensor([True]), torch.ones(1)
    loss, _ = critic.backward(batch, every, one, one * returns, one)
    assert loss == pytest.approx(expected)
    assert critic.head.weight.grad is not None
    assert bool(critic.head.weight.grad.any()) != flat


def test_the_gradient_norm_is_clipped_and_reported_before_clipping(
    make_critic: MakeCritic, make_sequences: MakeSequences
) -> None:
    batch = whole(make_sequences(1, 3))
    every = torch.ones(len(batch.targets), dtype=torch.bool)
    seen = []
    for bound in (1e6, 1e-3):
        critic = make_critic(max_grad_norm=bound)
        before = weights(critic)
        critic.backward(batch, every, every.float(), 5 * every.float(), every.float())
        norm = math.sqrt(sum(float(each.square().sum()) for each in gradients(critic).values()))
        seen.append(critic.step())
        assert seen[-1] == pytest.approx(norm, rel=1e-5) and gradients(critic) == {}
        assert not torch.equal(critic.head.weight.detach(), before["value_head.weight"])
    assert seen[0] == pytest.approx(seen[1]) and seen[0] > 1


def test_a_gradient_that_is_not_finite_leaves_the_critic_as_it_was(
    make_critic: MakeCritic, make_sequences: MakeSequences
) -> None:
    batch = whole(make_sequences(1, 3))
    one = torch.ones(len(batch.targets))
    critic, other = make_critic(), make_critic()
    before = critic.digest()
    critic.backward(batch, one.bool(), one, math.inf * one, one)
    assert not math.isfinite(critic.step()) and critic.digest() == before
    for each in (critic, other):  # and nothing of it is left
        each.backward(batch, one.bool(), one, 2 * one, one)
        each.step()
    assert critic.digest() == other.digest() != before


# --- in a trainer -----------------------------------------------------------------------------------------------------


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_critic_learns_a_constant_return(
    make_trainer: MakeTrainer, make_batch: MakeBatch, architecture: str, clip: float | None
) -> None:
    trainer = make_trainer(architecture, value_clip=clip)
    batch = make_batch(1, returns=2.0)
    errors, losses = [], []
    for _ in range(30):
        batch = replace(batch, values=trainer.values(batch.sequences))
        (step,) = trainer.update(batch, OBJECTIVE, BATCHING)
        errors.append(step.values["value_error"])
        losses.append(step.values["value_loss"])
    assert errors[0] == pytest.approx(4.0) and losses[0] == pytest.approx(2.0)  # every value was 0
    assert errors[-1] < 0.1 * errors[0] and losses[-1] < 0.1 * losses[0]
    valid = batch.mask.values.bool()
    assert float(trainer.values(batch.sequences).values[valid].mean()) == pytest.approx(2.0, abs=0.7)


def test_the_numbers_of_a_step_are_means_over_valid_tokens(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    batch, trainer = make_batch(2), make_trainer(value_clip=0.05)
    assert trainer.critic is not None and batch.values is not None and batch.returns is not None
    with_random_head(trainer.critic)
    valid = batch.mask.values.bool()
    values = trainer.values(batch.sequences).values[valid]
    old, returns = batch.values.values[valid], batch.returns.values[valid]
    near = old + (values - old).clamp(-0.05, 0.05)
    worst = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    (step,) = trainer.update(batch, OBJECTIVE, replace(BATCHING, max_tokens=30))
    assert step.values["value_loss"] == pytest.approx(float(worst.mean()) / 2, rel=1e-4)
    assert step.values["value"] == pytest.approx(float(values.mean()), rel=1e-4)
    assert step.values["value_error"] == pytest.approx(float(((values - returns) ** 2).mean()), rel=1e-4)
    assert step.values["critic_grad_norm"] > 0.1


def test_policy_and_critic_do_not_disturb_each_other(
    make_trainer: MakeTrainer, make_batch: MakeBatch, make_model: Callable[..., Any]
) -> None:
    batch = make_batch(2)
    alone = TorchTrainer(
        make_model(),
        OptimizerConfig(lr=1e-3, max_grad_norm=1e6),
        decay_steps=None,
        dtype=torch.float32,
        max_tokens=10_000,
    )
    alone.update(batch, OBJECTIVE, BATCHING)
    beside = make_trainer()
    beside.update(batch, OBJECTIVE, BATCHING)
    assert policy(beside).keys() == policy(alone).keys()
    torch.testing.assert_close(policy(beside), policy(alone), rtol=0, atol=1e-6)

    silent = replace(batch, advantages=batch.advantages.with_values(torch.zeros(len(batch.mask.values))))
    quiet = make_trainer()
    before = quiet.digest(), quiet.critic_digest()
    (step,) = quiet.update(silent, OBJECTIVE, BATCHING)
    assert quiet.digest() == before[0] and quiet.critic_digest() != before[1]
    filled = segment_sum(batch.mask.values.long(), batch.mask.offsets) > 0
    assert step.values["trained_rows"] == int(filled.sum())  # they say nothing to the policy, but to the critic
    assert quiet.critic_digest() == beside.critic_digest()


def test_the_critic_does_not_depend_on_micro_batches(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    results = []
    for max_tokens in (10_000, 18):
        trainer = make_trainer(lr=1e-3, value_clip=0.2)
        assert trainer.critic is not None
        batching = replace(BATCHING, max_tokens=max_tokens, epochs=3, mini_batch_groups=2)
        trainer.update(make_batch(2), OBJECTIVE, batching)
        results.append(weights(trainer.critic))
    # AdamW's first steps are of the size of the rate whatever the gradient; where that is rounding they may differ.
    for name in results[0]:
        difference = (results[0][name] - results[1][name]).abs()
        assert float((difference > 1e-5).float().mean()) < 0.01, name


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("column", ["values", "returns"])
def test_what_stands_at_a_masked_token_has_no_influence(
    make_trainer: MakeTrainer, make_batch: MakeBatch, column: str, poison: float
) -> None:
    batch = make_batch(2)
    rows = getattr(batch, column)
    masked = batch.mask.values == 0
    poisoned = replace(batch, **{column: rows.with_values(rows.values.masked_fill(masked, poison))})
    clean, other = make_trainer(value_clip=0.2), make_trainer(value_clip=0.2)
    assert other.update(poisoned, OBJECTIVE, BATCHING) == clean.update(batch, OBJECTIVE, BATCHING)
    assert other.critic_digest() == clean.critic_digest()


def test_in_bypass_mode_the_critic_learns_from_tokens_that_the_policy_may_not(
    make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    batch = make_batch(2)
    correction = partial(correct_rows, importance=None, rejections=[Rejection(kind="token", upper=1.5)])
    corrected, plain = make_trainer(), make_trainer()
    (step,) = corrected.update(batch, replace(OBJECTIVE, correction=correction), BATCHING)
    plain.update(batch, OBJECTIVE, BATCHING)
    assert 0.1 < step.values["rejected_fraction"] < 1
    assert corrected.critic_digest() == plain.critic_digest()
    assert corrected.digest() != plain.digest()


def test_a_trainer_without_a_critic_has_no_digest_of_one(make_model: Callable[..., Any]) -> None:
    trainer = TorchTrainer(make_model(), OptimizerConfig(), decay_steps=None, dtype=torch.float32, max_tokens=99)
    assert trainer.critic_digest() is None


# --- save and restore -------------------------------------------------------------------------------------------------


@EVERY_ARCHITECTURE
def test_a_restored_trainer_with_a_critic_goes_on_bit_for_bit(
    make_trainer: MakeTrainer, make_batch: MakeBatch, tmp_path: Path, architecture: str
) -> None:
    batching = replace(BATCHING, mini_batch_groups=2)

    def iteration(trainer: TorchTrainer, number: int) -> list[StepMetrics]:
        return trainer.update(make_batch(number), OBJECTIVE, batching)

    through = make_trainer(architecture)
    for number in range(3):
        iteration(through, number)
    at_save = (through.digest(), through.critic_digest())
    through.save(tmp_path)
    expected = [iteration(through, number) for number in range(3, 5)]

    resumed = make_trainer(architecture)
    iteration(resumed, 9)  # whatever it held before must not matter
    resumed.restore(tmp_path)
    assert (resumed.digest(), resumed.critic_digest()) == at_save
    assert [iteration(resumed, number) for number in range(3, 5)] == expected
    assert (resumed.digest(), resumed.critic_digest()) == (through.digest(), through.critic_digest())
    assert at_save[1] != through.critic_digest()


@EVERY_ARCHITECTURE
def test_a_critic_is_reset_to_what_it_was_made_as(
    make_critic: MakeCritic, make_model: Callable[..., Any], make_sequences: MakeSequences, architecture: str
) -> None:
    batch = whole(make_sequences(1, 3))
    one = torch.ones(len(batch.targets))

    def learn(critic: Critic, steps: int) -> None:
        for _ in range(steps):
            critic.backward(batch, one.bool(), one, 2 * one, one)
            critic.step()

    used, fresh = make_critic(architecture), make_critic(architecture)
    learn(used, 3)
    assert used.digest() != fresh.digest()
    used.reset(make_model(architecture))
    assert used.digest() == fresh.digest()
    learn(used, 2)
    learn(fresh, 2)
    assert used.digest() == fresh.digest()  # the moments are forgotten too


def test_going_back_to_the_initial_policy_resets_the_critic(
    make_trainer: MakeTrainer, make_batch: MakeBatch, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    make_model().save_pretrained(tmp_path)
    used, fresh = make_trainer(), make_trainer()
    used.update(make_batch(1), OBJECTIVE, BATCHING)
    used.restore_weights(tmp_path)
    assert used.critic_digest() == fresh.critic_digest()
    for trainer in (used, fresh):
        trainer.update(make_batch(2), OBJECTIVE, BATCHING)
    assert (used.digest(), used.critic_digest()) == (fresh.digest(), fresh.critic_digest())


def test_an_update_that_failed_half_way_leaves_nothing_in_a_restored_critic(
    make_trainer: MakeTrainer, make_batch: MakeBatch, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    make_model().save_pretrained(tmp_path / "initial")
    nothing_passes = partial(
        correct_rows, importance=None, rejections=[Rejection(kind="token", upper=1e-5, lower=1e-6)]
    )
    for back in ("reset", "restore"):
        trainer, expected = make_trainer(), make_trainer()
        (tmp_path / back).mkdir()
        trainer.save(tmp_path / back)
        with pytest.raises(AlgorithmError, match="is rejected"):
            trainer.update(make_batch(1), replace(OBJECTIVE, correction=nothing_passes), BATCHING)
        if back == "reset":
            trainer.restore_weights(tmp_path / "initial")
        else:
            trainer.restore(tmp_path / back)
        for each in (trainer, expected):
            each.update(make_batch(2), OBJECTIVE, BATCHING)
        assert (trainer.digest(), trainer.critic_digest()) == (expected.digest(), expected.critic_digest())


@EVERY_ARCHITECTURE
def test_what_is_saved_is_the_backbone_and_the_head(make_critic: MakeCritic, architecture: str, tmp_path: Path) -> None:
    critic = with_random_head(make_critic(architecture))
    critic.save(tmp_path)
    other = make_critic(architecture)
    other.restore(tmp_path)
    assert other.digest() == critic.digest() and torch.equal(other.head.weight, critic.head.weight)
    assert set(critic.weights()) == {*critic.backbone.state_dict(), "value_head.weight"}
    assert not any("lm_head" in name for name in critic.weights())


def test_a_critic_whose_gradient_is_not_finite_is_not_moved_and_counted_against_the_bound(
    make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    batch = make_batch(1)
    assert batch.returns is not None
    broken = replace(batch, returns=batch.returns.with_values(torch.full_like(batch.returns.values, torch.inf)))
    trainer = make_trainer()
    before = trainer.critic_digest()
    steps = trainer.update(broken, OBJECTIVE, replace(BATCHING, max_skipped=len(make_batch(1).group_ids)))
    assert {step.values["critic_skipped"] for step in steps} == {1.0}
    assert {step.values["skipped"] for step in steps} == {0.0}
    assert trainer.critic_digest() == before
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        make_trainer().update(broken, OBJECTIVE, replace(BATCHING, max_skipped=0))
