"""The object store: named, immutable byte strings, in a folder or in an S3 bucket.

Everything above this protocol is written once for both. Paths are relative to the store's root and use "/"; an object
appears whole or not at all, and what a call has stored survives a power cut after that call has returned.
"""

import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from grpo_lib.config import StoreConfig
from grpo_lib.errors import ConfigError, StoreUnreachableError
from grpo_lib.storage import paths

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """One stored object, as a listing shows it."""

    path: str
    """Relative to the store's root."""
    size: int
    """Bytes."""
    modified: float
    """Seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """A write that is going on, or whose process was killed."""

    path: str
    """Of the object that it was to become."""
    size: int
    """Bytes that it holds already."""
    modified: float
    """Seconds since 1970."""
    token: str
    """What the store knows it by."""


class ObjectStore(Protocol):
    """What a store can do.

    Every method raises StoreUnreachableError when the store refuses or is full, StoreDownError when it does not answer,
    and NotFoundError when there is no such object to read.
    """

    uri: str
    """Folder or s3:// address, for people."""
    compression: str | None
    """Codec for Arrow data: None where files are memory-mapped, "zstd" behind a network."""

    def put_file(self, path: str, source: Path) -> None:
        """Stores a copy of a local file, replacing what is there."""

    def put_bytes(self, path: str, data: bytes) -> None:
        """Stores bytes, replacing what is there."""

    def writer(self, path: str) -> AbstractContextManager[BinaryIO]:
        """A file to write to; it is stored at the end of the block, and dropped when the block raises."""

    def create(self, path: str, data: bytes) -> bool:
        """Stores bytes only if nothing is there; of several callers at once, exactly one gets True."""

    def get(self, path: str) -> bytes:
        """The bytes of an object."""

    def buffer(self, path: str) -> "pa.Buffer":
        """An object for Arrow to read: memory-mapped locally, downloaded from S3."""

    def fetch(self, path: str, target: Path) -> None:
        """Copies an object to a local file."""

    def sha256(self, path: str) -> tuple[int, str]:
        """Size in bytes and sha256 of an object, whatever its size: it is never held in memory as a whole."""

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects below a folder, at any depth, in the order of their paths; "" is the whole store."""

    def delete(self, paths: Iterable[str]) -> None:
        """Deletes objects; those that are not there are no error."""

    def unfinished(self) -> Iterator[Unfinished]:
        """All writes that are going on, or were cut off by a kill and left something behind."""

    def discard(self, write: Unfinished) -> None:
        """Removes what a write that was cut off left behind; one that is gone is no error."""

    def location(self, path: str) -> str:
        """Absolute path or s3:// address of an object or folder, for people and for other programs."""


def checked_path(path: str) -> str:
    """The path itself, if it stays below the root.

    Raises:
        ValueError: for an empty or absolute path, one with "..", "." or empty steps, or with a backslash.

    >>> checked_path("runs/demo/run.json")
    'runs/demo/run.json'
    """
    if "\\" in path or "\0" in path or any(step in ("", ".", "..") for step in path.split("/")):
        raise ValueError(
            f"object path {path!r} must be relative, its steps joined by '/', and none of them '.' or '..'"
        )
    return path


def open_store(config: StoreConfig) -> ObjectStore:
    """The store that the configuration names.

    Raises:
        ConfigError: when store.uri is neither a folder nor s3://bucket/prefix.
    """
    if config.uri.startswith("s3://"):
        from grpo_lib.storage.s3 import S3Store

        bucket, _, prefix = config.uri.removeprefix("s3://").partition("/")
        return S3Store(
            bucket, prefix.strip("/"), config.endpoint_url, config.region, patience_seconds=config.patience_seconds
        )
    if "://" in config.uri:
        raise ConfigError(f"store.uri={config.uri!r}: use a folder or s3://bucket/prefix")
    from grpo_lib.storage.local import LocalStore

    return LocalStore(Path(config.uri))


def check_store(store: ObjectStore) -> None:
    """Writes, creates twice, reads, lists and deletes a probe object: everything that a run needs of its store.

    Raises:
        StoreUnreachableError: with the remedy.
    """
    folder = f"{paths.PROBES}/{uuid.uuid4().hex}"
    written, created = f"{folder}/written", f"{folder}/created"
    store.put_bytes(written, b"probe")
    try:
        if not store.create(created, b"first") or store.create(created, b"second") or store.get(created) != b"first":
            raise StoreUnreachableError(
                f"{store.uri} overwrites an object that should only be created when absent, so two writers lose data; "
                "use a store that honours 'If-None-Match: *' (AWS S3, MinIO, Ceph, R2 ...) or a local folder"
            )
        if store.get(written) != b"probe" or len(list(store.list(folder))) != 2:
            raise StoreUnreachableError(
                f"{store.uri} does not give back what was written just before; use a store that is read-after-write "
                "consistent"
            )
    finally:
        store.delete([written, created])
    if store.exists(written):
        raise StoreUnreachableError(f"{store.uri} does not delete objects; grant the right to delete them")
