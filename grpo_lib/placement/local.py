"""The engines of a run in one process, warm between stages: all by default, and in each worker of a cluster its own.

``Workers`` holds a run's trainer (`trainers.py`), its rollout engine, and what proves that, each made at first use.
"""

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_lib.data.ragged import Ragged
from grpo_lib.errors import ParityError
from grpo_lib.generation.base import Engine, Sampling
from grpo_lib.models import load_model, load_tokenizer
from grpo_lib.placement.devices import torch_device
from grpo_lib.placement.engines import is_outside, make_engine, shares_gpu
from grpo_lib.placement.scorer import Scorer
from grpo_lib.placement.train import DTYPES, Training, model_folder
from grpo_lib.placement.trainers import PolicyTrainer
from grpo_lib.progress import progress
from grpo_lib.run import Run, hands_over
from grpo_lib.storage.stages import ArtifactRef, InputRef
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.export import Description, describe
from grpo_lib.training.handover import WEIGHTS, load_weights
from grpo_lib.training.microbatches import Sequences


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """The trainer's arithmetic with the weights of one policy."""

    score_few: Callable[[Sequences, Sampling], Ragged]
    digest: Callable[[], str]


class Workers:
    """The warm engines of one run.

    Args:
        run: whose policies these are.
        initial: the policy that the run starts from: a `warm_start` or `pretrained` artifact.
        trains: there may be a trainer here; otherwise engines get every policy from its `weights` artifact.
    """

    def __init__(self, run: Run, initial: ArtifactRef, *, trains: bool = True) -> None:
        self._run = run
        self._initial = initial
        self._trains = trains
        self._trainer_lock = threading.RLock()
        self._engine_lock = threading.RLock()
        # Key of the policy artifact that the engine holds; None: unknown.
        self._engine_held: str | None = None
        self.device = torch_device(run.config.placement.device)
        self._engine_made: Engine | None = None
        self._version: int | None = None
        self._scorer: Scorer | None = None
        self._scorer_held: str | None = None
        self._shares_gpu = trains and shares_gpu(run.config, self.device)
        self._folder = self._model_folder()
        self._trainer = PolicyTrainer(run, initial, self._folder, self.device)

    def _model_folder(self) -> Path:
        """Model and tokenizer files of the initial policy on this machine."""
        manifest = self._run.stages.manifest(self._initial)
        if manifest.stage == "pretrained":
            return Path(str(manifest.summary["path"]))
        self._temporary = tempfile.TemporaryDirectory(prefix="grpo-model-")
        self._run.stages.download(self._initial, Path(self._temporary.name))
        return Path(self._temporary.name)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(str(self._folder))

    def close(self) -> None:
        """Lets trainer and engine go."""
        self._scorer = self._scorer_held = None
        try:
            self._trainer.close()
        finally:
            self._close_engine()

    def end_processes(self) -> None:
        """Ends the trainer's ranks and the engine's process; the next that needs them starts others."""
        try:
            with self._trainer_lock:
                self._trainer.end_processes()
        finally:
            with self._engine_lock:
                if is_outside(self._run.config):
                    self._close_engine()

    @property
    def description(self) -> Description:
        """Configuration of the policy's model."""
        return describe(str(self._folder))

    def reference_weights(self, reference: ArtifactRef | None) -> dict[str, Tensor]:
        """Of a reference policy, float32, on the CPU; None: the initial policy."""
        with model_folder(self._run, reference, self._folder) as folder:
            return dict(load_model(str(folder), torch.float32, "cpu").state_dict())

    def _engine(self) -> Engine:
        """What generates; a fresh one when there is none or its process is gone."""
        if self._engine_made is not None and not self._engine_made.alive:
            self._close_engine()
        if self._engine_made is None:
            config = self._run.config
            if config.rollout.engine != "local":
                progress().note(f"starting the engine: {config.rollout.engine}")
            self._engine_made = make_engine(config, self._folder, self.tokenizer, self.device)
        return self._engine_made

    def _close_engine(self) -> None:
        made, self._engine_made, self._engine_held = self._engine_made, None, None
        if made is not None:
            made.close()

    @contextmanager
    def trainer(self) -> Iterator[Training]:
        """The trainer with whatever policy it holds, for one caller at a time: to ask for the reference."""
        # In the order of `engine_at`: an engine that generates is not put to sleep.
        with self._engine_lock if self._shares_gpu else nullcontext(), self._trainer_lock:
            if self._shares_gpu and self._engine_made is not None and self._engine_made.alive:
                self._engine_made.sleep()
            assert self._trains, "this worker only generates"
            yield self._trainer.get()

    @contextmanager
    def trainer_at(self, policy: ArtifactRef) -> Iterator[Training]:
        """The trainer in the state of ``policy``, for one caller at a time."""
        with self.trainer() as training:
            self._trainer.bring_to(policy)
            yield training

    @contextmanager
    def training(self, policy: ArtifactRef, result_key: str) -> Iterator[Training]:
        """The trainer in the state of ``policy``, to be moved on to the policy of the update ``result_key``."""
        with self.trainer_at(policy) as training:
            self._trainer.held = None  # unknown until the body is through
            yield training
            self._trainer.held = result_key
            if not self._engine_held:
                self._version = self._policy_version(policy) + 1

    @contextmanager
    def engine_at(self, policy: ArtifactRef) -> Iterator[Engine]:
        """The rollout engine holding the weights of ``policy``, for one caller at a time."""
        with self._engine_lock:
            if self._shares_gpu:
                with self._trainer_lock:
                    self._trainer.release()
            engine = self._engine()
            if self._engine_held != policy.key:
                self._engine_held = None
                with self._weights(policy) as (weights, digest):
                    engine.wake()
                    engine.load(weights)
                self._check_loaded(engine, digest, policy)
                self._engine_held, self._version = policy.key, self._policy_version(policy)
            engine.wake()
            yield engine

    @contextmanager
    def scoring_at(self, policy: ArtifactRef) -> Iterator[Scoring]:
        """What proves an engine that holds ``policy``: the trainer, or where that is elsewhere or busy a scorer."""
        if self._trains and not hands_over(self._run.config):
            with self.trainer_at(policy) as training:
                yield Scoring(score_few=training.score_few, digest=lambda: training.digests()[0])
            return
        with self._engine_lock:
            if self._scorer is None:
                # Beside an engine that takes the GPU's whole memory there is room for it on the CPU only.
                beside = self._run.config.rollout.engine == "vllm"
                self._scorer = Scorer(self._run, self._folder, torch.device("cpu") if beside else self.device)
            if self._scorer_held != policy.key:
                self._scorer_held = None
                with self._weights(policy) as (weights, digest):
                    self._scorer.load(weights, digest)
                self._scorer_held = policy.key
            yield Scoring(score_few=self._scorer.score_few, digest=self._scorer.digest)

    @contextmanager
    def _weights(self, policy: ArtifactRef) -> Iterator[tuple[Mapping[str, Tensor], str]]:
        """A policy's weights, and their digest in the precision of the passes."""
        run, dtype = self._run, DTYPES[self._run.config.model.dtype]
        recorded = str(run.stages.manifest(policy).summary["policy_digest"])
        if hands_over(run.config):
            if policy.key == self._initial.key:
                weights = dict(load_model(str(self._folder), dtype, "cpu").state_dict())
                yield weights, recorded if dtype == torch.float32 else weights_digest(weights)
                return
            with tempfile.TemporaryDirectory(prefix="grpo-weights-") as name:
                committed = self._committed_weights(policy)
                run.stages.download(committed, Path(name))
                yield load_weights(Path(name)), str(run.stages.manifest(committed).summary["weights_digest"])
            return
        adapters = run.config.rollout.vllm.adapters
        with self.trainer_at(policy) as training:
            trained = training.weights(adapters)
            known = dtype == torch.float32 and not adapters
            yield trained, recorded if known else weights_digest(trained, dtype)

    def _check_loaded(self, engine: Engine, digest: str, policy: ArtifactRef) -> None:
        found = engine.digest()
        if found != digest:
            raise ParityError(
                f"engine {engine.name!r} ({engine.version}) was given the weights of {policy.manifest} with digest "
                f"{digest[:16]} and holds {found[:16]}; nothing was generated with them"
            )

    def _policy_version(self, policy: ArtifactRef) -> int:
        return int(str(self._run.stages.manifest(policy).summary["policy_version"]))

    def _committed_weights(self, policy: ArtifactRef) -> ArtifactRef:
        key = self._run.key(WEIGHTS, [policy], policy.iteration)
        found = self._run.stages.find(WEIGHTS, key, policy.iteration)
        assert found is not None, f"the flow hands the weights of {policy.manifest} over before it asks for rollouts"
        return found

    def held_version(self) -> int | None:
        """Version of the policy that the engine holds, else the trainer."""
        return self._version

    def forget(self) -> None:
        """Whatever the trainer holds is not what was committed; the next caller gets a restored one."""
        with self._trainer_lock:
            self._trainer.held = None


