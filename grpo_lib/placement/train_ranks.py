"""Training by several processes: `TrainRanks` asks, a `RankTrainer` in each rank does (`ranks.py`).

What goes over the line is small: references, folders, numbers. Tensors that come back lie in a file that rank 0 wrote.
"""

import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor

from grpo_lib.config import RunConfig
from grpo_lib.data.ragged import Ragged
from grpo_lib.generation.base import Sampling
from grpo_lib.placement.rank_main import report
from grpo_lib.placement.ranks import RankGroup, row_progress
from grpo_lib.placement.train import Rows, Scores, TrainWorker, Updated
from grpo_lib.run import Run
from grpo_lib.storage.stages import ArtifactRef
from grpo_lib.training.base import StepMetrics
from grpo_lib.training.microbatches import Sequences
from grpo_lib.training.scoring import Progress
from grpo_lib.training.tensors import load_tensors, save_tensors
from grpo_lib.training.world import World

START_SECONDS = 600.0
"""Until every rank has loaded the model."""
STEM = "tensors"


class TrainRanks:
    """`Training` by a group of ranks of its own. After an error the group is gone: ``alive`` is false."""

    def __init__(self, run: Run, folder: Path, device: torch.device) -> None:
        config = run.config
        self._scratch = Path(tempfile.mkdtemp(prefix="grpo-train-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        try:
            self._group = RankGroup(
                ranks=config.placement.ranks,
                handler="grpo_lib.placement.train_ranks:RankTrainer",
                setup={"config": config.model_dump(mode="json"), "folder": str(folder)},
                device="cuda" if device.type == "cuda" else "cpu",
                threads=config.placement.threads,
                start_seconds=max(START_SECONDS, config.placement.rank_timeout_seconds),
                command_seconds=config.placement.rank_timeout_seconds,
            )
        except BaseException:
            self._remove()
            raise

    @property
    def alive(self) -> bool:
        return self._group.alive

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return self._group.pids

    def start(self, folder: Path) -> None:
        self._group.call("start", folder=str(folder))

    def restore(self, folder: Path) -> None:
        self._group.call("restore", folder=str(folder))

    def save(self, folder: Path) -> None:
        self._group.call("save", folder=str(folder))

    def digests(self) -> tuple[str, str | None]:
        policy, critic = self._call("digests")
        return policy, critic

    def weights(self, adapter: bool = False) -> Mapping[str, Tensor]:
        return self._tensors("weights", adapter=adapter)

    def score(
        self,
        asked: Sequence[str],
        rows: Rows,
        reference: ArtifactRef | None = None,
        on_progress: Progress | None = None,
    ) -> Scores:
        arguments: dict[str, JsonValue] = {
            "asked": list(asked),
            "prompts": _json(rows.prompts),
            "rollouts": _json(rows.rollouts),
            "selection": _json([rows.selection]),
            "reference": _json([reference]),
        }
        found = self._tensors("score", on_progress, **arguments)
        offsets = found.pop("offsets")
        return Scores(**{name: Ragged(values=values, offsets=offsets) for name, values in found.items()})

    def score_few(self, few: Sequences, sampling: Sampling) -> Ragged:
        columns = {
            "prompt_ids": few.prompts.values,
            "prompt_offsets": few.prompts.offsets,
            "prompt_of": few.prompt_rows,
            "response_ids": few.responses.values,
            "response_offsets": few.responses.offsets,
        }
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            save_tensors({name: each.clone() for name, each in columns.items()}, Path(folder), STEM)
            found = self._tensors("score_few", rows=folder, sampling=asdict(sampling))
        return few.responses.with_values(found["logprobs"])

    def update(
        self,
        inputs: Sequence[ArtifactRef],
        iteration: int,
        reference: ArtifactRef | None = None,
        on_progress: Progress | None = None,
    ) -> Updated:
        done = self._call(
            "update", on_progress, inputs=_json(inputs), iteration=iteration, reference=_json([reference])
        )
        return Updated(steps=[StepMetrics(**step) for step in done["steps"]], performance=done["performance"])

    def release(self) -> None:
        self._group.call("release")

    def close(self) -> None:
        self._group.close()
        self._remove()

    def _call(self, command: str, on_progress: Progress | None = None, **arguments: JsonValue) -> Any:
        return self._group.call(command, row_progress(on_progress), **arguments)

    def _tensors(self, command: str, on_progress: Progress | None = None, **arguments: JsonValue) -> dict[str, Tensor]:
        """A command whose results are tensors."""
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            self._call(command, on_progress, result=str(folder), **arguments)
            return load_tensors(folder, STEM)
        finally:
            shutil.rmtree(folder)


class RankTrainer:
    """The commands of a rank."""

    def __init__(self, setup: Mapping[str, Any], world: World) -> None:
        self._run = Run(RunConfig.model_validate(setup["config"]))
        self._worker = TrainWorker(self._run, Path(setup["folder"]), world)
        self._world = world

    def start(self, folder: str) -> None:
        self._worker.start(Path(folder))

    def restore(self, folder: str) -> None:
        self._worker.restore(Path(folder))

    def save(self, folder: str) -> None:
        self._worker.save(Path(folder))

    def release(self) -> None:
        self._worker.release()

    def digests(self) -> list[str | None]:
        return list(self._worker.digests())

    def weights(self, result: str, adapter: bool) -> None:
        self._give(result, self._worker.weights(adapter))

    def score(
        self,
        result: str,
        asked: list[str],
        prompts: list[Any],
        rollouts: list[Any],
        selection: list[Any],
        reference: list[Any],
    ) -> None:
        rows = Rows(prompts=_refs(prompts), rollouts=_refs(rollouts), selection=_one(selection))
        scores = self._worker.score(asked, rows, _one(reference), _report)
        found = {name: each for name, each in vars(scores).items() if each is not None}
        tensors = {name: each.values for name, each in found.items()}
        self._give(result, tensors | {"offsets": next(iter(found.values())).offsets})

    def score_few(self, result: str, rows: str, sampling: dict[str, Any]) -> None:
        columns = load_tensors(Path(rows), STEM)
        few = Sequences(
            prompts=Ragged(values=columns["prompt_ids"], offsets=columns["prompt_offsets"]),
            responses=Ragged(values=columns["response_ids"], offsets=columns["response_offsets"]),
            prompt_of=columns["prompt_of"],
        )
        self._give(result, {"logprobs": self._worker.score_few(few, Sampling.from_json(sampling)).values})

    def update(self, inputs: list[Any], iteration: int, reference: list[Any]) -> dict[str, Any]:
        done = self._worker.update(_refs(inputs), iteration, _one(reference), _report)
        return {"steps": [asdict(step) for step in done.steps], "performance": done.performance}

    def _give(self, folder: str, tensors: Mapping[str, Tensor]) -> None:
        if self._world.rank == 0:
            save_tensors(tensors, Path(folder), STEM)


def _report(done: int, total: int, tokens: int) -> None:
    report(done=done, total=total, tokens=tokens)


def _json(refs: Sequence[ArtifactRef | None]) -> list[JsonValue]:
    return [each.model_dump(mode="json") for each in refs if each is not None]


def _refs(values: list[Any]) -> list[ArtifactRef]:
    return [ArtifactRef.model_validate(each) for each in values]


def _one(values: list[Any]) -> ArtifactRef | None:
    return ArtifactRef.model_validate(values[0]) if values else None
