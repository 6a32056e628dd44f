"""Tokens that a tool said stand in the middle of responses, with mask 0: nothing that is learned depends on them."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lib.algorithms.advantages import ADVANTAGES as ESTIMATORS
from grpo_lib.algorithms.kl import k1, k3
from grpo_lib.algorithms.losses import LOSSES
from grpo_lib.algorithms.metrics import METRICS
from grpo_lib.algorithms.rollout_correction import REJECTION_KINDS, Importance, Rejection, correct_rows
from grpo_lib.data.advantages import AdvantagePlan, KlInReward, advantage_table
from grpo_lib.data.iteration import Iteration
from grpo_lib.data.ragged import Ragged
from grpo_lib.training.base import KlTerm, Objective, UpdateBatch
from tests.unit.data.test_advantages import Lists, iteration, lists, plan
from tests.unit.training.trainers import (
    BATCHING,
    assert_same,
    gradients,
    last_gradients,
    make_batch,
    make_objective,
    make_trainer,
    state,
)

GROUPS = [0, 0, 0, 1, 1, 1]
MASKS = [[1, 1, 0, 0, 0, 1, 1], [1, 0, 1], [1, 1], [1, 0, 0, 1, 0, 1, 1], [1, 1, 0, 1], [1, 0, 0, 0, 0, 1]]
REWARDS: list[float | None] = [1.0, 0.0, 0.5, 0.25, 1.0, 0.0]
COMPONENTS = [{"correct": value or 0.0, "format": row / 10} for row, value in enumerate(REWARDS)]
FILLS = [0.0, -7.5, 1e30, math.inf, -math.inf, math.nan]


def columns(fill: float, masks: list[list[int]] = MASKS) -> dict[str, Lists]:
    """Numbers of the policy's tokens in their order, and ``fill`` at those of tools."""
    made: dict[str, Lists] = {}
    for place, name in enumerate(("rollout", "old", "ref", "critic", "squares", "scores")):
        draws = iter(torch.rand(100, generator=torch.Generator().manual_seed(place)).tolist())
        sign = 1 if name in ("critic", "squares", "scores") else -1
        made[name] = [[sign * next(draws) if taken else fill for taken in mask] for mask in masks]
    return made


def with_observations(fill: float) -> Iteration:
    return iteration(GROUPS, MASKS, REWARDS, **columns(fill), greedy=[0.5, 0.25], components=COMPONENTS, truncated=(2,))


def without_observations() -> Iteration:
    """The same responses as if the tools had said nothing."""
    masks = [[1] * sum(mask) for mask in MASKS]
    return iteration(
        GROUPS, masks, REWARDS, **columns(0.0, masks), greedy=[0.5, 0.25], components=COMPONENTS, truncated=(2,)
    )


def plans() -> list[Any]:
    estimators = [pytest.param(plan(entry.bind({}, "options")), id=entry.name) for entry in ESTIMATORS]
    corrections = [
        pytest.param(
            plan(ESTIMATORS["gae"].function, correction={"rejections": [Rejection(kind=kind, upper=1.5, lower=0.5)]}),
            id=f"rejection {kind}",
        )
        for kind in REJECTION_KINDS
    ]
    weights = [
        pytest.param(
            plan(correction={"importance": Importance(level=level, upper=1.2, batch_normalize=True), "veto": 1e-4}),
            id=f"weights {level}",
        )
        for level in ("token", "sequence")
    ]
    shaped = [
        pytest.param(
            plan(
                ESTIMATORS["reinforce_plus_plus"].function,
                kl=KlInReward(estimator=k1, coef=0.1, target=0.1, horizon=100),
                overlong=replace(plan().overlong, buffer=4, mask_truncated=True),
                metrics=[(each.name, each.function) for each in METRICS],
            ),
            id="everything else",
        )
    ]
    return estimators + corrections + weights + shaped


@pytest.mark.parametrize("how", plans())
@pytest.mark.parametrize("fill", FILLS[1:])
def test_advantages_and_metrics_do_not_depend_on_numbers_of_observations(how: AdvantagePlan, fill: float) -> None:
    expected, numbers = advantage_table(with_observations(FILLS[0]), how)
    found, other = advantage_table(with_observations(fill), how)
    assert found.equals(expected)
    assert other == numbers
    for name in found.column_names[1:]:
        if name != "copies":
            assert not any(value for row, mask in zip(lists(found, name), MASKS, strict=True)
                           for value, taken in zip(row, mask, strict=True) if not taken)  # fmt: skip


