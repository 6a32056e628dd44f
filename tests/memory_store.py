"""A store in a dictionary, in which something else can happen before each operation."""

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from grpo_lib.errors import NotFoundError
from grpo_lib.storage.objects import ObjectInfo, Unfinished, checked_path


class MemoryStore:
    """``before`` is called before each operation; ``modified`` is the time that new objects get."""

    uri = "memory"
    compression: str | None = None

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.times: dict[str, float] = {}
        self.modified = 0.0
        self.before: Callable[[], None] = lambda: None

    def put_bytes(self, path: str, data: bytes) -> None:
        self.before()
        self.content[checked_path(path)], self.times[path] = data, self.modified

    def put_file(self, path: str, source: Path) -> None:
        self.put_bytes(path, source.read_bytes())

    @contextmanager
    def writer(self, path: str) -> Iterator[BinaryIO]:
        file = io.BytesIO()
        yield file
        self.put_bytes(path, file.getvalue())

    def create(self, path: str, data: bytes) -> bool:
        self.before()
        if path in self.content:
            return False
        self.content[checked_path(path)], self.times[path] = data, self.modified
        return True

    def get(self, path: str) -> bytes:
        self.before()
        if path not in self.content:
            raise NotFoundError(path)
        return self.content[path]

    def buffer(self, path: str) -> pa.Buffer:
        return pa.py_buffer(self.get(path))

    def fetch(self, path: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(self.get(path))

    def sha256(self, path: str) -> tuple[int, str]:
        data = self.get(path)
        return len(data), hashlib.sha256(data).hexdigest()

    def exists(self, path: str) -> bool:
        self.before()
        return path in self.content

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.before()
        found = sorted(path for path in self.content if not prefix or path.startswith(f"{prefix}/"))
        yield from [ObjectInfo(path=each, size=len(self.content[each]), modified=self.times[each]) for each in found]

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.before()
            self.content.pop(path, None)

    def unfinished(self) -> Iterator[Unfinished]:
        yield from ()

    def discard(self, write: Unfinished) -> None:
        raise AssertionError("nothing here is unfinished")

    def location(self, path: str) -> str:
        return f"memory/{path}"
