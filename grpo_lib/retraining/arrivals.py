"""Which prompt files are new, and their rows in the store: from then on the files themselves are not needed."""

import datetime
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from grpo_lib.config_data import FilesData
from grpo_lib.data.files import read_columns
from grpo_lib.errors import DataError
from grpo_lib.problems.files import PromptFile, files_at, files_so_far
from grpo_lib.retraining.ledger import Ledger
from grpo_lib.retraining.records import File, Plan, Snapshot
from grpo_lib.seeds import derive_seed
from grpo_lib.storage import paths


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """A file that no decided retraining has taken."""

    file: File
    lines: list[bytes]
    """Its rows as JSON."""


def arrived(data: FilesData, taken: set[str]) -> list[Arrived]:
    """The files at ``data.train`` with a content that is new, each content once.

    Raises:
        DataError: a folder does not exist, or a file can't be read.
    """
    found: dict[str, Arrived] = {}
    for file in files_so_far(data.train, data.endpoint_url):
        content = file.read()
        digest = hashlib.sha256(content).hexdigest()
        if digest not in taken and digest not in found:
            lines = list(_lines(file.path, content))
            about = File(path=file.path, sha256=digest, bytes=len(content), prompts=len(lines))
            found[digest] = Arrived(file=about, lines=lines)
    return list(found.values())


class Watch:
    """Which files are new, asked again and again: a file is read when its size or time changed."""

    def __init__(self, data: FilesData) -> None:
        self._data = data
        self._known: dict[str, tuple[str, str]] = {}

    def new(self, taken: set[str]) -> list[tuple[str, str]]:
        """Path and sha256 of each file whose content is not taken."""
        found = []
        for file in files_so_far(self._data.train, self._data.endpoint_url):
            digest = self._digest(file)
            if digest not in taken:
                found.append((file.path, digest))
        return found

    def _digest(self, file: PromptFile) -> str:
        version = file.version()
        if file.path not in self._known or self._known[file.path][0] != version:
            self._known[file.path] = version, hashlib.sha256(file.read()).hexdigest()
        return self._known[file.path][1]


def snapshot(ledger: Ledger, number: int, name: str, lines: Sequence[bytes]) -> Snapshot:
    """Stores rows under a round, by their digest: the same rows are stored once."""
    content = b"".join(line + b"\n" for line in lines)
    digest = hashlib.sha256(content).hexdigest()
    path = paths.round_file(ledger.model, number, f"{name}-{digest[:16]}.jsonl")
    ledger.objects.create(path, content)
    return Snapshot(path=path, sha256=digest, prompts=len(lines))


def heldout_lines(data: FilesData) -> list[bytes]:
    """All held-out rows.

    Raises:
        DataError: there is nothing, or it can't be read.
    """
    return [line for file in files_at(data.heldout, data.endpoint_url) for line in _lines(file.path, file.read())]


def replayed(ledger: Ledger, plans: Sequence[Plan], share: float, seed: int, number: int) -> list[bytes]:
    """That share of what earlier rounds learned from, drawn by the seed and the round's number."""
    if not share:
        return []
    old = [line for plan in plans for line in _stored(ledger, plan.new)]
    rng = random.Random(derive_seed(seed, "replay", number))
    chosen = sorted(rng.sample(range(len(old)), round(share * len(old))))
    return [old[place] for place in chosen]


def _stored(ledger: Ledger, stored: Snapshot) -> list[bytes]:
    content = ledger.objects.get(stored.path)
    if hashlib.sha256(content).hexdigest() != stored.sha256:
        place = ledger.objects.location(stored.path)
        raise DataError(
            f"{place} does not have the sha256 that was recorded; restore it from a backup, or set replay=0"
        )
    return content.splitlines()


def _lines(path: str, content: bytes) -> Iterator[bytes]:
    """The rows of a file, each as JSON with the file's columns."""
    columns = read_columns(path, content)
    for row, values in enumerate(zip(*columns.values(), strict=True)):
        given = {name: value for name, value in zip(columns, values, strict=True) if value is not None}
        try:
            yield json.dumps(given, default=_plain, ensure_ascii=False).encode()
        except TypeError as error:
            raise DataError(f"{path}, row {row}: {error}") from None


def _plain(value: Any) -> str:
    """What JSON lacks, as prompts from files are read.

    >>> _plain(Decimal("12.50"))
    '12.50'
    """
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__} can't be kept as JSON; save that column as text")
