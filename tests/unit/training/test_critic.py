"""The critic beside the policy in a trainer."""

import math
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.losses import ppo_clip
from grpo_lib.algorithms.rollout_correction import Rejection, correct_rows
from grpo_lib.data.ragged import segment_sum
from grpo_lib.errors import AlgorithmError, NonFiniteError
from grpo_lib.training.base import Batching, Objective, StepMetrics, UpdateBatch
from grpo_lib.training.checkpoints import restore_trainer, save_trainer, start_trainer
from grpo_lib.training.critic import Critic
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.microbatches import MicroBatch, Sequences, micro_batch
from grpo_lib.training.tensors import load_tensors
from grpo_lib.training.trainer import Trainer
from tests.tiny_models import random_sequences, tiny_model
from tests.unit.training import trainers
from tests.unit.training.trainers import ARCHITECTURES, copied

ROWS = 8
PADDED = {"layout": "padded"}
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES)
BATCHING = Batching(epochs=1, mini_batch_groups=None, max_tokens=10_000, seed=3, max_skipped=1)
OBJECTIVE = Objective(
    policy_loss=partial(ppo_clip, clip_low=0.2, clip_high=0.2, dual_clip=3.0),
    aggregation=lambda mask, offsets: AGGREGATIONS["token-mean"].function(mask, offsets, 12),
    temperature=0.8,
)


def make_trainer(
    architecture: str = "qwen3",
    dtype: torch.dtype = torch.float32,
    settings: dict[str, Any] | None = None,
    **critic: Any,
) -> Trainer:
    chosen = {"lr": 1e-2, "value_clip": None, "max_grad_norm": 1e6, **critic}
    return trainers.make_trainer(architecture, decay_steps=None, dtype=dtype, settings=settings, critic=chosen)


def critic_of(trainer: Trainer) -> Critic:
    assert trainer.critic is not None
    return trainer.critic


def make_critic(**critic: Any) -> Critic:
    """For passes of whole micro-batches, which are padded here."""
    return critic_of(make_trainer(settings=PADDED, **critic))


def make_batch(seed: int = 0, returns: float | None = None) -> UpdateBatch:
    """Some tokens are masked; returns and old values are random unless given."""
    generator = torch.Generator().manual_seed(seed)
    sequences = random_sequences(seed, ROWS)
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


def whole(sequences: Sequences) -> MicroBatch:
    return micro_batch(sequences, torch.arange(sequences.responses.rows))


def head_of(critic: Critic) -> Tensor:
    """``[1, hidden]``."""
    return dict(critic.learner.module.named_parameters())["value_head.weight"]


def with_random_head(trainer: Trainer) -> Trainer:
    head = head_of(critic_of(trainer))
    with torch.no_grad():
        head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(2)))
    return trainer


def gradients(critic: Critic) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in critic.learner.module.named_parameters() if p.grad is not None}


def weights(critic: Critic) -> dict[str, Tensor]:
    return copied(critic.learner.weights())


def digest(critic: Critic) -> str:
    return weights_digest(critic.learner.weights())


def policy(trainer: Trainer) -> dict[str, Tensor]:
    return copied(trainer.weights())


# --- values -----------------------------------------------------------------------------------------------------------


@EVERY_ARCHITECTURE
def test_every_value_is_0_at_the_start(architecture: str) -> None:
    sequences = random_sequences(1, 5)
    values = make_trainer(architecture).values(sequences)
    assert torch.equal(values.offsets, sequences.responses.offsets)
    assert not bool(values.values.any()) and values.values.dtype == torch.float32


@EVERY_ARCHITECTURE
def test_values_are_read_off_before_each_response_token_whatever_the_batching(architecture: str) -> None:
    sequences, head = random_sequences(3, 9), head_of(critic_of(with_random_head(make_trainer(architecture))))
    backbone, rows = tiny_model(architecture).base_model, []
    with torch.no_grad():
        for row in range(9):
            alone = sequences.gather(torch.tensor([row]))
            prompt, response = alone.prompts.values.long(), alone.responses.values.long()
            hidden = backbone(input_ids=torch.cat([prompt, response])[None]).last_hidden_state[0]
            rows.append(hidden[len(prompt) - 1 : -1] @ head[0])
    expected = torch.cat(rows)
    assert float(expected.abs().max()) > 0.1
    for layout, max_tokens in product(("packed", "padded"), (18, 60, 10_000)):
        trainer = with_random_head(make_trainer(architecture, settings={"layout": layout, "max_tokens": max_tokens}))
        torch.testing.assert_close(trainer.values(sequences).values, expected, rtol=1e-4, atol=1e-5)


def test_a_value_knows_nothing_of_its_token_and_what_follows() -> None:
    sequences, trainer = random_sequences(3, 4), with_random_head(make_trainer())
    changed = sequences.responses.values.clone()
    last = sequences.responses.offsets[1:] - 1
    changed[last] = (changed[last] + 1) % 23
    other = replace(sequences, responses=sequences.responses.with_values(changed))
    torch.testing.assert_close(trainer.values(other).values, trainer.values(sequences).values, rtol=0, atol=1e-6)


