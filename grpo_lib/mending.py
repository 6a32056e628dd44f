"""What can be done about damaged files of a run: which artifacts can be made again, and making room for that.

The manifest of a damaged artifact is set aside, never destroyed. The stage then finds nothing committed and runs again;
what comes out must have the same content as before, so that everything that was made from it stays true. It takes the
place of the damaged files, which are set aside as well. Responses that an engine draws differently each time are paid
data: they are left alone.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from grpo_lib.config import RunConfig
from grpo_lib.errors import CorruptError, NotFoundError, StoreError
from grpo_lib.patience import impatient
from grpo_lib.progress import progress
from grpo_lib.run import Run
from grpo_lib.storage import paths
from grpo_lib.storage.manifests import IndexEntry, Manifest, Remake, read_manifest
from grpo_lib.storage.objects import ObjectStore
from grpo_lib.storage.remake import part_problem
from grpo_lib.storage.verify import Damage, Survey, verify_run

DRAWN = ("rollout", "greedy_rollout", "evaluate")
"""Stages whose data an engine draws. All others compute theirs from what is stored, and can be made again."""

TIMED = ("publish",)
"""Stages whose data holds when and how fast others ran; nothing is made from it."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is to be done about one damage."""

    damage: Damage
    again: bool
    """It can be made again: `grpo resume` does so."""
    remedy: str


def note_damage(objects: ObjectStore, run: str, why: str) -> None:
    """Has the run looked through before it goes on."""
    note = json.dumps({"noticed": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()), "why": why})
    try:
        with impatient():
            objects.put_bytes(paths.damage_file(run), note.encode())
    except StoreError as error:
        progress().note(f"the damage could not be noted ({error}); `grpo verify {run}` finds it")


def mend(run: Run) -> None:
    """After a damage was noticed: reads all of the run and sets aside what can be made again."""
    if not run.objects.exists(paths.damage_file(run.name)):
        return
    progress().note(f"something of run {run.name!r} was found damaged: all of it is read and checked")
    survey = verify_run(
        run.objects, run.name, lambda done, total: progress().stage_advanced("verify", None, done, total, 0)
    )
    for verdict in verdicts(run, survey):
        damage = verdict.damage
        progress().note(f"{damage.path} {damage.problem}: {verdict.remedy}")
        if verdict.again:
            set_aside(run.objects, survey, damage)  # of several damages of an artifact the first does it
    run.objects.delete([paths.damage_file(run.name)])


@contextmanager
def mended(run: Run) -> Iterator[None]:
    """Mends the run, and has it mended the next time when the block comes upon damage."""
    mend(run)
    try:
        yield
    except CorruptError as error:
        note_damage(run.objects, run.name, str(error))
        raise


def verdicts(run: Run, survey: Survey) -> list[Verdict]:
    """For each damage of a run whether it can be made again, and the remedy."""
    return list(_Judge(run, survey).verdicts())


class _Judge:
    def __init__(self, run: Run, survey: Survey) -> None:
        self._run, self._survey = run, survey
        self._damaged: dict[str, list[Damage]] = {}
        for each in survey.damages:
            if each.manifest is not None and each.kind != "index":
                self._damaged.setdefault(each.manifest, []).append(each)
        self._known: dict[str, str | None] = {}

    def verdicts(self) -> Iterator[Verdict]:
        for damage in self._survey.damages:
            obstacle = self._obstacle(damage)
            remedy = obstacle or f"`grpo resume {self._run.name}` sets it aside and makes it again"
            yield Verdict(damage=damage, again=obstacle is None, remedy=remedy)

    def _obstacle(self, damage: Damage) -> str | None:
        """Why it can't be made again, with what to do instead; None: it can."""
        if damage.kind == "index":
            return None
        if damage.manifest is None:
            return "bring it back from a backup: it says what the run is"
        return self._artifact(damage.manifest)

    def _artifact(self, path: str) -> str | None:
        if path not in self._known:
            self._known[path] = None  # of a circle, which there is none
            self._known[path] = self._obstacle_of(path)
        return self._known[path]

    def _obstacle_of(self, path: str) -> str | None:
        stage, iteration, _ = paths.manifest_place(path)
        branch = "start another run"
        if iteration is not None:
            branch = f"go on in a branch, `grpo rerun {self._run.name} --iteration {iteration} --from {stage}`"
        manifest = self._survey.manifests.get(path)
        lineage = [each for each in self._damaged[path] if each.kind == "lineage"]
        if lineage:
            return f"what it was made from is another, or gone: {branch}"
        if _origin(self._run.objects, manifest) is not None:
            return None  # the run that it was adopted from has made it again
        owner = self._run.at(stage, iteration, 0 if manifest is None else manifest.shard)
        if owner is not self._run:
            return f"it is that of run {owner.name!r}: `grpo verify {owner.name}` and `grpo resume {owner.name}` first"
        if stage in DRAWN and not draws_the_same_again(self._run.config):
            return (
                f"its responses are paid data, and engine {self._run.config.rollout.engine!r} would draw others: bring "
                f"it back from a backup, or {branch}"
            )
        for each in () if manifest is None else manifest.inputs:
            if each.manifest in self._damaged and self._artifact(each.manifest) is not None:
                return f"it is made from {each.manifest}, which can't be made again: first see to that"
        return None


