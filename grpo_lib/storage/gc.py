"""What of a store nobody needs any more, and removing it.

    attempt       files of an attempt that was killed before its commit
    weights       policies as engines load them: the trainer makes them again from its checkpoints
    unfinished    writes that a kill cut off: temporary files, uploads in parts
    lease         claims of holders that are gone
    probe         what checks of the store left

What a manifest refers to stays, in whatever run it is. An artifact is removed manifest first, so that no reader sees a
manifest without its parts; a run that adopts it meanwhile either is seen by the second look at who refers to the parts,
or finds the manifest gone and adopts nothing.
"""

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from pydantic import ValidationError

from grpo_lib.errors import CorruptError, NotFoundError
from grpo_lib.storage import paths
from grpo_lib.storage.manifests import IndexEntry, Manifest, read_manifest
from grpo_lib.storage.objects import ObjectInfo, ObjectStore, Unfinished

READERS = 16
WEIGHTS = "weights"
Kind = Literal["attempt", "weights", "unfinished", "lease", "probe"]


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """One thing that can go."""

    kind: Kind
    run: str | None
    path: str
    files: tuple[str, ...]
    bytes: int
    why: str
    manifest: Manifest | None = None
    """Of weights."""
    write: Unfinished | None = None


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What may go."""

    older_than: float
    """Seconds."""
    keep_weights: int
    """The last policies of each run whose weights stay."""
    now: float
    """Seconds since 1970."""
    runs: Collection[str] | None = None
    """Only of these; None: of all, and what belongs to none."""
    busy: Collection[str] = ()
    """Runs on which somebody works."""

    def old(self, modified: float) -> bool:
        return modified <= self.now - self.older_than

    def concerns(self, run: str | None) -> bool:
        return self.runs is None or run in self.runs

    def may_go(self, run: str | None, infos: Iterable[ObjectInfo]) -> bool:
        """Whether files that only flows of ``run`` use are old enough, and nobody works on it."""
        return self.concerns(run) and run not in self.busy and all(self.old(info.modified) for info in infos)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a store holds, and who refers to what."""

    infos: dict[str, ObjectInfo]
    manifests: dict[str, Manifest] = field(default_factory=dict)
    unreadable: set[tuple[str, str]] = field(default_factory=set)
    """Stage and key of manifests that can't be read, or were set aside: nobody knows which parts they refer to."""

    def referrers(self) -> dict[str, set[str]]:
        """By path of a part the manifests that refer to it."""
        found: dict[str, set[str]] = {}
        for path, manifest in self.manifests.items():
            for part in manifest.parts:
                found.setdefault(part.path, set()).add(path)
        return found


def contents(objects: ObjectStore) -> Contents:
    """Lists everything and reads all manifests."""
    infos = {info.path: info for folder in (paths.RUNS, paths.DAMAGED, paths.PROBES) for info in objects.list(folder)}
    found = Contents(infos=infos)
    listed = [path for path in infos if path.startswith(f"{paths.RUNS}/") and paths.is_manifest(path)]
    with ThreadPoolExecutor(READERS) as pool:
        for path, manifest in zip(listed, pool.map(lambda each: _load(objects, each), listed), strict=True):
            if manifest is not None:
                found.manifests[path] = manifest
            else:
                found.unreadable.add(_identity(path))
    aside = [path for path in infos if path.startswith(f"{paths.DAMAGED}/") and path.endswith(".json")]
    found.unreadable.update(_identity(path.removeprefix(f"{paths.DAMAGED}/")) for path in aside)
    return found


def garbage(objects: ObjectStore, rules: Rules) -> list[Garbage]:
    """Everything that can go, in the order in which it is found."""
    found = contents(objects)
    things = [*_attempts(found, rules), *_weights(found, rules), *_leases(found, rules), *_probes(found, rules)]
    for write in objects.unfinished():
        run = paths.run_of(write.path)
        if rules.old(write.modified) and rules.concerns(run):
            why = "a write that was cut off"
            things.append(
                Garbage(kind="unfinished", run=run, path=write.path, files=(), bytes=write.size, why=why, write=write)
            )
    return things


def remove(objects: ObjectStore, things: Iterable[Garbage], removed: Callable[[Garbage], None]) -> None:
    """Removes them, weights last; ``removed`` is told of each."""
    weights: list[Garbage] = []
    for thing in things:
        if thing.kind == "weights":
            weights.append(thing)
            continue
        if thing.write is not None:
            objects.discard(thing.write)
        elif thing.kind != "attempt" or not _is_committed(objects, thing):
            objects.delete(thing.files)
        removed(thing)
    if not weights:
        return
    objects.delete([thing.path for thing in weights])
    needed = contents(objects).referrers()  # again, now that nobody can adopt them any more
    for thing in weights:
        assert thing.manifest is not None
        objects.delete([part.path for part in thing.manifest.parts if part.path not in needed])
        _forget(objects, thing.manifest)
        removed(thing)


