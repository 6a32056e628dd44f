"""What trains a run: policy, critic and reference, working on committed artifacts.

``TrainWorker`` is that in this process, or in each of several ranks; `train_ranks.py` has the same methods and lets
ranks do it. Only references to artifacts go in.
"""

import resource
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_lib.data.columns import flag_column
from grpo_lib.data.ragged import Ragged
from grpo_lib.errors import ReplayError
from grpo_lib.generation.base import Sampling
from grpo_lib.generation.parity import sampling_logprobs
from grpo_lib.models import load_model
from grpo_lib.plugins import load_plugins
from grpo_lib.recipe import full_kl
from grpo_lib.run import Run
from grpo_lib.seeds import derive_seed
from grpo_lib.storage.keys import ConfigView
from grpo_lib.storage.stages import ArtifactRef
from grpo_lib.training.backends import make_reference_for, make_trainer
from grpo_lib.training.base import StepMetrics
from grpo_lib.training.checkpoints import restore_trainer, save_trainer, start_trainer
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.flops import peak_tflops
from grpo_lib.training.microbatches import Sequences
from grpo_lib.training.scoring import Progress
from grpo_lib.training.updates import UPDATE, run_update, sequences
from grpo_lib.training.world import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCORES = ("logprobs", "sum_squared_probs", "ref_logprobs", "values")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows to score: prompts and rollouts of an iteration, and which of them the filters left."""

    prompts: Sequence[ArtifactRef]
    rollouts: Sequence[ArtifactRef]
    selection: ArtifactRef | None = None


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Of the response tokens of the rows scored, ``float32[N]`` each; None: not asked for."""

    logprobs: Ragged | None = None
    entropy: Ragged | None = None
    """With ``logprobs``."""
    sum_squared_probs: Ragged | None = None
    ref_logprobs: Ragged | None = None
    values: Ragged | None = None


@dataclass(frozen=True, kw_only=True)
class Updated:
    """What an update did."""

    steps: list[StepMetrics]
    performance: dict[str, float]
    """Numbers that depend on the machine: tokens a second, memory, utilisation."""


class Training(Protocol):
    """Policy, critic and reference of a run. Folders are on this machine."""

    @property
    def alive(self) -> bool:
        """Whether it can be used; a new one starts with the initial policy."""
        ...

    def start(self, folder: Path) -> None:
        """To the policy in a model folder, with everything else fresh."""
        ...

    def restore(self, folder: Path) -> None:
        """To a checkpoint."""
        ...

    def save(self, folder: Path) -> None:
        """Writes a checkpoint."""
        ...

    def digests(self) -> tuple[str, str | None]:
        """Of the policy's weights, and of the critic's."""
        ...

    def weights(self, adapter: bool = False) -> Mapping[str, Tensor]:
        """The policy as a plain Transformers model has it, float32; or its LoRA adapter alone, by peft's names."""
        ...

    def score(
        self,
        asked: Sequence[str],
        rows: Rows,
        reference: ArtifactRef | None = None,
        on_progress: Progress | None = None,
    ) -> Scores:
        """Of ``SCORES`` those asked for. ``reference``: which policy that is; None: the initial one."""
        ...

    def score_few(self, few: Sequences, sampling: Sampling) -> Ragged:
        """Log-probs, under the distribution that tokens are sampled from, of a few rows that are not committed yet."""
        ...

    def update(
        self,
        inputs: Sequence[ArtifactRef],
        iteration: int,
        reference: ArtifactRef | None = None,
        on_progress: Progress | None = None,
    ) -> Updated:
        """The optimizer steps of an iteration."""
        ...

    def release(self) -> None:
        """Gives memory of the accelerator back that is kept for later: an engine beside it needs it now."""
        ...

    def close(self) -> None: ...


def chosen_rows(run: Run, rows: Rows) -> Sequences:
    """Prompt and response ids of the rows that are scored."""
    everything = sequences(run.stages.table(rows.prompts), run.stages.table(rows.rollouts))
    if rows.selection is None:
        return everything
    chosen = flag_column(run.stages.table(rows.selection), "used")
    return everything.gather(torch.nonzero(chosen).squeeze(1))


@contextmanager
def model_folder(run: Run, reference: ArtifactRef | None, initial: Path) -> Iterator[Path]:
    """The files of a reference policy on this machine; ``initial``: those of the policy that the run starts from."""
    path = None if reference is None else run.stages.manifest(reference).summary.get("path")
    if reference is None or path is not None:
        yield initial if path is None else Path(str(path))
        return
    with tempfile.TemporaryDirectory(prefix="grpo-reference-") as name:
        run.stages.download(reference, Path(name))
        yield Path(name)


