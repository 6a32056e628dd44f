"""Groups of ranks that live as long as the tests of a session, and what they trained."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lib.placement.ranks import RankGroup
from grpo_lib.training.tensors import load_tensors
from grpo_lib.training.world import World
from tests.integration.cases import Case, score, train

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Settings of a trainer, and of how many processes it is."""

    name: str
    ranks: int = 1
    stage: int | None = None
    offload: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        zero = {} if self.stage is None else {"deepspeed": {"stage": self.stage} | dict.fromkeys(self.offload, True)}
        return {"backend": self.name, **zero}

    def __str__(self) -> str:
        stage = "" if self.stage is None else f"-zero{self.stage}"
        offload = "".join(f"-{each}" for each in self.offload)
        return f"{self.name}{stage}{offload}-x{self.ranks}"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training left."""

    steps: list[dict[str, float]]
    folder: Path

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments of policy and critic."""
        found: dict[str, Tensor] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            found |= {f"{path.stem}/{name}": each for name, each in load_tensors(self.folder, path.stem).items()}
        return found


class Bench:
    """Trains by any backend: in this process, or in groups of ranks, which are started when they are first needed."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._groups: dict[int, RankGroup] = {}
        self.torch = cache(self._torch)

    def train(self, case: Case, backend: Backend, **checkpoint: Any) -> Trained:
        folder = self._folders.mktemp("trained")
        if backend.name == "torch":
            steps = train(case, backend.settings, World.alone(torch.device("cpu")), folder, **checkpoint)
        else:
            given = {key: str(each) if isinstance(each, Path) else each for key, each in checkpoint.items()}
            steps = self._call("train", case, backend, folder, **given)
        return Trained(steps=steps, folder=folder)

    def _torch(self, case: Case) -> Trained:
        return self.train(case, Backend(name="torch"))

    def scores(self, case: Case, backend: Backend) -> dict[str, Tensor]:
        folder = self._folders.mktemp("scores")
        if backend.name == "torch":
            score(case, backend.settings, World.alone(torch.device("cpu")), folder)
        else:
            self._call("score", case, backend, folder)
        return load_tensors(folder, "scores")

    def _call(self, command: str, case: Case, backend: Backend, folder: Path, **arguments: Any) -> Any:
        group = self._groups.get(backend.ranks)
        if group is None or not group.alive:
            group = self._groups[backend.ranks] = _group(backend.ranks)
        return group.call(command, case=asdict(case), backend=backend.settings, folder=str(folder), **arguments)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()


def _group(ranks: int) -> RankGroup:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        return RankGroup(
            ranks=ranks,
            handler="tests.integration.backend_ranks:Bench",
            setup={},
            device="cpu",
            threads=1,
            start_seconds=300.0,
            command_seconds=120.0,
        )


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory)
    yield made
    made.close()