def end_processes() -> None:
    """Ends trainers' ranks and engines' processes; what is in this process itself stays warm."""
    for each in _current.values():
        each.end_processes()


def close_all() -> None:
    """Lets all engines of this process go; the next that needs them makes others."""
    for each in _current.values():
        each.close()
    _current.clear()


_LOCK = threading.Lock()
_current: dict[tuple[str, str, str], Workers] = {}


_trains = True


def only_generate() -> None:
    """From now on engines of this process get policies from their `weights` artifacts."""
    global _trains
    _trains = False


def workers(run: Run, policy: ArtifactRef) -> Workers:
    """The warm engines for ``policy`` of ``run`` in this process; those of another run, or settings, are let go."""
    manifest = run.stages.manifest(policy)
    initial = manifest.to_ref(reused=True)
    if "initial" in manifest.summary:
        initial = run.stages.manifest(InputRef.model_validate(manifest.summary["initial"])).to_ref(reused=True)
    with _LOCK:
        key = (run.place, initial.key, run.config.model_dump_json())
        if key not in _current:
            for other in _current.values():
                other.close()
            _current.clear()
            _current[key] = Workers(run, initial, trains=_trains)
        return _current[key]


def held_policy() -> int | None:
    """Version of the policy that an engine of this process holds, else a trainer; None: there is none."""
    for each in list(_current.values()):
        version = each.held_version()
        if version is not None:
            return version
    return None
