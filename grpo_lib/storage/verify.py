"""Reads everything that a run committed, and says what of it is not as it was."""

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from grpo_lib.errors import CorruptError, NotFoundError
from grpo_lib.storage import paths
from grpo_lib.storage.manifests import FIRST_POLICIES, IndexEntry, InputRef, Manifest, read_manifest
from grpo_lib.storage.objects import ObjectStore
from grpo_lib.storage.remake import part_problem

READERS = 8
POLICIES = ("update", *FIRST_POLICIES)
DROPPABLE = ("weights",)
"""Stages whose artifacts `grpo gc` may have removed, though they are the inputs of others."""

Kind = Literal["manifest", "part", "missing", "lineage", "index", "run"]
"""``missing``: an artifact that others were made from. ``lineage``: it does not fit to what it was made from. ``run``:
its description."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One thing that is not as it was."""

    kind: Kind
    path: str
    """Of the damaged object."""
    problem: str
    manifest: str | None
    """Of the artifact that it belongs to, in this run; None: it belongs to none."""
    expected: str | None = None
    """Content digest of that artifact, when it is ``missing`` and others remember it."""

    @property
    def place(self) -> tuple[str, int | None]:
        """Stage and iteration."""
        if self.manifest is None:
            return self.kind, None
        return paths.manifest_place(self.manifest)[:2]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a run holds."""

    run: str
    manifests: dict[str, Manifest]
    """The readable ones, by path."""
    damages: list[Damage]
    files: int
    bytes: int


def verify_run(
    objects: ObjectStore, run: str, advanced: Callable[[int, int], None] = lambda done, total: None
) -> Survey:
    """Reads manifests, parts, index entries and lineage of a run.

    Args:
        advanced: is told how many of how many files are read.
    """
    damages = list(_descriptions(objects, run))
    listed = [info.path for info in objects.list(paths.run_folder(run)) if paths.is_manifest(info.path)]
    manifests: dict[str, Manifest] = {}
    with ThreadPoolExecutor(READERS) as pool:
        for path, read in zip(listed, pool.map(lambda each: _manifest(objects, each), listed), strict=True):
            if isinstance(read, Manifest):
                manifests[path] = read
            else:
                damages.append(Damage(kind="manifest", path=path, problem=read, manifest=path))
        parts = [(each, part) for each in manifests.values() for part in each.parts]
        problems = pool.map(lambda each: part_problem(objects, each[1]), parts)
        for done, ((manifest, part), problem) in enumerate(zip(parts, problems, strict=True), start=1):
            advanced(done, len(parts))
            if problem is not None:
                damages.append(Damage(kind="part", path=part.path, problem=problem, manifest=manifest.path))
        for found in pool.map(lambda each: _index(objects, each), manifests.values()):
            damages += [] if found is None else [found]
    damages += _lineage(objects, run, manifests, {each.path for each in damages})
    size = sum(part.size for _, part in parts)
    return Survey(run=run, manifests=manifests, damages=_once(damages), files=len(listed) + len(parts), bytes=size)


def _manifest(objects: ObjectStore, path: str) -> Manifest | str:
    try:
        return read_manifest(path, objects.get(path))
    except CorruptError as error:
        return str(error).removeprefix(f"{path} ")
    except NotFoundError:
        return "is gone"


def _descriptions(objects: ObjectStore, run: str) -> Iterator[Damage]:
    for path in (paths.run_file(run), paths.continuation_file(run)):
        try:
            json.loads(objects.get(path))
        except NotFoundError:
            continue  # a run that only began has none, and most have no other settings
        except ValueError as error:
            yield Damage(kind="run", path=path, problem=f"is not JSON any more ({error})", manifest=None)


def _index(objects: ObjectStore, manifest: Manifest) -> Damage | None:
    """The index only saves work: an entry that is not there is no damage, one that misleads is."""
    if manifest.adopted_from is not None:
        return None
    path = paths.index_path(manifest.key)
    try:
        entry = IndexEntry.model_validate_json(objects.get(path))
    except NotFoundError:
        return None
    except ValidationError as error:
        problem = f"can't be read: {error.errors()[0]['msg']}"
    else:
        if entry.manifest == manifest.path:
            return None
        found = _manifest(objects, entry.manifest)
        if isinstance(found, Manifest) and found.key == manifest.key:
            return None
        problem = f"leads to {entry.manifest}, which is not it"
    return Damage(kind="index", path=path, problem=problem, manifest=manifest.path)


def _lineage(objects: ObjectStore, run: str, manifests: dict[str, Manifest], damaged: set[str]) -> Iterator[Damage]:
    """Inputs are there and are what they were; policies follow one another."""
    others: dict[str, Manifest | str] = dict(manifests)
    for manifest in manifests.values():
        for each in manifest.inputs:
            if each.manifest in damaged:
                continue
            if each.manifest not in others:
                others[each.manifest] = _manifest(objects, each.manifest)
            found = others[each.manifest]
            if isinstance(found, str):
                if each.stage not in DROPPABLE:
                    yield _lost_input(run, manifest, each, found)
            elif found.digest != each.digest:
                problem = (
                    f"was made from {each.manifest} when its digest was {each.digest[:12]}, not {found.digest[:12]}"
                )
                yield Damage(kind="lineage", path=manifest.path, problem=problem, manifest=manifest.path)
        yield from _policy(manifest, others)


def _lost_input(run: str, manifest: Manifest, lost: InputRef, how: str) -> Damage:
    if lost.manifest.startswith(f"{paths.run_folder(run)}/"):
        problem = f"{how}, and {manifest.path} was made from it"
        return Damage(kind="missing", path=lost.manifest, problem=problem, manifest=lost.manifest, expected=lost.digest)
    problem = f"was made from {lost.manifest}, which {how}"
    return Damage(kind="lineage", path=manifest.path, problem=problem, manifest=manifest.path)


def _policy(manifest: Manifest, others: dict[str, Manifest | str]) -> Iterator[Damage]:
    """An update makes the next version; a checkpoint is of the policy that it was made from."""
    before = [others.get(each.manifest) for each in manifest.inputs if each.stage in POLICIES]
    known = [each for each in before if isinstance(each, Manifest)]
    if manifest.stage not in ("update", "checkpoint") or len(known) != 1:
        return
    (old,) = known
    version, digest = (manifest.summary.get(name) for name in ("policy_version", "policy_digest"))
    if manifest.stage == "update" and version != int(str(old.summary["policy_version"])) + 1:
        problem = f"makes policy {version} of policy {old.summary['policy_version']}"
    elif manifest.stage == "checkpoint" and digest != old.summary["policy_digest"]:
        problem = f"holds policy {str(digest)[:12]}, {old.path} made {str(old.summary['policy_digest'])[:12]}"
    else:
        return
    yield Damage(kind="lineage", path=manifest.path, problem=problem, manifest=manifest.path)


def _once(damages: Iterable[Damage]) -> list[Damage]:
    """By path; what is reported for several reasons stays one thing."""
    found: dict[tuple[str, str | None], Damage] = {}
    for each in damages:
        found.setdefault((each.path, each.manifest), each)
    return sorted(found.values(), key=lambda each: (each.path, each.manifest or ""))
