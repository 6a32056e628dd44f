"""One attempt at a stage: parts first, the manifest last, and nothing is left of an attempt that does not commit."""

import hashlib
import logging
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import pyarrow as pa
from pydantic import JsonValue, ValidationError

from grpo_lib.config import RunConfig
from grpo_lib.errors import CorruptError, NotFoundError, StoreError
from grpo_lib.storage import paths
from grpo_lib.storage.keys import StageSpec, config_slice
from grpo_lib.storage.manifests import ArtifactRef, IndexEntry, InputRef, Manifest, Part, Remake, content_digest
from grpo_lib.storage.objects import ObjectStore
from grpo_lib.storage.remake import restored

logger = logging.getLogger(__name__)

RECORDED_PACKAGES = ("torch", "transformers", "pyarrow", "prefect")


class Attempt:
    """A context manager to write a stage's parts in and to commit them; made by ``StageStore.attempt``.

    Several attempts at the same stage may run at once, in any number of processes; one of them wins the commit.
    """

    def __init__(
        self,
        *,
        objects: ObjectStore,
        run: str,
        spec: StageSpec,
        config: RunConfig,
        key: str,
        inputs: Sequence[ArtifactRef],
        iteration: int | None,
        shard: int,
        external: Mapping[str, str] | None = None,
        winner: Callable[[str], ArtifactRef],
    ) -> None:
        self._objects, self._run, self._spec, self._config = objects, run, spec, config
        self._key, self._inputs, self._iteration, self._shard = key, inputs, iteration, shard
        self._external = dict(external or {})
        self._winner = winner
        stage_folder = paths.stage_folder(run, iteration, spec.name, key)
        self._folder = paths.attempt_folder(stage_folder, uuid.uuid4().hex)
        self._remake_file = paths.remake_file(paths.manifest_path(run, iteration, spec.name, key))
        self._parts: list[Part] = []
        self._tables = 0
        self._started = time.perf_counter()
        self._closed = False

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closed:
            return
        self._closed = True
        self._discard()

    def write_table(self, table: pa.Table) -> None:
        """Adds the next ``part-00000.arrow``, in Arrow's IPC file format."""
        path = self._new_path(paths.part_file(self._tables))
        with self._objects.writer(path) as file:
            hashing = _HashingFile(file)
            options = pa.ipc.IpcWriteOptions(compression=self._objects.compression)
            with pa.ipc.new_file(pa.PythonFile(hashing, mode="w"), table.schema, options=options) as writer:
                writer.write_table(table)
        self._parts.append(Part(path=path, size=hashing.size, sha256=hashing.sha256(), rows=table.num_rows))
        self._tables += 1

    def write_file(self, name: str, source: Path | bytes) -> None:
        """Adds any other file, under a plain file name."""
        assert name != paths.MANIFEST, f"{name} is the name of the manifest"
        path = self._new_path(name)
        if isinstance(source, bytes):
            size, digest = len(source), hashlib.sha256(source).hexdigest()
            self._objects.put_bytes(path, source)
        else:
            self._objects.put_file(path, source)
            size, digest = source.stat().st_size, file_sha256(source)
        self._parts.append(Part(path=path, size=size, sha256=digest, rows=None))

    def commit(
        self,
        *,
        rows: int | None = None,
        tokens: int = 0,
        summary: Mapping[str, JsonValue] | None = None,
        seconds: float | None = None,
    ) -> ArtifactRef:
        """Makes the parts the stage's result, or drops them and returns the result of an attempt that was faster.

        Args:
            rows: of the artifact; by default those of its tables.
            tokens: that the stage handled, for throughput.
            summary: small results as JSON values; they survive unchanged.
            seconds: that the stage took; by default the time since the attempt began.

        Raises:
            ValueError: when the summary holds a NaN or an infinity, or something that is no JSON value.
        """
        assert not self._closed, "an attempt commits once"
        manifest = self._manifest(rows, tokens, dict(summary or {}), seconds)
        if self.remake is not None and self.remake.digest not in (None, manifest.digest):
            raise self._differs(manifest, str(self.remake.digest))
        if self.remake is not None:
            manifest = restored(self._objects, manifest, self.remake)
        # From here on the parts are kept, come what may: a manifest whose creation failed may be there all the same.
        self._closed = True
        if not self._objects.create(manifest.path, manifest.to_bytes()):
            self._discard()
            return self._winner(manifest.path)
        self._objects.put_bytes(
            paths.index_path(self._key), IndexEntry(manifest=manifest.path).model_dump_json().encode()
        )
        if self.remake is not None:
            self._objects.delete([self._remake_file])
        return manifest.to_ref(reused=False)

    @cached_property
    def remake(self) -> Remake | None:
        """What is to come out, because what was committed has been damaged; None: it was never committed."""
        try:
            return Remake.model_validate_json(self._objects.get(self._remake_file))
        except NotFoundError:
            return None
        except ValidationError as error:
            place = self._objects.location(self._remake_file)
            raise CorruptError(f"{place} is damaged; delete it: then {self._spec.name} is made anew") from error

    def _differs(self, manifest: Manifest, expected: str) -> CorruptError:
        place = "" if self._iteration is None else f" --iteration {self._iteration}"
        return CorruptError(
            f"{manifest.path} was damaged and set aside. Made again, its content digest is {manifest.digest[:12]} and "
            f"not {expected[:12]}, so what was made from it would not follow. Did package versions, kind of processor, "
            "placement.threads or ranks change? Make it where it was made, bring it back from a backup, or go on in a "
            f"branch: `grpo rerun {self._run}{place} --from {self._spec.name}`"
        )

    def _manifest(
        self, rows: int | None, tokens: int, summary: dict[str, JsonValue], seconds: float | None
    ) -> Manifest:
        spec = self._spec
        return Manifest(
            stage=spec.name,
            stage_version=spec.version,
            key=self._key,
            digest=content_digest(spec.name, spec.version, self._parts, summary),
            run=self._run,
            iteration=self._iteration,
            shard=self._shard,
            rows=sum(part.rows or 0 for part in self._parts) if rows is None else rows,
            tokens=tokens,
            parts=self._parts,
            inputs=[InputRef(stage=ref.stage, manifest=ref.manifest, digest=ref.digest) for ref in self._inputs],
            config=config_slice(self._config, spec.reads),
            external=self._external,
            seed=self._config.seed,
            summary=summary,
            created_ms=time.time_ns() // 1_000_000,
            seconds=time.perf_counter() - self._started if seconds is None else seconds,
            host=socket.gethostname(),
            code_version=_code_version(),
            packages=package_versions(),
            adopted_from=None,
        ).sealed()

    def _new_path(self, name: str) -> str:
        assert not self._closed, "the attempt is over"
        path = paths.file_in(self._folder, name)
        assert path not in {part.path for part in self._parts}, f"the attempt has a file {name} already"
        return path

    def _discard(self) -> None:
        try:
            self._objects.delete([info.path for info in self._objects.list(self._folder)])
        except StoreError as error:
            logger.warning("uncommitted files in %s are left behind: %s", self._objects.location(self._folder), error)


def file_sha256(path: Path) -> str:
    """sha256 of a local file, as hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _HashingFile:
    """Passes everything on to a file and hashes it on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash = file, hashlib.sha256()
        self.size = 0
        self.closed = False

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def sha256(self) -> str:
        return self._hash.hexdigest()


@cache
def _code_version() -> str:
    try:
        return metadata.version("grpo-pipeline")
    except metadata.PackageNotFoundError:
        return "unknown"


@cache
def package_versions() -> dict[str, str]:
    """Of what may change what comes out; a package that is not installed is left out."""
    found = {}
    for name in RECORDED_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
