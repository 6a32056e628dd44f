"""The store in a folder: durable files, each appearing whole under its name."""

import errno
import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from grpo_lib.errors import GrpoError, NotFoundError, StoreUnreachableError
from grpo_lib.storage.objects import ObjectInfo, Unfinished, checked_path

if TYPE_CHECKING:
    import pyarrow as pa


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}\.tmp")


class LocalStore:
    """Objects are files below ``root``.

    A file is written under a hidden temporary name in its folder (``.name.1f..e.tmp``), synced, and then renamed
    (``put``) or hard-linked (``create``, which is how only one of several writers succeeds); then its folder is synced.
    Only a killed process leaves a temporary file: ``unfinished`` shows it, so that it can be cleaned away.
    """

    compression: str | None = None

    def __init__(self, root: Path) -> None:
        self.root = Path(root).expanduser().absolute()
        self.uri = str(self.root)

    def put_file(self, path: str, source: Path) -> None:
        """Stores a copy of a local file, replacing what is there."""
        with disk_errors(source), open(source, "rb") as reading, self.writer(path) as file:
            shutil.copyfileobj(reading, file, 1 << 20)

    def put_bytes(self, path: str, data: bytes) -> None:
        """Stores bytes, replacing what is there."""
        with self.writer(path) as file:
            file.write(data)

    @contextmanager
    def writer(self, path: str) -> Iterator[BinaryIO]:
        """A file to write to; it is renamed into place at the end of the block."""
        target = self._file(path)
        with disk_errors(target), _temporary(target) as (file, name):
            yield file
            _sync(file)
            os.replace(name, target)
            _sync_folder(target.parent)

    def create(self, path: str, data: bytes) -> bool:
        """Stores bytes only if nothing is there."""
        target = self._file(path)
        with disk_errors(target), _temporary(target) as (file, name):
            file.write(data)
            _sync(file)
            try:
                os.link(name, target)
            except FileExistsError:
                if os.stat(name).st_nlink == 1:  # 2: the link is ours, and NFS lost its first answer
                    return False
            _sync_folder(target.parent)
            return True

    def get(self, path: str) -> bytes:
        """The bytes of an object."""
        file = self._file(path)
        with disk_errors(file):
            return file.read_bytes()

    def buffer(self, path: str) -> "pa.Buffer":
        """The memory-mapped file."""
        import pyarrow as pa

        file = self._file(path)
        with disk_errors(file):
            if file.stat().st_size == 0:
                return pa.py_buffer(b"")  # an empty file can't be mapped
            with pa.memory_map(str(file)) as mapped:
                return mapped.read_buffer()

    def fetch(self, path: str, target: Path) -> None:
        """Copies an object to a local file."""
        with disk_errors(self._file(path)):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._file(path), target)

    def sha256(self, path: str) -> tuple[int, str]:
        """Size and sha256 of an object."""
        name = self._file(path)
        with disk_errors(name), open(name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return file.tell(), digest

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        file = self._file(path)
        with disk_errors(file):
            return file.is_file()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects below a folder, in the order of their paths."""
        found = [info for info in self._files(prefix) if not TEMPORARY.fullmatch(info.path.rpartition("/")[2])]
        yield from sorted(found, key=lambda info: info.path)

    def unfinished(self) -> Iterator[Unfinished]:
        """Temporary files."""
        for info in self._files(""):
            folder, _, name = info.path.rpartition("/")
            if match := TEMPORARY.fullmatch(name):
                path = f"{folder}/{match['name']}" if folder else match["name"]
                yield Unfinished(path=path, size=info.size, modified=info.modified, token=info.path)

    def discard(self, write: Unfinished) -> None:
        """Removes a temporary file."""
        self.delete([write.token])

    def _files(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = self._file(prefix.rstrip("/")) if prefix else self.root
        with disk_errors(folder):
            for parent, _, names in os.walk(folder, onerror=_unless_gone):
                for name in names:
                    file = Path(parent, name)
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        status = file.stat()
                        path = file.relative_to(self.root).as_posix()
                        yield ObjectInfo(path=path, size=status.st_size, modified=status.st_mtime)

    def delete(self, paths: Iterable[str]) -> None:
        """Deletes objects and the folders that this leaves empty."""
        for path in paths:
            file = self._file(path)
            with disk_errors(file):
                file.unlink(missing_ok=True)
                self._remove_empty(file.parent)

    def location(self, path: str) -> str:
        """Absolute path of an object or folder."""
        return str(self._file(path.rstrip("/")))

    def _file(self, path: str) -> Path:
        return self.root / checked_path(path)

    def _remove_empty(self, folder: Path) -> None:
        while folder != self.root:
            try:
                folder.rmdir()
            except OSError:
                return  # not empty, or gone already
            folder = folder.parent


@contextmanager
def disk_errors(place: Path) -> Iterator[None]:
    """Turns an OSError into the store's errors, with the path and what to do about it."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFoundError(f"nothing is stored at {error.filename or place}") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreUnreachableError(f"can't use {place}: {reason}; {_remedy(error.errno)}") from error


@contextmanager
def full_disk_errors() -> Iterator[None]:
    """Turns the error of a full disk, wherever the block writes and with whatever library, into the store's."""
    try:
        yield
    except GrpoError:
        raise
    except Exception as error:
        number = re.search(r"os error (\d+)", str(error))  # what libraries in Rust make of it
        code = getattr(error, "errno", None) or (int(number[1]) if number else None)
        if code not in FULL:
            raise
        raise StoreUnreachableError(
            f"can't write: {error}; {_remedy(code)}; temporary files lie in {tempfile.gettempdir()}, set TMPDIR for "
            "another place"
        ) from error


def _remedy(code: int | None) -> str:
    if code in FULL:
        return "free some space or raise the quota (`ulimit -f`), or set store.uri to a folder on another disk"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "give this user the right to read and write there, or set store.uri to another folder"
    if code in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
        return "a file and a folder are in each other's place; set store.uri to an empty or new folder"
    return "check the disk, or set store.uri to another folder"


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@contextmanager
def _temporary(target: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A new hidden file beside the target, open for writing; nothing is left of it after the block."""
    name = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    file = _open_new(name)
    try:
        with file:
            yield file, name
    finally:
        name.unlink(missing_ok=True)


def _open_new(name: Path) -> BinaryIO:
    for _ in range(100):
        try:
            _make_folder(name.parent)
            return open(name, "xb")
        except FileNotFoundError:
            continue  # somebody removed the folder while it was still empty
    raise StoreUnreachableError(f"can't make the folder {name.parent}: it is removed again and again")


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise
    _sync_folder(folder.parent)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable: a synced file in an unsynced folder may be gone after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
