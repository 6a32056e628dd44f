from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_lib.errors import CorruptError
from grpo_lib.training.tensors import has_tensors, load_tensors, save_tensors
from tests.unit.training.trainers import assert_same


def some_tensors() -> dict[str, Tensor]:
    """Of 40, 24, 8, 80 and 0 bytes; two are tied."""
    first = torch.arange(10.0)
    return {
        "a": first,
        "b": torch.arange(3),
        "tied to a": first,
        "c": torch.tensor(2.0, dtype=torch.float64),
        "d": torch.arange(20.0).view(4, 5).T,
        "empty": torch.empty(0),
    }


@pytest.mark.parametrize(
    ("max_bytes", "files"),
    [
        (10_000, ["x.safetensors"]),
        (70, [f"x-0000{number}.safetensors" for number in (1, 2, 3, 4)]),  # 40 + 24; 8; 80, too much; 0
        (1, [f"x-0000{number}.safetensors" for number in (1, 2, 3, 4, 5)]),
    ],
)
def test_tensors_come_back_from_as_many_files_as_they_take(tmp_path: Path, max_bytes: int, files: list[str]) -> None:
    save_tensors(some_tensors(), tmp_path, "x", max_bytes)
    save_tensors({"other": torch.ones(1)}, tmp_path, "x2", max_bytes)
    assert sorted(path.name for path in tmp_path.glob("x[.-]*")) == files
    found = load_tensors(tmp_path, "x")
    assert_same(found, some_tensors())
    assert found["tied to a"].data_ptr() == found["a"].data_ptr()  # whichever file they are in
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 10_000


def test_a_tied_tensor_is_written_once(tmp_path: Path) -> None:
    large = torch.ones(1000)
    save_tensors({"a": large, "b": large, "c": torch.ones(10)}, tmp_path, "x")
    assert (tmp_path / "x.safetensors").stat().st_size < 5000
    found = load_tensors(tmp_path, "x")
    assert found["a"].data_ptr() == found["b"].data_ptr() != found["c"].data_ptr()
    assert_same(found, {"a": large, "b": large, "c": torch.ones(10)})


def test_equal_tensors_are_equal_files(tmp_path: Path) -> None:
    written = set()
    for _ in range(10):
        save_tensors(some_tensors(), tmp_path, "x")
        written.add((tmp_path / "x.safetensors").read_bytes())
    assert len(written) == 1


def test_what_was_not_saved_is_not_there(tmp_path: Path) -> None:
    save_tensors({}, tmp_path, "nothing")
    assert has_tensors(tmp_path, "nothing") and load_tensors(tmp_path, "nothing") == {}
    assert not has_tensors(tmp_path, "other")
    with pytest.raises(CorruptError, match=r"holds 0 of 1 files other\*\.safetensors"):
        load_tensors(tmp_path, "other")


@pytest.mark.parametrize("lost", [1, 2, 5])
def test_a_lost_file_of_several_is_noticed(tmp_path: Path, lost: int) -> None:
    save_tensors(some_tensors(), tmp_path, "x", 1)
    (tmp_path / f"x-0000{lost}.safetensors").unlink()
    with pytest.raises(CorruptError, match=r"holds 4 of 5 files x\*\.safetensors; restore it from a backup"):
        load_tensors(tmp_path, "x")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    save_tensors(some_tensors(), tmp_path, "x")
    path = tmp_path / "x.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError, match=r"x\.safetensors is damaged \(.+\); restore it from a backup"):
        load_tensors(tmp_path, "x")
