"""Every backend with any number of ranks computes what `torch` computes in one process."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.errors import MissingPackageError
from grpo_lib.training.deepspeed import import_deepspeed
from grpo_lib.training.microbatches import plan
from tests.integration.cases import Case, update_batch
from tests.integration.conftest import Backend, Bench, Trained
from tests.unit.training.trainers import OF_THE_CUT

TORCH = Backend(name="torch")
FSDP2 = Backend(name="fsdp2", ranks=2)
ZERO = {(stage, ranks): Backend(name="deepspeed", stage=stage, ranks=ranks) for stage in range(4) for ranks in (1, 2)}
ALL = [FSDP2, *ZERO.values()]
SHARDED = [FSDP2, ZERO[2, 2], ZERO[3, 2]]
WHOLE, THIRDS, SEVENTHS = 1000, 54, 24

pytestmark = pytest.mark.slow


def by_name(backends: Sequence[Backend]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("backend", backends, ids=str)


def check_same(found: Trained, expected: Trained) -> None:
    """Metrics of every step, weights, moments."""
    assert len(found.steps) == len(expected.steps) > 0
    for number, (step, wanted) in enumerate(zip(found.steps, expected.steps, strict=True)):
        assert step.keys() == wanted.keys()
        for name in step.keys() - OF_THE_CUT:
            assert step[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6, nan_ok=True), f"{name}, {number}"
    ours, theirs = found.tensors(), expected.tensors()
    assert ours.keys() == theirs.keys() and any("moments" in name for name in ours)
    for name, value in theirs.items():
        # The critic's AdamW has no larger eps: it makes steps of gradients that are 0 but for rounding.
        atol = 3e-6 if name.startswith("critic-weights/") else 1e-6
        torch.testing.assert_close(ours[name], value, rtol=0, atol=atol, msg=f"{name}: {{}}".format)


AGGREGATED = dict(zip(AGGREGATIONS.names(), [THIRDS, SEVENTHS, WHOLE, THIRDS, SEVENTHS], strict=True))


@pytest.mark.parametrize(("budget", "count"), [(WHOLE, 1), (THIRDS, 3), (SEVENTHS, 7)])
def test_the_budgets_make_so_many_micro_batches(budget: int, count: int) -> None:
    sequences, live = update_batch(Case(), 0).sequences, [row for row in range(11) if row != 4]
    lengths = sequences.lengths[live]
    assert len(plan(lengths, budget, "padded")[0]) == count
    assert len(lengths.unique()) > 4


def aggregated() -> list[Any]:
    """Every aggregation by each backend of two ranks, and every budget by all."""
    two = [FSDP2, *(ZERO[stage, 2] for stage in range(4))]
    cases = [(name, budget, backend) for name, budget in AGGREGATED.items() for backend in two]
    cases += [("token-mean", budget, ZERO[stage, 1]) for budget in (WHOLE, THIRDS, SEVENTHS) for stage in range(4)]
    return [pytest.param(*each, id="-".join(map(str, each))) for each in cases]


@pytest.mark.parametrize(("aggregation", "budget", "backend"), aggregated())
def test_three_steps_on_a_mini_batch(bench: Bench, backend: Backend, aggregation: str, budget: int) -> None:
    case = Case(epochs=3, aggregation=aggregation, max_tokens=budget)
    expected = bench.torch(case)
    assert expected.steps[0]["grad_norm"] > 0.5 or aggregation.endswith("norm"), "nothing is clipped"
    check_same(bench.train(case, backend), expected)


@by_name([FSDP2, ZERO[3, 2]])
@pytest.mark.parametrize("architecture", ["llama", "gemma", "gpt2"])
def test_other_architectures(bench: Bench, backend: Backend, architecture: str) -> None:
    case = Case(architecture=architecture, epochs=3, max_tokens=THIRDS)
    check_same(bench.train(case, backend), bench.torch(case))


CASES = {
    "packed rows": Case(epochs=2, max_tokens=40, layout="packed"),
    "a rank without rows": Case(rows=1, epochs=2),
    "a rank with an empty micro-batch at the end": Case(rows=3, epochs=2, max_tokens=18, kl="none"),
    "mini-batches of one group": Case(groups=1, iterations=2),
    "no rank with a row": Case(iterations=3, silent=1, kl="none"),
    "a loss that chooses tokens at random": Case(
        loss="clip_cov", options=(("clip_cov_ratio", 0.4), ("cov_low", 0.0)), iterations=2, groups=3, max_tokens=THIRDS
    ),
    "a loss that chooses tokens by covariance": Case(
        loss="kl_cov", options=(("kl_cov_ratio", 0.2),), iterations=2, groups=3, max_tokens=THIRDS, kl="none"
    ),
    "an exact kl": Case(kl="exact", epochs=2, max_tokens=THIRDS),
    "an exact kl with untied head": Case(architecture="llama", kl="exact", epochs=2, max_tokens=THIRDS),
    "an exact kl of few rows": Case(kl="exact", rows=1, epochs=2),
    "adapters": Case(lora=True, epochs=2, max_tokens=THIRDS),
    "adapters of transposed layers": Case(architecture="gpt2", lora=True, epochs=2, max_tokens=THIRDS),
    "adapters and the exact kl to the model without": Case(lora=True, kl="exact", epochs=2, max_tokens=THIRDS),
    "a critic": Case(critic=True, iterations=3, max_tokens=THIRDS),
    "recomputed layers": Case(recompute=True, epochs=2, max_tokens=THIRDS),
    "everything at once": Case(
        lora=True, kl="exact", critic=True, recompute=True, layout="packed", iterations=3, groups=3, max_tokens=40
    ),
    "an iteration that ends early": Case(iterations=3, stopped=1, max_tokens=THIRDS),
    "an infinite gradient": Case(iterations=3, broken=1, groups=2, max_tokens=THIRDS),
    "an infinite gradient of the first step": Case(iterations=2, broken=0),
    "an infinite gradient of policy and critic": Case(iterations=3, broken=1, groups=3, critic=True),
}


@by_name(SHARDED)
@pytest.mark.parametrize("name", CASES)
def test_what_else_a_run_can_ask_for(bench: Bench, backend: Backend, name: str) -> None:
    expected = bench.torch(CASES[name])
    if CASES[name].broken is not None:
        assert sum(step.get("skipped", 0) for step in expected.steps) == 1
    if CASES[name].stopped is not None:
        assert [step["stopped_early"] for step in expected.steps if "stopped_early" in step] == [1.0]
    check_same(bench.train(CASES[name], backend), expected)


@by_name([FSDP2, ZERO[0, 2], ZERO[3, 2]])
@pytest.mark.parametrize("lora", [False, True])
def test_scores(bench: Bench, backend: Backend, lora: bool) -> None:
    case = Case(critic=True, kl="exact", lora=lora, max_tokens=THIRDS)
    found, expected = bench.scores(case, backend), bench.scores(case, TORCH)
    assert found.keys() == {"logprobs", "entropy", "ref", "squares", "values"}
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@by_name(
    [
        *(Backend(name="deepspeed", stage=stage, ranks=2, offload=("offload_optimizer",)) for stage in (1, 2, 3)),
        Backend(name="deepspeed", stage=3, ranks=2, offload=("offload_parameters",)),
        Backend(name="deepspeed", stage=3, ranks=2, offload=("offload_optimizer", "offload_parameters")),
    ]
)
def test_offloaded_state(bench: Bench, backend: Backend) -> None:
    for case in (Case(iterations=3, broken=1, groups=3, max_tokens=THIRDS), Case(iterations=3, stopped=1, groups=3)):
        check_same(bench.train(case, backend), bench.torch(case))


def test_a_missing_deepspeed_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'grpo-pipeline\[deepspeed\]'"):
        import_deepspeed("cpu")