def draws_the_same_again(config: RunConfig) -> bool:
    """Whether the engine gives the same responses to the same prompts, bit for bit."""
    rollout, ray = config.rollout, config.placement.ray
    if rollout.engine != "local" or (rollout.partial is not None and rollout.partial.seconds is not None):
        return False
    if config.placement.kind == "ray":
        return not ray.rollout_gpus and not ray.train_gpus
    if config.placement.device == "auto":
        from grpo_lib.placement.devices import torch_device

        return torch_device("auto").type == "cpu"
    return config.placement.device == "cpu"


def _origin(objects: ObjectStore, manifest: Manifest | None) -> Manifest | None:
    """Of an adopted artifact that of the other run, if it is sound and the same; so it can be adopted anew."""
    if manifest is None or manifest.adopted_from is None:
        return None
    try:
        found = read_manifest(manifest.adopted_from, objects.get(manifest.adopted_from))
    except (NotFoundError, CorruptError):
        return None
    sound = found.digest == manifest.digest and all(part_problem(objects, each) is None for each in found.parts)
    return found if sound else None


def set_aside(objects: ObjectStore, survey: Survey, damage: Damage) -> None:
    """Makes room for an artifact to be made again, with the content that it had."""
    assert damage.manifest is not None
    path, manifest = damage.manifest, survey.manifests.get(damage.manifest)
    index = paths.index_path(paths.manifest_place(path)[2])
    if damage.kind == "index":
        objects.put_bytes(index, IndexEntry(manifest=path).model_dump_json().encode())
        return
    aside = _copied_aside(objects, path)
    if aside is None and objects.exists(paths.remake_file(path)):
        return  # it was set aside before
    origin = _origin(objects, manifest)
    if origin is not None:
        objects.put_bytes(index, IndexEntry(manifest=origin.path).model_dump_json().encode())
    else:
        own = manifest is not None and manifest.adopted_from is None
        remake = Remake(digest=_expected(survey, path), manifest=aside if own else None)
        objects.put_bytes(paths.remake_file(path), remake.model_dump_json().encode())
        objects.delete([index])  # nobody else shall adopt it
    objects.delete([path])


def _copied_aside(objects: ObjectStore, manifest: str) -> str | None:
    """Where a manifest is kept from now on; None: there is none."""
    try:
        data = objects.get(manifest)
    except NotFoundError:
        return None
    aside = paths.aside(manifest, hashlib.sha256(data).hexdigest())
    objects.put_bytes(aside, data)
    return aside


def _expected(survey: Survey, path: str) -> str | None:
    """The content digest, by the manifest itself or what was made from it; None: nobody depends on it."""
    if paths.manifest_place(path)[0] in TIMED:
        return None
    if path in survey.manifests:
        return survey.manifests[path].digest
    inputs = (each for other in survey.manifests.values() for each in other.inputs)
    digests = {each.digest for each in inputs if each.manifest == path}
    return digests.pop() if len(digests) == 1 else None