def test_values_are_float32_under_autocast() -> None:
    sequences = random_sequences(3, 4)
    exact, reduced = (
        with_random_head(make_trainer(dtype=dtype)).values(sequences).values
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert reduced.dtype == torch.float32
    assert 0 < float((exact - reduced).abs().max()) < 0.2


# --- the value loss ---------------------------------------------------------------------------------------------------


def test_the_loss_and_its_gradient_are_those_of_the_formula() -> None:
    sequences, critic = random_sequences(1, 3), make_critic()
    batch = whole(sequences)
    tokens = len(batch.targets)
    taken = torch.arange(tokens) % 3 != 0
    count = int(taken.sum())
    share, returns = torch.linspace(0.1, 1, count), torch.linspace(-2, 2, count)
    loss, values = critic.backward(batch, taken, torch.zeros(count), returns, share)
    assert not bool(values.any()) and loss == pytest.approx(float((share * returns.square()).sum()) / 2, rel=1e-5)
    with torch.no_grad():
        hidden = tiny_model().base_model(input_ids=batch.input_ids).last_hidden_state.flatten(0, 1)[batch.predicts]
    gradient = head_of(critic).grad
    assert gradient is not None
    torch.testing.assert_close(gradient[0], -((share * returns)[:, None] * hidden[taken]).sum(0), rtol=1e-4, atol=1e-5)


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
    clip: float | None,
    returns: float,
    expected: float,
    flat: bool,
) -> None:
    critic, batch = make_critic(value_clip=clip), whole(random_sequences(1, 1))  # one token
    every, one = torch.tensor([True]), torch.ones(1)
    loss, _ = critic.backward(batch, every, one, one * returns, one)
    assert loss == pytest.approx(expected)
    gradient = head_of(critic).grad
    assert gradient is not None
    assert bool(gradient.any()) != flat


def test_the_gradient_norm_is_clipped_and_reported_before_clipping() -> None:
    batch = whole(random_sequences(1, 3))
    every = torch.ones(len(batch.targets), dtype=torch.bool)
    seen = []
    for bound in (1e6, 1e-3):
        critic = make_critic(max_grad_norm=bound)
        before = weights(critic)
        critic.backward(batch, every, every.float(), 5 * every.float(), every.float())
        norm = math.sqrt(sum(float(each.square().sum()) for each in gradients(critic).values()))
        seen.append(critic.step())
        assert seen[-1] == pytest.approx(norm, rel=1e-5) and gradients(critic) == {}
        assert not torch.equal(head_of(critic).detach(), before["value_head.weight"])
    assert seen[0] == pytest.approx(seen[1]) and seen[0] > 1


def test_a_gradient_that_is_not_finite_leaves_the_critic_as_it_was() -> None:
    batch = whole(random_sequences(1, 3))
    one = torch.ones(len(batch.targets))
    critic, other = make_critic(), make_critic()
    before = digest(critic)
    critic.backward(batch, one.bool(), one, math.inf * one, one)
    assert not math.isfinite(critic.step()) and digest(critic) == before
    for each in (critic, other):  # and nothing of it is left
        each.backward(batch, one.bool(), one, 2 * one, one)
        each.step()
    assert digest(critic) == digest(other) != before


# --- in a trainer -----------------------------------------------------------------------------------------------------


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_critic_learns_a_constant_return(architecture: str, clip: float | None) -> None:
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


def test_the_numbers_of_a_step_are_means_over_valid_tokens() -> None:
    batch, trainer = make_batch(2), make_trainer(value_clip=0.05)
    assert batch.values is not None and batch.returns is not None
    with_random_head(trainer)
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


def test_policy_and_critic_do_not_disturb_each_other() -> None:
    batch = make_batch(2)
    alone = trainers.make_trainer(decay_steps=None)
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


def test_the_critic_does_not_depend_on_micro_batches() -> None:
    results = []
    for max_tokens in (10_000, 18):
        trainer = make_trainer(lr=1e-3, value_clip=0.2)
        batching = replace(BATCHING, max_tokens=max_tokens, epochs=3, mini_batch_groups=2)
        trainer.update(make_batch(2), OBJECTIVE, batching)
        results.append(weights(critic_of(trainer)))
    # AdamW's first steps are of the size of the rate whatever the gradient; where that is rounding they may differ.
    for name in results[0]:
        difference = (results[0][name] - results[1][name]).abs()
        assert float((difference > 1e-5).float().mean()) < 0.01, name


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("column", ["values", "returns"])
def test_what_stands_at_a_masked_token_has_no_influence(column: str, poison: float) -> None:
    batch = make_batch(2)
    rows = getattr(batch, column)
    masked = batch.mask.values == 0
    poisoned = replace(batch, **{column: rows.with_values(rows.values.masked_fill(masked, poison))})
    clean, other = make_trainer(value_clip=0.2), make_trainer(value_clip=0.2)
    assert other.update(poisoned, OBJECTIVE, BATCHING) == clean.update(batch, OBJECTIVE, BATCHING)
    assert other.critic_digest() == clean.critic_digest()


