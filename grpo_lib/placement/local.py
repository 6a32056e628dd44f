"""Where stages run by default: in this process, on engines that stay warm between stages.

``Workers`` holds a run's trainer, rollout engine and reference model, each made at first use. The trainer's state is
always that of one committed policy, or unknown; asked for another it restores the nearest checkpoint and replays the
committed updates since, whose digests must come out as recorded. So a rollout is never generated twice, and an
update that failed half-way leaves nothing behind.
"""

import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_lib.errors import ParityError, ReplayError
from grpo_lib.generation.base import Engine
from grpo_lib.models import load_model, load_tokenizer
from grpo_lib.placement.devices import torch_device
from grpo_lib.placement.engines import is_outside, make_engine, shares_gpu
from grpo_lib.placement.train import DTYPES, Training, TrainWorker, model_folder
from grpo_lib.placement.train_ranks import TrainRanks
from grpo_lib.progress import progress
from grpo_lib.run import Run
from grpo_lib.storage.stages import ArtifactRef, InputRef, Manifest, stage_key
from grpo_lib.training.checkpoints import CHECKPOINT
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.export import Description, describe
from grpo_lib.training.world import World

REFERENCES = ("reference", "reference_model")
"""Stages whose artifact is a reference policy."""


class Workers:
    """The warm engines of one run.

    Args:
        run: whose policies these are.
        initial: the policy that the run starts from: a `warm_start` or `pretrained` artifact.
    """

    def __init__(self, run: Run, initial: ArtifactRef) -> None:
        self._run = run
        self._initial = initial
        self._trainer_lock = threading.RLock()
        self._engine_lock = threading.RLock()
        self._made: Training | None = None
        # Keys of the policy artifacts that trainer and engine hold; None: unknown.
        self._held: str | None = None
        self._engine_held: str | None = None
        self.device = torch_device(run.config.placement.device)
        self._engine_made: Engine | None = None
        self._shares_gpu = shares_gpu(run.config, self.device)
        self._folder = self._model_folder()

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

    def _training(self) -> Training:
        """What trains; a fresh one, with the initial policy, when there is none or its ranks are gone."""
        if self._made is None or not self._made.alive:
            self._close_trainer()
            self._held = None
            config = self._run.config
            made: Training
            if config.trainer.backend == "torch":
                made = TrainWorker(self._run, self._folder, World.alone(self.device))
            else:
                progress().note(f"starting {config.placement.ranks} ranks of {config.trainer.backend}")
                made = TrainRanks(self._run, self._folder, self.device)
            try:
                self._check_digests(made, self._run.stages.manifest(self._initial))
            except BaseException:
                made.close()
                raise
            self._made, self._held = made, self._initial.key
        return self._made

    def close(self) -> None:
        """Lets trainer and engine go."""
        try:
            self._close_trainer()
        finally:
            self._close_engine()

    def _close_trainer(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None

    def end_processes(self) -> None:
        """Ends the trainer's ranks and the engine's process; the next that needs them starts others."""
        try:
            with self._trainer_lock:
                if isinstance(self._made, TrainRanks):
                    self._close_trainer()
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
            yield self._training()

    @contextmanager
    def trainer_at(self, policy: ArtifactRef) -> Iterator[Training]:
        """The trainer in the state of ``policy``, for one caller at a time."""
        with self.trainer() as training:
            if self._held != policy.key:
                self._bring_to(training, policy)
            yield training

    @contextmanager
    def training(self, policy: ArtifactRef, result_key: str) -> Iterator[Training]:
        """The trainer in the state of ``policy``, to be moved on to the policy of the update ``result_key``."""
        with self.trainer_at(policy) as training:
            self._held = None  # unknown until the body is through
            yield training
            self._held = result_key

    @contextmanager
    def engine_at(self, policy: ArtifactRef) -> Iterator[Engine]:
        """The rollout engine holding the weights of ``policy``, for one caller at a time."""
        with self._engine_lock:
            if self._shares_gpu and self._made is not None and self._made.alive:
                with self._trainer_lock:
                    self._made.release()
            engine = self._engine()
            if self._engine_held != policy.key:
                self._engine_held = None
                with self.trainer_at(policy) as training:
                    weights = training.weights(self._run.config.rollout.vllm.adapters)
                    engine.wake()
                    engine.load(weights)
                self._check_loaded(engine, weights, policy)
                self._engine_held = policy.key
            engine.wake()
            yield engine

    def forget(self) -> None:
        """Whatever the trainer holds is not what was committed; the next caller gets a restored one."""
        with self._trainer_lock:
            self._held = None

    def _check_loaded(self, engine: Engine, weights: Mapping[str, Tensor], policy: ArtifactRef) -> None:
        config = self._run.config
        if config.model.dtype == "float32" and not config.rollout.vllm.adapters:
            expected = str(self._run.stages.manifest(policy).summary["policy_digest"])
        else:
            expected = weights_digest(weights, DTYPES[config.model.dtype])
        found = engine.digest()
        if found != expected:
            raise ParityError(
                f"engine {engine.name!r} ({engine.version}) was given the weights of {policy.manifest} with digest "
                f"{expected[:16]} and holds {found[:16]}; nothing was generated with them"
            )

    def _bring_to(self, training: Training, policy: ArtifactRef) -> None:
        """Restores the nearest state before ``policy`` and replays the committed updates up to it."""
        stages = self._run.stages
        node = stages.manifest(policy)
        updates: list[Manifest] = []
        checkpoint = None
        while node.stage == "update" and node.key != self._held:
            checkpoint = self._checkpoint_of(node)
            if checkpoint is not None:
                break
            updates.append(node)
            node = self._input_policy(node)
        if node.key != self._held:
            self._held = None
            if checkpoint is None:
                training.start(self._folder)
            else:
                with tempfile.TemporaryDirectory(prefix="grpo-checkpoint-") as folder:
                    stages.download(checkpoint, Path(folder))
                    training.restore(Path(folder))
            self._check_digests(training, node)
            self._held = node.key
        for update in reversed(updates):
            self._replay(training, update)

    def _replay(self, training: Training, update: Manifest) -> None:
        stages, iteration = self._run.stages, update.iteration
        assert iteration is not None
        progress().note(f"replaying the update of iteration {iteration} from committed data")
        self._held = None
        inputs = [stages.manifest(each).to_ref(reused=True) for each in update.inputs]
        references = [each for each in inputs if each.stage in REFERENCES]
        training.update(inputs, iteration, references[0] if references else None)
        self._check_digests(training, update)
        self._held = update.key

    def _checkpoint_of(self, update: Manifest) -> ArtifactRef | None:
        key = stage_key(CHECKPOINT, self._run.config, [update.to_ref(reused=True)], update.iteration)
        return self._run.stages.find(CHECKPOINT, key, update.iteration)

    def _input_policy(self, update: Manifest) -> Manifest:
        (policy,) = (each for each in update.inputs if each.stage in ("update", "warm_start", "pretrained"))
        return self._run.stages.manifest(policy)

    def _check_digests(self, training: Training, policy: Manifest) -> None:
        digests = dict(zip(("policy", "critic"), training.digests(), strict=True))
        for what, found in digests.items():
            recorded = policy.summary.get(f"{what}_digest")
            if recorded is not None and found != recorded:
                raise ReplayError(
                    f"the {what} of {policy.path} was recorded with digest {str(recorded)[:16]}, restored it has "
                    f"{str(found)[:16]}. Exact replay needs the package versions of then ({policy.packages}), the same "
                    "kind of processor, placement.threads and placement.ranks; elsewhere go on from a checkpoint, in a "
                    "new run with model.path=<its folder>"
                )


def end_processes() -> None:
    """Ends trainers' ranks and engines' processes; what is in this process itself stays warm."""
    for each in _current.values():
        each.end_processes()


_LOCK = threading.Lock()
_current: dict[tuple[str, str], Workers] = {}


def workers(run: Run, policy: ArtifactRef) -> Workers:
    """The warm engines for ``policy`` of ``run`` in this process; those of another run are let go."""
    manifest = run.stages.manifest(policy)
    initial = manifest.to_ref(reused=True)
    if "initial" in manifest.summary:
        initial = run.stages.manifest(InputRef.model_validate(manifest.summary["initial"])).to_ref(reused=True)
    with _LOCK:
        key = (run.place, initial.key)
        if key not in _current:
            for other in _current.values():
                other.close()
            _current.clear()
            _current[key] = Workers(run, initial)
        return _current[key]