BY_LENGTH = {"opo", "optimal_token_baseline"}
"""They look at lengths and places, in which observations count."""


@pytest.mark.parametrize("how", [each for each in plans() if each.id not in BY_LENGTH | {"everything else"}])
def test_the_policys_tokens_get_what_they_would_get_if_tools_had_said_nothing(how: AdvantagePlan) -> None:
    expected, numbers = advantage_table(without_observations(), how)
    found, other = advantage_table(with_observations(math.nan), how)
    for name in found.column_names[1:]:
        kept = [
            [value for value, taken in zip(row, mask, strict=True) if taken]
            for row, mask in zip(lists(found, name), MASKS, strict=True)
        ]
        assert kept == lists(expected, name)
    assert other == pytest.approx(numbers, rel=1e-12)


def test_bypass_mode_takes_the_engines_logprobs_of_the_policys_tokens_only() -> None:
    data = [replace(with_observations(fill), old=None) for fill in FILLS]
    how = plan(ESTIMATORS["grpo"].function)
    tables = [advantage_table(each, how) for each in data]
    assert all(table.equals(tables[0][0]) and numbers == tables[0][1] for table, numbers in tables)
    assert tables[0][1]["mismatch/nonfinite_tokens"] == 0


# The update


def batches(fill: float) -> UpdateBatch:
    """Some tokens in the middle of rows are masked; what is known of them is ``fill``."""
    batch = make_batch(ref=True, values=True)
    observed = batch.mask.values == 0

    def filled(column: Ragged | None) -> Ragged:
        assert column is not None
        return column.with_values(column.values.masked_fill(observed, fill))

    weights = batch.mask.with_values(torch.linspace(0.5, 1.5, len(observed)))
    return replace(
        batch,
        old_logprobs=filled(batch.old_logprobs),
        ref_logprobs=filled(batch.ref_logprobs),
        advantages=filled(batch.advantages),
        values=filled(batch.values),
        returns=filled(batch.returns),
        is_weights=filled(weights),
    )


def objectives() -> list[Any]:
    made = []
    for entry in LOSSES:
        aggregation = str(entry.traits.get("aggregation", "token-mean"))
        objective = make_objective(
            aggregation,
            policy_loss=entry.bind({}, "options"),
            select=entry.bind_helper({}, "options"),
            kl=KlTerm(coef=0.1, estimator=k3, importance=True),
            entropy_coef=0.01,
        )
        made.append(pytest.param(objective, id=entry.name))
    return made


@pytest.mark.parametrize("objective", objectives())
def test_loss_gradient_and_metrics_of_an_update_do_not_depend_on_numbers_of_observations(objective: Objective) -> None:
    expected = None
    for fill in (0.0, -7.5, math.nan, math.inf):
        trainer = make_trainer(critic={"lr": 1e-3})
        (step,) = trainer.update(batches(fill), objective, BATCHING)
        assert trainer.critic is not None
        found = (step.values, gradients(trainer), last_gradients(trainer.critic.learner), state(trainer))
        expected = expected or found
        assert_same(found, expected)
        assert all(math.isfinite(value) for value in step.values.values())


def test_the_correction_of_bypass_mode_does_not_see_observations_either() -> None:
    def correction(log_rho: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor | None]:
        rejections = [Rejection(kind="geometric", upper=1.2)]
        return correct_rows(log_rho, offsets, importance=Importance(level="sequence", upper=2.0), rejections=rejections)

    objective = make_objective(policy_loss=LOSSES["reinforce"].bind({}, "options"), correction=correction)
    found = []
    for fill in (0.0, math.nan):
        trainer = make_trainer()
        batch = replace(batches(fill), is_weights=None)
        (step,) = trainer.update(batch, objective, BATCHING)
        found.append((step.values, gradients(trainer)))
    assert_same(found[0], found[1])
    assert 0 < found[0][0]["rejected_fraction"] < 1


def test_masks_of_these_updates_are_observations_in_the_middle() -> None:
    mask = make_batch().mask
    rows = ["".join(map(str, mask.values[a:b].tolist())) for a, b in pairwise(mask.offsets.tolist())]
    assert sum("101" in row or "1001" in row for row in rows) >= 3
