"""What one backend saved another restores, in new processes, with another number of ranks."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo_lib.training.digest import weights_digest
from tests.integration.cases import Case
from tests.integration.conftest import Backend, Bench, Trained
from tests.tiny_models import tiny_model

CASE = Case(iterations=6, max_tokens=54)
WITH_MORE = Case(iterations=4, max_tokens=54, critic=True, lora=True)
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
pytestmark = pytest.mark.slow
Whole = Callable[[Case, Backend], Trained]
Later = Callable[[Backend, Backend], Bench]


@pytest.fixture(scope="module")
def whole(bench: Bench) -> Whole:
    """All iterations by a backend, with a checkpoint after three."""
    return cache(lambda case, backend: bench.train(case, backend, save_at=3))


@pytest.fixture(scope="module")
def later(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Later]:
    """Where to go on: in other processes than those that saved."""
    fresh = Bench(tmp_path_factory)
    yield lambda before, after: fresh if before.ranks == after.ranks else bench
    fresh.close()


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
    whole: Whole, later: Later, before: Backend, after: Backend
) -> None:
    saved = whole(CASE, before)
    resumed = later(before, after).train(CASE, after, first=saved.folder / "checkpoint", start=3)
    assert len(resumed.steps) == 3
    check_resumed(resumed, saved, exact=before == after)


@pytest.mark.parametrize(
    ("before", "after"),
    [(fsdp2(2), fsdp2(2)), (zero(3, 2), zero(3, 2)), (zero(2, 2), zero(2, 2)), (fsdp2(2), zero(3, 2))],
    ids=str,
)
def test_critic_and_adapters_are_restored_too(whole: Whole, later: Later, before: Backend, after: Backend) -> None:
    saved = whole(WITH_MORE, before)
    resumed = later(before, after).train(WITH_MORE, after, first=saved.folder / "checkpoint", start=3)
    check_resumed(resumed, saved, exact=before == after)


@pytest.fixture(scope="module")
def untrained(bench: Bench) -> Callable[[str, Backend], Path]:
    """A checkpoint before the first step: its weights are those of `torch` to the bit."""

    def saved(architecture: str, backend: Backend) -> Path:
        return bench.train(Case(architecture=architecture, iterations=1), backend, save_at=0).folder / "checkpoint"

    return cache(saved)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("backend", [fsdp2(2), zero(2, 2), zero(3, 2)], ids=str)
def test_an_exported_folder_is_a_plain_model(
    untrained: Callable[[str, Backend], Path], backend: Backend, architecture: str
) -> None:
    folder, wanted = untrained(architecture, backend), untrained(architecture, TORCH)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert weights_digest(loaded.state_dict()) == weights_digest(tiny_model(architecture).state_dict())
    assert files(folder) == files(wanted)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_moments_of_a_checkpoint_are_by_the_names_of_parameters(whole: Whole) -> None:
    folder = whole(CASE, zero(3, 2)).folder / "checkpoint"
    moments, weights = (load_file(folder / f"{name}.safetensors") for name in ("optimizer", "model"))
    assert {name.removeprefix("model.").rpartition("/")[0] for name in moments} == weights.keys()
    for name, value in moments.items():
        parameter, _, what = name.removeprefix("model.").rpartition("/")
        assert value.shape == (() if what == "step" else weights[parameter].shape)