def test_in_bypass_mode_the_critic_learns_from_tokens_that_the_policy_may_not() -> None:
    batch = make_batch(2)
    correction = partial(correct_rows, importance=None, rejections=[Rejection(kind="token", upper=1.5)])
    corrected, plain = make_trainer(), make_trainer()
    (step,) = corrected.update(batch, replace(OBJECTIVE, correction=correction), BATCHING)
    plain.update(batch, OBJECTIVE, BATCHING)
    assert 0.1 < step.values["rejected_fraction"] < 1
    assert corrected.critic_digest() == plain.critic_digest()
    assert corrected.digest() != plain.digest()


def test_a_trainer_without_a_critic_has_no_digest_of_one() -> None:
    assert trainers.make_trainer().critic_digest() is None


# --- save and restore -------------------------------------------------------------------------------------------------


@EVERY_ARCHITECTURE
def test_a_restored_trainer_with_a_critic_goes_on_bit_for_bit(tmp_path: Path, architecture: str) -> None:
    batching = replace(BATCHING, mini_batch_groups=2)

    def iteration(trainer: Trainer, number: int) -> list[StepMetrics]:
        return trainer.update(make_batch(number), OBJECTIVE, batching)

    through = make_trainer(architecture)
    for number in range(3):
        iteration(through, number)
    at_save = (through.digest(), through.critic_digest())
    save_trainer(through, tmp_path, torch.float32)
    expected = [iteration(through, number) for number in range(3, 5)]

    resumed = make_trainer(architecture)
    iteration(resumed, 9)  # whatever it held before must not matter
    restore_trainer(resumed, tmp_path)
    assert (resumed.digest(), resumed.critic_digest()) == at_save
    assert [iteration(resumed, number) for number in range(3, 5)] == expected
    assert (resumed.digest(), resumed.critic_digest()) == (through.digest(), through.critic_digest())
    assert at_save[1] != through.critic_digest()


@EVERY_ARCHITECTURE
def test_a_critic_is_reset_to_what_it_was_made_as(architecture: str, tmp_path: Path) -> None:
    tiny_model(architecture).save_pretrained(tmp_path)
    batch = whole(random_sequences(1, 3))
    one = torch.ones(len(batch.targets))

    def learn(trainer: Trainer, steps: int) -> None:
        for _ in range(steps):
            critic_of(trainer).backward(batch, one.bool(), one, 2 * one, one)
            critic_of(trainer).step()

    used, fresh = (make_trainer(architecture, settings=PADDED) for _ in range(2))
    learn(used, 3)
    assert used.critic_digest() != fresh.critic_digest()
    start_trainer(used, tmp_path)
    assert used.critic_digest() == fresh.critic_digest()
    learn(used, 2)
    learn(fresh, 2)
    assert used.critic_digest() == fresh.critic_digest()  # the moments are forgotten too


def test_going_back_to_the_initial_policy_resets_the_critic(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    used, fresh = make_trainer(), make_trainer()
    used.update(make_batch(1), OBJECTIVE, BATCHING)
    start_trainer(used, tmp_path)
    assert used.critic_digest() == fresh.critic_digest()
    for trainer in (used, fresh):
        trainer.update(make_batch(2), OBJECTIVE, BATCHING)
    assert (used.digest(), used.critic_digest()) == (fresh.digest(), fresh.critic_digest())


def test_an_update_that_failed_half_way_leaves_nothing_in_a_restored_critic(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "initial")
    nothing_passes = partial(
        correct_rows, importance=None, rejections=[Rejection(kind="token", upper=1e-5, lower=1e-6)]
    )
    for back in ("reset", "restore"):
        trainer, expected = make_trainer(), make_trainer()
        (tmp_path / back).mkdir()
        save_trainer(trainer, tmp_path / back, torch.float32)
        with pytest.raises(AlgorithmError, match="is rejected"):
            trainer.update(make_batch(1), replace(OBJECTIVE, correction=nothing_passes), BATCHING)
        if back == "reset":
            start_trainer(trainer, tmp_path / "initial")
        else:
            restore_trainer(trainer, tmp_path / back)
        for each in (trainer, expected):
            each.update(make_batch(2), OBJECTIVE, BATCHING)
        assert (trainer.digest(), trainer.critic_digest()) == (expected.digest(), expected.critic_digest())


@EVERY_ARCHITECTURE
def test_what_is_saved_is_the_backbone_and_the_head(architecture: str, tmp_path: Path) -> None:
    trainer = with_random_head(make_trainer(architecture))
    save_trainer(trainer, tmp_path, torch.float32)
    other = make_trainer(architecture)
    restore_trainer(other, tmp_path)
    assert other.critic_digest() == trainer.critic_digest()
    assert torch.equal(head_of(critic_of(other)), head_of(critic_of(trainer)))
    backbone = {f"backbone.{name}" for name in tiny_model(architecture).base_model.state_dict()}
    assert set(load_tensors(tmp_path, "critic")) == {*backbone, "value_head.weight"}
    assert not any("lm_head" in name for name in load_tensors(tmp_path, "critic"))


def test_a_critic_whose_gradient_is_not_finite_is_not_moved_and_counted_against_the_bound() -> None:
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
