"""What one backend saved another restores, in new processes, with another number of ranks."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_lib.training.digest import weights_digest
from grpo_lib.training.tensors import load_tensors
from tests.integration.cases import Case
from tests.integration.conftest import Backend, Bench, Trained

CASE = Case(iterations=6, max_tokens=54)
WITH_CRITIC = Case(iterations=6, max_tokens=54, critic=True)
WITH_ADAPTERS = Case(iterations=6, max_tokens=54, lora=True)
TORCH = Backend(name="torch")


def fsdp2(ranks: int) -> Backend:
    return Backend(name="fsdp2", ranks=ranks)


def zero(stage: int, ranks: int) -> Backend:
    return Backend(name="deepspeed", stage=stage, ranks=ranks)


OFFLOADED = Backend(name="deepspeed", stage=3, ranks=2, offload=("offload_optimizer", "offload_parameters"))
PAIRS = [
    (TORCH, TORCH),
    (fsdp2(2), fsdp2(2)),
    (fsdp2(2), fsdp2(1)),
    (fsdp2(1), fsdp2(2)),
    (zero(0, 2), zero(0, 2)),
    (zero(1, 2), zero(1, 2)),
    (zero(2, 2), zero(2, 2)),
    (zero(3, 2), zero(3, 2)),
    (zero(3, 2), zero(3, 1)),
    (zero(3, 1), zero(3, 2)),
    (zero(2, 2), zero(1, 1)),
    (zero(3, 2), OFFLOADED),
    (TORCH, fsdp2(2)),
    (TORCH, zero(2, 2)),
    (zero(3, 2), TORCH),
    (fsdp2(2), TORCH),
]
Whole = Callable[[Case, Backend], Trained]


@pytest.fixture(scope="module")
def whole(bench: Bench) -> Whole:
    """All six iterations by a backend, with a checkpoint after three."""
    return cache(lambda case, backend: bench.train(case, backend, save_at=3))


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """New processes."""
    made = Bench(tmp_path_factory)
    yield made
    made.close()


def check_resumed(resumed: Trained, expected: Trained, exact: bool) -> None:
    ours, theirs = resumed.tensors(), expected.tensors()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if exact:
            assert torch.equal(ours[name], value), name
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6, msg=name)
    assert [step["optimizer_step"] for step in resumed.steps] == [
        step["optimizer_step"] for step in expected.steps[-len(resumed.steps) :]
    ]


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda each: str(each))
def test_a_restored_training_goes_on_like_one_that_was_not_interrupted(
    whole: Whole, later: Bench, before: Backend, after: Backend
) -> None:
    saved = whole(CASE, before)
    resumed = later.train(CASE, after, first=saved.folder / "checkpoint", start=3)
    assert len(resumed.steps) == 3
    check_resumed(resumed, saved, exact=before == after)


@pytest.mark.parametrize("case", [WITH_CRITIC, WITH_ADAPTERS], ids=["critic", "adapters"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(fsdp2(2), fsdp2(2)), (zero(3, 2), zero(3, 2)), (zero(2, 2), zero(2, 2)), (fsdp2(2), zero(3, 2))],
    ids=str,
)
def test_critic_and_adapters_are_restored_too(
    whole: Whole, later: Bench, before: Backend, after: Backend, case: Case
) -> None:
    saved = whole(case, before)
    resumed = later.train(case, after, first=saved.folder / "checkpoint", start=3)
    check_resumed(resumed, saved, exact=before == after)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("backend", [TORCH, fsdp2(2), zero(2, 2), zero(3, 2)], ids=str)
def test_an_exported_folder_is_a_plain_model(bench: Bench, backend: Backend, architecture: str) -> None:
    # Nothing was trained yet, so the weights are those of `torch` to the bit.
    case = Case(architecture=architecture, iterations=1)
    folder = bench.train(case, backend, save_at=0).folder / "checkpoint"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = bench.train(case, TORCH, save_at=0).folder / "checkpoint"
    plain = AutoModelForCausalLM.from_pretrained(wanted, dtype=torch.float32)
    assert weights_digest(loaded.state_dict()) == weights_digest(plain.state_dict())
    assert files(folder) == files(wanted)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_moments_of_a_checkpoint_are_by_the_names_of_parameters(whole: Whole) -> None:
    folder = whole(CASE, zero(3, 2)).folder / "checkpoint"
    moments, weights = load_tensors(folder, "optimizer"), load_tensors(folder, "model")
    assert {name.removeprefix("model.").rpartition("/")[0] for name in moments} == weights.keys()
    for name, value in moments.items():
        parameter, _, what = name.removeprefix("model.").rpartition("/")
        assert value.shape == (() if what == "step" else weights[parameter].shape)
