"""What trains a run, at whatever policy is asked for.

Its state is always that of one committed policy, or unknown; asked for another it restores the nearest checkpoint and
replays the committed updates since, whose digests must come out as recorded. So a rollout is never generated twice,
and an update that failed half-way leaves nothing behind.
"""

import tempfile
from pathlib import Path

import torch

from grpo_lib.errors import ReplayError
from grpo_lib.placement.train import Training, TrainWorker
from grpo_lib.placement.train_ranks import TrainRanks
from grpo_lib.progress import progress
from grpo_lib.run import Run
from grpo_lib.storage.manifests import FIRST_POLICIES
from grpo_lib.storage.stages import ArtifactRef, Manifest
from grpo_lib.training.checkpoints import CHECKPOINT
from grpo_lib.training.world import World

REFERENCES = ("reference", "reference_model")
"""Stages whose artifact is a reference policy."""


class PolicyTrainer:
    """A trainer, made at first use, and which policy it holds. For one caller at a time.

    Args:
        folder: of the initial policy.
    """

    def __init__(self, run: Run, initial: ArtifactRef, folder: Path, device: torch.device) -> None:
        self._run, self._initial, self._folder, self._device = run, initial, folder, device
        self._made: Training | None = None
        self.held: str | None = None
        """Key of the policy artifact that it holds; None: unknown."""

    def get(self) -> Training:
        """What trains; a fresh one, with the initial policy, when there is none or its ranks are gone."""
        if self._made is None or not self._made.alive:
            self.close()
            self.held = None
            config = self._run.config
            made: Training
            if config.trainer.backend == "torch":
                made = TrainWorker(self._run, self._folder, World.alone(self._device))
            else:
                progress().note(f"starting {config.placement.ranks} ranks of {config.trainer.backend}")
                made = TrainRanks(self._run, self._folder, self._device)
            try:
                self._check_digests(made, self._run.stages.manifest(self._initial))
            except BaseException:
                made.close()
                raise
            self._made, self.held = made, self._initial.key
        return self._made

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None

    def end_processes(self) -> None:
        """Ends its ranks, if it has any."""
        if isinstance(self._made, TrainRanks):
            self.close()

    def release(self) -> None:
        """Gives memory of the accelerator back that is kept for later."""
        if self._made is not None and self._made.alive:
            self._made.release()

    def bring_to(self, policy: ArtifactRef) -> None:
        """Restores the nearest state before ``policy`` and replays the committed updates up to it."""
        training = self.get()
        if self.held == policy.key:
            return
        stages = self._run.stages
        node = stages.manifest(policy)
        updates: list[Manifest] = []
        checkpoint = None
        while node.stage == "update" and node.key != self.held:
            checkpoint = self._checkpoint_of(node)
            if checkpoint is not None:
                break
            if self._run.shares("update", node.iteration):
                raise ReplayError(
                    f"{node.path} belongs to the run that {self._run.name!r} branched off and was made with other "
                    f"settings, so it can't be replayed here; `grpo resume {self._run.name}` saves the policy that the "
                    "branch goes on from"
                )
            updates.append(node)
            node = self._input_policy(node)
        if node.key != self.held:
            self.held = None
            if checkpoint is None:
                training.start(self._folder)
            else:
                with tempfile.TemporaryDirectory(prefix="grpo-checkpoint-") as folder:
                    stages.download(checkpoint, Path(folder))
                    training.restore(Path(folder))
            self._check_digests(training, node)
            self.held = node.key
        for update in reversed(updates):
            self._replay(training, update)

    def _replay(self, training: Training, update: Manifest) -> None:
        stages, iteration = self._run.stages, update.iteration
        assert iteration is not None
        progress().note(f"replaying the update of iteration {iteration} from committed data")
        self.held = None
        inputs = [stages.manifest(each).to_ref(reused=True) for each in update.inputs]
        references = [each for each in inputs if each.stage in REFERENCES]
        training.update(inputs, iteration, references[0] if references else None)
        self._check_digests(training, update)
        self.held = update.key

    def _checkpoint_of(self, update: Manifest) -> ArtifactRef | None:
        key = self._run.key(CHECKPOINT, [update.to_ref(reused=True)], update.iteration)
        return self._run.stages.find(CHECKPOINT, key, update.iteration)

    def _input_policy(self, update: Manifest) -> Manifest:
        (policy,) = (each for each in update.inputs if each.stage in ("update", *FIRST_POLICIES))
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
