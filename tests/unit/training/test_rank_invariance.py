"""Several ranks, as threads of this process, make of a batch what one rank makes of it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lib.algorithms.losses import gspo, ppo_clip
from grpo_lib.algorithms.rollout_correction import Rejection, correct_rows
from grpo_lib.errors import AlgorithmError, NonFiniteError
from grpo_lib.training import backends
from grpo_lib.training.base import KlTerm, Objective, StepMetrics, UpdateBatch
from grpo_lib.training.learner import TorchLearner
from grpo_lib.training.microbatches import Layout, MicroBatch
from grpo_lib.training.scoring import score_tokens
from grpo_lib.training.world import World
from tests.tiny_models import random_sequences, tiny_model
from tests.unit.training.test_logprobs import perturbed
from tests.unit.training.trainers import (
    ALONE,
    BATCHING,
    EXACT_KL,
    KL,
    LORA,
    OF_THE_CUT,
    gradients,
    last_gradients,
    make_batch,
    make_objective,
    make_trainer,
    only_group,
    parameters,
    with_infinite_advantages,
)

CPU = torch.device("cpu")
WORLDS = pytest.mark.parametrize("size", [2, 3])
LAYOUTS = pytest.mark.parametrize("layout", ["packed", "padded"])
SECONDS = 60


class Meeting:
    """Where the ranks put their tensors together."""

    def __init__(self, size: int) -> None:
        self.brought: dict[int, Tensor] = {}
        self.barrier = threading.Barrier(size, timeout=SECONDS)

    def together(self, rank: int, tensor: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        self.brought[rank] = tensor.clone()
        self.barrier.wait()
        shapes = {each.shape for each in self.brought.values()}
        assert len(shapes) == 1, f"the ranks do not do the same: {shapes}"
        result = reduce(torch.stack([self.brought[rank] for rank in sorted(self.brought)]))
        self.barrier.wait()
        return tensor.copy_(result)


@dataclass(frozen=True, kw_only=True)
class ThreadWorld(World):
    meeting: Meeting

    def sum_(self, tensor: Tensor) -> Tensor:
        return self.meeting.together(self.rank, tensor, lambda all_: all_.sum(0))

    def max_(self, tensor: Tensor) -> Tensor:
        return self.meeting.together(self.rank, tensor, lambda all_: all_.amax(0))


def on_ranks(size: int, function: Callable[[World], Any]) -> list[Any]:
    """Results by rank; the first rank's exception, if any."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadWorld(rank=rank, size=size, device=CPU, meeting=meeting))
        except BaseException as error:
            errors[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    first = [each for each in errors if each is not None and not isinstance(each, threading.BrokenBarrierError)]
    if first:
        raise first[0]
    assert errors == [None] * size
    return results


class SummingLearner(TorchLearner):
    """Sums gradients over the ranks, as the backends of several ranks do."""

    def __init__(self, world: World, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.world = world

    def step(self, lr: float) -> float:
        for parameter in self._parameters.values():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.world.sum_(gradient)
        return super().step(lr)


MAKING = threading.Lock()


def trainer_of(world: World, **options: Any) -> Any:
    with MAKING, pytest.MonkeyPatch.context() as patch:
        if world.size > 1:
            patch.setattr(backends, "TorchLearner", partial(SummingLearner, world))
        return make_trainer(world=world, **options)


# --- scoring ----------------------------------------------------------------------------------------------------------


def of_tokens(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Results that tell each token of each row apart."""
    return batch.targets + torch.arange(len(batch.targets)) * 0.0, batch.predicts.clamp(max=0) + batch.targets * 2.0


@WORLDS
@LAYOUTS
@pytest.mark.parametrize("rows", [1, 2, 7, 30])
def test_every_rank_gets_the_scores_of_all_rows_in_their_order(size: int, layout: Layout, rows: int) -> None:
    sequences = random_sequences(3, rows)
    seen: list[list[Tensor]] = [[] for _ in range(size)]

    def score(world: World) -> Any:
        def function(batch: MicroBatch) -> tuple[Tensor, Tensor]:
            seen[world.rank].append(batch.rows)
            return of_tokens(batch)

        return score_tokens(function, sequences, world=world, max_tokens=40, layout=layout)

    expected = sequences.responses.values.float()
    for first, second in on_ranks(size, score):
        assert torch.equal(first.values, expected) and torch.equal(second.values, 2 * expected)
        assert torch.equal(first.offsets, sequences.responses.offsets)
    assert sorted(int(row) for each in seen for part in each for row in part) == list(range(rows))
    assert len({len(each) for each in seen}) == 1  # they run the model equally often


@WORLDS
@LAYOUTS
def test_the_scores_of_several_ranks_are_those_of_one(size: int, layout: str) -> None:
    sequences = random_sequences(3, 10)

    def score(world: World) -> list[Tensor]:
        options = {"layout": layout, "max_tokens": 40}
        trainer = trainer_of(world, settings=options, critic={}, reference=lambda: perturbed(tiny_model()))
        logprobs, entropy = trainer.logprobs(sequences, 0.8)
        rest = (
            trainer.ref_logprobs(sequences, 0.8),
            trainer.sum_squared_probs(sequences, 0.8),
            trainer.values(sequences),
        )
        return [each.values for each in (logprobs, entropy, *rest)]

    expected = score(ALONE)
    for found in on_ranks(size, score):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_broken_weights_are_noticed_on_every_rank() -> None:
    def score(world: World) -> str:
        trainer = trainer_of(world)
        with torch.no_grad():
            trainer.model.model.norm.weight[0] = float("nan")
        with pytest.raises(NonFiniteError) as error:
            trainer.logprobs(random_sequences(3, 1), 0.8)  # of which only one rank has the row
        return str(error.value)

    assert len(set(on_ranks(2, score))) == 1


# --- updates ----------------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[dict[str, Any], Objective, dict[str, Any]]] = {
    "token-mean": ({}, make_objective("token-mean", kl=KL, entropy_coef=0.01), {"epochs": 2}),
    "seq-mean-token-mean": ({}, make_objective("seq-mean-token-mean"), {"mini_batch_groups": 1}),
    "seq-mean-token-sum-norm": ({}, make_objective("seq-mean-token-sum-norm", policy_loss=gspo), {}),
    "one micro-batch": ({}, make_objective(kl=KL), {"max_tokens": 10_000}),
    "exact KL": ({}, make_objective(kl=EXACT_KL), {"epochs": 2}),
    "straight": ({}, make_objective(kl=KlTerm(coef=0.1, estimator=None, straight_through=True)), {}),
    "LoRA": ({"settings": LORA}, make_objective(kl=EXACT_KL), {"epochs": 2}),
    "critic": ({"critic": {"lr": 1e-3, "value_clip": None}}, make_objective(), {"epochs": 2}),
    "warm-up": ({"critic": {"lr": 1e-3}}, make_objective(), {"train_policy": False}),
    "bypass": (
        {},
        make_objective(
            correction=partial(correct_rows, importance=None, rejections=[Rejection(kind="token", upper=1.3)])
        ),
        {},
    ),
    "max_kl": ({"lr": 0.02}, make_objective(), {"epochs": 4, "max_kl": 1e-6}),
}


@WORLDS
@pytest.mark.parametrize("case", CASES)
def test_an_update_on_several_ranks_is_that_on_one(size: int, case: str) -> None:
    options, objective, batching = CASES[case]
    batch = make_batch(7, ref=True, values=True)

    def update(world: World) -> tuple[list[StepMetrics], list[dict[str, Tensor]]]:
        trainer = trainer_of(world, reference=lambda: perturbed(tiny_model()), **{"eps": 1e-4, **options})
        steps = trainer.update(batch, objective, replace(BATCHING, **{"max_tokens": 40, **batching}))
        tensors = [parameters(trainer)]
        if trainer.critic is not None:
            tensors.append(last_gradients(trainer.critic.learner))
        return steps, tensors

    expected, tensors = update(ALONE)
    assert len(expected) >= 1 and all(step.values["trained_rows"] for step in expected if case != "seq-mean-token-mean")
    for steps, found in on_ranks(size, update):
        torch.testing.assert_close(found, tensors, rtol=1e-3, atol=2e-5)
        assert len(steps) == len(expected)
        for ours, theirs in zip(steps, expected, strict=True):
            assert (ours.optimizer_step, ours.epoch, ours.rows, ours.tokens) == (
                theirs.optimizer_step,
                theirs.epoch,
                theirs.rows,
                theirs.tokens,
            )
            wanted = {name: value for name, value in theirs.values.items() if name not in OF_THE_CUT}
            assert ours.values.keys() == theirs.values.keys()
            assert {name: ours.values[name] for name in wanted} == pytest.approx(wanted, rel=1e-3, abs=1e-5)


@WORLDS
@LAYOUTS
def test_a_rank_without_rows_takes_part(size: int, layout: str) -> None:
    batch = only_group(make_batch(7, ref=True, values=True), 1)  # of one row
    assert batch.sequences.responses.rows == 1

    def update(world: World) -> tuple[dict[str, Tensor], dict[str, float]]:
        trainer = trainer_of(world, settings={"layout": layout}, critic={"lr": 1e-3})
        (step,) = trainer.update(batch, make_objective(kl=KL, entropy_coef=0.01), BATCHING)
        return gradients(trainer), dict(step.values)

    expected, values = update(ALONE)
    for found, metrics in on_ranks(size, update):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        assert metrics == pytest.approx(values, rel=1e-4, abs=1e-6)


def test_all_ranks_skip_a_step_of_which_one_has_a_gradient_that_is_not_finite() -> None:
    batch = with_infinite_advantages(make_batch(1), 1)  # one row

    def update(world: World) -> tuple[list[float], str]:
        trainer = trainer_of(world)
        steps = trainer.update(batch, make_objective(), replace(BATCHING, mini_batch_groups=2, max_skipped=1))
        return [step.values["skipped"] for step in steps], trainer.digest()

    first, second = on_ranks(2, update)
    assert first == second and sum(first[0]) == 1.0 and first[1] != make_trainer().digest()


@pytest.mark.parametrize("far", [True, False])
def test_ranks_agree_on_whether_everything_was_rejected(far: bool) -> None:
    """A rank all of whose tokens are rejected goes on if another has some left."""
    batch = make_batch(3)
    shifts = torch.full_like(batch.old_logprobs.values, -5.0)
    if not far:
        shifts[: int(batch.mask.offsets[1])] = 0.0
    shifted: UpdateBatch = replace(
        batch, old_logprobs=batch.old_logprobs.with_values(batch.old_logprobs.values + shifts)
    )
    correction = partial(correct_rows, importance=None, rejections=[Rejection(kind="token", upper=2.0)])
    objective = make_objective(policy_loss=partial(ppo_clip, clip_low=0.2, clip_high=0.2), correction=correction)

    def update(world: World) -> float:
        (step,) = trainer_of(world).update(shifted, objective, replace(BATCHING, max_tokens=30))
        return step.values["rejected_fraction"]

    if far:
        with pytest.raises(AlgorithmError, match="is rejected; loosen"):
            on_ranks(3, update)
    else:
        assert 0.9 < update(ALONE) < 1
        assert on_ranks(3, update) == pytest.approx([update(ALONE)] * 3)