class TrainWorker:
    """`Training` in this process; with several ranks each calls the same methods, and rank 0 has the answers.

    Args:
        folder: of the initial policy.
    """

    alive = True

    def __init__(self, run: Run, folder: Path, world: World) -> None:
        self._run = run
        self._world = world
        self._initial = folder
        self._reference: str | None = None  # the digest of what the trainer's reference is
        config = run.config
        load_plugins(config.algorithm.plugins)
        self.trainer = make_trainer(
            partial(self._load, str(folder)),
            config.trainer,
            decay_steps=config.decay_steps,
            dtype=DTYPES[config.model.dtype],
            world=world,
            critic=config.critic,
            seed=derive_seed(config.seed, "adapters"),
        )

    def _load(self, folder: str) -> Any:
        alone = self._run.config.trainer.backend == "torch"  # the others move shards to where they belong
        return load_model(folder, torch.float32, str(self._world.device) if alone else "cpu")

    def start(self, folder: Path) -> None:
        start_trainer(self.trainer, folder)

    def restore(self, folder: Path) -> None:
        restore_trainer(self.trainer, folder)

    def save(self, folder: Path) -> None:
        save_trainer(self.trainer, folder, DTYPES[self._run.config.model.dtype])
        self._world.barrier()

    def digests(self) -> tuple[str, str | None]:
        return self.trainer.digest(), self.trainer.critic_digest()

    def weights(self, adapter: bool = False) -> Mapping[str, Tensor]:
        return self.trainer.weights(adapter)

    def score(
        self,
        asked: Sequence[str],
        rows: Rows,
        reference: ArtifactRef | None = None,
        on_progress: Progress | None = None,
    ) -> Scores:
        assert set(asked) <= set(SCORES), asked
        chosen = chosen_rows(self._run, rows)
        trainer, temperature = self.trainer, self._run.config.rollout.temperature
        found: dict[str, Ragged] = {}
        if "logprobs" in asked:
            found["logprobs"], found["entropy"] = trainer.logprobs(chosen, temperature, on_progress)
        if "sum_squared_probs" in asked:
            found["sum_squared_probs"] = trainer.sum_squared_probs(chosen, temperature)
        if "ref_logprobs" in asked:
            self._use_reference(reference)
            found["ref_logprobs"] = trainer.ref_logprobs(chosen, temperature, on_progress)
        if "values" in asked:
            found["values"] = trainer.values(chosen, on_progress)
        return Scores(**found)

    def score_few(self, few: Sequences, sampling: Sampling) -> Ragged:
        if sampling.shaped:
            return sampling_logprobs(self.trainer, few, sampling)
        return self.trainer.logprobs(few, sampling.temperature)[0]

    def update(
        self,
        inputs: Sequence[ArtifactRef],
        iteration: int,
        reference: ArtifactRef | None = None,
        on_progress: Progress | None = None,
    ) -> Updated:
        config = self._run.config
        if full_kl(config.algorithm) and config.algorithm.kl.coef:
            self._use_reference(reference)
        on_gpu = self._world.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._world.device)
        began = time.perf_counter()
        steps = run_update(
            self.trainer, self._run.stages, inputs, ConfigView(config, UPDATE), iteration, on_progress=on_progress
        )
        seconds = time.perf_counter() - began
        return Updated(steps=steps, performance=self._performance(steps, seconds))

    def _performance(self, steps: list[StepMetrics], seconds: float) -> dict[str, float]:
        world, on_gpu = self._world, self._world.device.type == "cuda"
        tokens, tflop = (sum(step.values.get(name, 0.0) for step in steps) for name in ("model_tokens", "model_tflop"))
        counted = tflop > 0 and self.trainer.critic is None  # whose operations are not counted, but its seconds are
        used = (
            torch.cuda.max_memory_allocated(world.device)
            if on_gpu
            else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        )
        peak_memory = world.max_(torch.tensor(float(used), dtype=torch.float64, device=world.device))
        result = {"tokens_per_second": tokens / seconds, "peak_memory_gib": float(peak_memory) / 2**30}
        peak = self._run.config.placement.peak_tflops
        if peak is None and on_gpu:
            peak = peak_tflops(torch.cuda.get_device_name(world.device))
        if peak is None or not counted:
            return result
        return result | {"model_flops_utilization": tflop / seconds / (peak * world.size)}

    def _use_reference(self, reference: ArtifactRef | None) -> None:
        """Brings the reference policy to an artifact."""
        wanted = "initial" if reference is None else reference.digest
        if self._reference == wanted:
            return
        # The initial policy of one that learns adapters is the model without them.
        config, alone = self._run.config, reference is None and self.trainer.adapter is not None
        self.trainer.reference = None  # before the new one takes memory
        with model_folder(self._run, reference, self._initial) as folder:
            load = None if alone else partial(self._reference_model, str(folder), reference)
            self.trainer.reference = make_reference_for(self.trainer, config.trainer, DTYPES[config.model.dtype], load)
        self._reference = wanted

    def _reference_model(self, folder: str, reference: ArtifactRef | None) -> Any:
        model = self._load(folder)
        if reference is not None:
            recorded, found = (
                self._run.stages.manifest(reference).summary["policy_digest"],
                weights_digest(model.state_dict()),
            )
            if found != recorded:
                raise ReplayError(
                    f"the reference policy in {folder} was recorded with digest {str(recorded)[:16]} and has now "
                    f"{found[:16]}; put the model back that it was, or start a new run"
                )
        return model

    def release(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        pass