def _attempts(found: Contents, rules: Rules) -> list[Garbage]:
    needed, folders = found.referrers(), dict[str, list[ObjectInfo]]()
    for path, info in found.infos.items():
        folder = paths.attempt_of(path)
        if folder is not None:
            folders.setdefault(folder, []).append(info)
    things = []
    for folder, infos in folders.items():
        run = paths.run_of(folder)
        free = not any(info.path in needed for info in infos) and _identity(folder) not in found.unreadable
        if free and rules.may_go(run, infos):
            things.append(_thing("attempt", run, folder, infos, "no manifest refers to it"))
    return things


def _weights(found: Contents, rules: Rules) -> list[Garbage]:
    by_run: dict[str, list[Manifest]] = {}
    for manifest in found.manifests.values():
        if manifest.stage == WEIGHTS:
            by_run.setdefault(manifest.run, []).append(manifest)
    needed, things = found.referrers(), []
    for run, manifests in by_run.items():
        manifests.sort(key=lambda each: int(str(each.summary.get("policy_version", 0))), reverse=True)
        for manifest in manifests[rules.keep_weights :]:
            files = (manifest.path, *(part.path for part in manifest.parts))
            infos = [found.infos[path] for path in files if path in found.infos]
            if rules.may_go(run, infos) and not _is_needed(manifest, needed):
                own = [info for info in infos if paths.run_of(info.path) == run]
                things.append(_thing("weights", run, manifest.path, own, "can be made again", manifest))
    return things


def _is_needed(manifest: Manifest, needed: dict[str, set[str]]) -> bool:
    """Another run has adopted them; those that this run adopted itself are the other's to keep."""
    others = (each for part in manifest.parts for each in needed[part.path] - {manifest.path})
    return manifest.adopted_from is None and any(others)


def _leases(found: Contents, rules: Rules) -> list[Garbage]:
    by_run: dict[str, list[ObjectInfo]] = {}
    for path, info in found.infos.items():
        run = paths.run_of(path)
        if run is not None and paths.parent(path) == paths.leases_folder(run):
            by_run.setdefault(run, []).append(info)
    things = []
    for run, infos in by_run.items():
        newest = max(paths.file_name(info.path)[:6] for info in infos)
        old = [info for info in infos if paths.file_name(info.path)[:6] != newest and rules.old(info.modified)]
        if old and rules.concerns(run):
            things.append(_thing("lease", run, paths.leases_folder(run), old, "of flows that ended"))
    return things


def _probes(found: Contents, rules: Rules) -> list[Garbage]:
    infos = [info for path, info in found.infos.items() if path.startswith(f"{paths.PROBES}/")]
    old = [info for info in infos if rules.old(info.modified)]
    return [_thing("probe", None, paths.PROBES, old, "left by a check")] if old and rules.concerns(None) else []


def _thing(
    kind: Kind, run: str | None, path: str, infos: list[ObjectInfo], why: str, manifest: Manifest | None = None
) -> Garbage:
    files, size = tuple(info.path for info in infos), sum(info.size for info in infos)
    return Garbage(kind=kind, run=run, path=path, files=files, bytes=size, why=why, manifest=manifest)


def _is_committed(objects: ObjectStore, attempt: Garbage) -> bool:
    """Whether it was committed since it was found to be garbage."""
    manifest = _load(objects, paths.file_in(paths.parent(attempt.path), paths.MANIFEST))
    return manifest is not None and any(part.path in attempt.files for part in manifest.parts)


def _forget(objects: ObjectStore, manifest: Manifest) -> None:
    """Removes the index entry that leads to a manifest that is gone."""
    path = paths.index_path(manifest.key)
    try:
        entry = IndexEntry.model_validate_json(objects.get(path))
    except (NotFoundError, ValidationError):
        return
    if entry.manifest == manifest.path:
        objects.delete([path])


def _load(objects: ObjectStore, path: str) -> Manifest | None:
    try:
        return read_manifest(path, objects.get(path))
    except (NotFoundError, CorruptError):
        return None


def _identity(path: str) -> tuple[str, str]:
    """Stage and key, of the path of a manifest or an attempt's folder."""
    stage, key = path.split("/")[-3:-1]
    return stage, key
