"""The stage store: what is there already, a new attempt at what is not, and reading what was committed.

    ref = stages.find(SPEC, key, iteration)
    if ref is None:
        with stages.attempt(SPEC, config, key, inputs, iteration) as attempt:
            attempt.write_table(table)
            ref = attempt.commit(summary={"reward_mean": 0.5})
    table = stages.table(ref)

Readers trust nothing without a manifest, and verify every part against it before they use it.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from grpo_lib.config import RunConfig
from grpo_lib.errors import CorruptError, NotFoundError
from grpo_lib.storage import paths
from grpo_lib.storage.attempts import Attempt, file_sha256
from grpo_lib.storage.keys import ConfigView, StageSpec, config_slice, stage_key
from grpo_lib.storage.manifests import ArtifactRef, IndexEntry, InputRef, Manifest, Part, canonical_json, read_manifest
from grpo_lib.storage.objects import ObjectStore

__all__ = [
    "ArtifactRef",
    "Attempt",
    "ConfigView",
    "InputRef",
    "Manifest",
    "Part",
    "StageSpec",
    "StageStore",
    "canonical_json",
    "config_slice",
    "stage_key",
]

READERS = 16
"""Manifests that are read at a time; over a network, waiting is most of it."""


class StageStore:
    """The artifacts of one run, with those of other runs that have the same key.

    Args:
        base: the run that this one branched off: what has the same key there goes before what others made.
    """

    def __init__(self, objects: ObjectStore, run: str, base: str | None = None) -> None:
        self.objects = objects
        self.run = run
        self.base = base

    def find(self, spec: StageSpec, key: str, iteration: int | None, shard: int = 0) -> ArtifactRef | None:
        """The committed artifact with that key, of this run or adopted from another; None: the stage has to run.

        Raises:
            CorruptError: when this run's own manifest is damaged.
        """
        own = paths.manifest_path(self.run, iteration, spec.name, key)
        try:
            return self._load(own).to_ref(reused=True)
        except NotFoundError:
            pass
        other = self._elsewhere(spec, key, iteration, shard)
        if other is None:
            return None
        return self._adopt(other)

    def peek(self, spec: StageSpec, key: str, iteration: int | None, shard: int = 0) -> Manifest | None:
        """What ``find`` would find; nothing is adopted, nothing written.

        Raises:
            CorruptError: when this run's own manifest is damaged.
        """
        try:
            return self._load(paths.manifest_path(self.run, iteration, spec.name, key))
        except NotFoundError:
            return self._elsewhere(spec, key, iteration, shard)

    def attempt(
        self,
        spec: StageSpec,
        config: RunConfig,
        key: str,
        inputs: Sequence[ArtifactRef],
        iteration: int | None,
        shard: int = 0,
        external: Mapping[str, str] | None = None,
    ) -> Attempt:
        """A context manager to write and commit the stage's parts with; without a commit nothing is left of it."""
        return Attempt(
            objects=self.objects,
            run=self.run,
            spec=spec,
            config=config,
            key=key,
            inputs=tuple(inputs),
            iteration=iteration,
            shard=shard,
            external=external,
            winner=lambda path: self._load(path).to_ref(reused=True),
        )

    def manifest(self, ref: ArtifactRef | InputRef) -> Manifest:
        """The manifest of an artifact.

        Raises:
            CorruptError: when it is damaged, or holds something else than when the reference was made.
        """
        manifest = self._load(ref.manifest)
        if manifest.digest != ref.digest:
            raise CorruptError(
                f"{ref.manifest} has the content digest {manifest.digest[:12]}, the reference to it {ref.digest[:12]}: "
                "it was deleted and made again; run again what was made from the first"
            )
        return manifest

    def table(self, refs: ArtifactRef | Sequence[ArtifactRef], columns: Sequence[str] | None = None) -> pa.Table:
        """All rows of one or several artifacts in order, verified; locally a view of the memory-mapped files.

        Raises:
            CorruptError: when a part is missing or damaged, with its path.
        """
        refs = [refs] if isinstance(refs, ArtifactRef) else refs
        parts = [part for ref in refs for part in self.manifest(ref).parts if part.rows is not None]
        assert parts, f"no table in {[ref.manifest for ref in refs]}"
        return pa.concat_tables([_read_table(self._verified(part), columns) for part in parts])

    def keep(self, stage: str, iteration: int | None, key: str, table: pa.Table) -> None:
        """Keeps what an attempt that fails has paid for, for the next one; it is no artifact, and garbage in time."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        data = sink.getvalue().to_pybytes()
        path = paths.judged_file(self.run, iteration, stage, key, hashlib.sha256(data).hexdigest())
        self.objects.put_bytes(path, data)

    def kept(self, stage: str, iteration: int | None) -> Iterator[pa.Table]:
        """What attempts at the stage kept; what is damaged is left out: it only saves work."""
        for info in self.objects.list(paths.iteration_folder(self.run, iteration)):
            digest = paths.judged_digest(info.path, stage)
            if digest is None:
                continue
            try:
                data = self.objects.buffer(info.path)
            except NotFoundError:
                continue  # `grpo gc` was there
            if hashlib.sha256(data).hexdigest() == digest:
                yield pa.ipc.open_file(data).read_all()

    def files(self, ref: ArtifactRef) -> dict[str, pa.Buffer]:
        """The verified content of every file, by file name; locally memory-mapped."""
        return {part.name: self._verified(part) for part in self.manifest(ref).parts}

    def download(self, ref: ArtifactRef, folder: Path) -> None:
        """Copies every file into a local folder and verifies the copies; a bad copy is removed."""
        for part in self.manifest(ref).parts:
            target = folder / part.name
            try:
                self._fetch(part, target)
            except BaseException:
                target.unlink(missing_ok=True)
                raise

    def verify(self, ref: ArtifactRef) -> None:
        """Reads everything and compares it with the manifest.

        Raises:
            CorruptError: for the first part that is missing or differs, with its path.
        """
        for part in self.manifest(ref).parts:
            self._verified(part)

    def folder(self, ref: ArtifactRef) -> str:
        """Where the parts lie, for DuckDB, Polars and pyarrow: a folder or an s3:// address.

        Raises:
            NotFoundError: when the artifact is a summary without parts.
        """
        parts = self.manifest(ref).parts
        if not parts:
            raise NotFoundError(f"{ref.manifest} has no parts: {ref.stage} commits a summary only; see its manifest")
        return self.objects.location(paths.parent(parts[0].path))

    def manifests(self, iteration: int | None = None) -> list[Manifest]:
        """Everything that the run has committed, or only in one iteration: by iteration (setup first) and time."""
        found, damaged = self._listed(iteration)
        for error in damaged.values():
            raise error
        return found

    def survey(self) -> tuple[list[Manifest], dict[tuple[str, int | None, str], str]]:
        """All sound manifests of the run; and by stage, iteration and key what is wrong with the others."""
        found, damaged = self._listed(None)
        return found, {paths.manifest_place(path): str(error) for path, error in damaged.items()}

    def _listed(self, iteration: int | None) -> tuple[list[Manifest], dict[str, CorruptError]]:
        place = paths.run_folder(self.run) if iteration is None else paths.iteration_folder(self.run, iteration)
        listed = [info.path for info in self.objects.list(place) if paths.is_manifest(info.path)]
        damaged: dict[str, CorruptError] = {}

        def load(path: str) -> Manifest | None:
            try:
                return self._load(path)
            except CorruptError as error:
                damaged[path] = error
                return None

        with ThreadPoolExecutor(READERS) as pool:
            found = [each for each in pool.map(load, listed) if each is not None]
        found.sort(key=lambda each: (-1 if each.iteration is None else each.iteration, each.created_ms))
        return found, damaged

    def _load(self, path: str) -> Manifest:
        return read_manifest(path, self.objects.get(path))

    def _elsewhere(self, spec: StageSpec, key: str, iteration: int | None, shard: int) -> Manifest | None:
        """Another run's manifest with that key, whose parts are all there: the base's, or what the index knows."""
        if self.base is not None:
            try:
                found = self._load(paths.manifest_path(self.base, iteration, spec.name, key))
            except NotFoundError:
                pass
            else:
                if self._has_parts(found):
                    return found
        return self._indexed(spec, key, iteration, shard)

    def _has_parts(self, manifest: Manifest) -> bool:
        return all(self.objects.exists(part.path) for part in manifest.parts)

    def _indexed(self, spec: StageSpec, key: str, iteration: int | None, shard: int) -> Manifest | None:
        """Another run's manifest with that key, if the index knows a sound one whose parts are all there."""
        try:
            entry = IndexEntry.model_validate_json(self.objects.get(paths.index_path(key)))
            manifest = self._load(entry.manifest)
        except (NotFoundError, CorruptError, ValueError):
            return None  # the index only saves work: without it, the stage runs
        fits = (manifest.stage, manifest.stage_version, manifest.key, manifest.iteration, manifest.shard)
        if fits != (spec.name, spec.version, key, iteration, shard):
            return None
        return manifest if self._has_parts(manifest) else None

    def _adopt(self, other: Manifest) -> ArtifactRef | None:
        """Commits a manifest in this run whose parts are the other run's files; None: those are being removed."""
        adopted = other.model_copy(update={"run": self.run, "adopted_from": other.path}).sealed()
        if not self.objects.create(adopted.path, adopted.to_bytes()):
            adopted = self._load(adopted.path)
        elif not self.objects.exists(other.path):  # `grpo gc` was between: it removes that first, and then looks again
            self.objects.delete([adopted.path])
            return None
        return adopted.to_ref(reused=True)

    def _verified(self, part: Part) -> pa.Buffer:
        try:
            data = self.objects.buffer(part.path)
        except NotFoundError as error:
            raise self._damaged(part, "does not exist") from error
        if data.size != part.size:
            raise self._damaged(part, f"has {data.size} bytes and not the {part.size}")
        if hashlib.sha256(data).hexdigest() != part.sha256:
            raise self._damaged(part, "does not have the sha256")
        return data

    def _fetch(self, part: Part, target: Path) -> None:
        try:
            self.objects.fetch(part.path, target)
        except NotFoundError as error:
            raise self._damaged(part, "does not exist") from error
        if target.stat().st_size != part.size or file_sha256(target) != part.sha256:
            raise self._damaged(part, "does not have the size and sha256")

    def _damaged(self, part: Part, how: str) -> CorruptError:
        return CorruptError(
            f"{part.path} {how}, which its manifest promises; `grpo verify {self.run}` says what can be made again"
        )


def _read_table(data: pa.Buffer, columns: Sequence[str] | None) -> pa.Table:
    if columns is None:
        return pa.ipc.open_file(data).read_all()
    schema = pa.ipc.open_file(data).schema
    indices = [schema.get_field_index(name) for name in columns]
    assert min(indices, default=0) >= 0, f"columns {list(columns)} are not all among {schema.names}"
    options = pa.ipc.IpcReadOptions(included_fields=indices)
    return pa.ipc.open_file(data, options=options).read_all().select(list(columns))
