"""Named tensors as safetensors, in several files where they are large."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from grpo_lib.errors import CorruptError

MAX_FILE_BYTES = 4 * 2**30
ABOUT, TIED, FILES = "about", "tied", "files"
"""In each file's metadata: names that stand for the same tensor as another; how many files there are. They are JSON
under one name, because safetensors writes several in any order, and equal tensors shall be equal files."""


def save_tensors(named: Mapping[str, Tensor], folder: Path, stem: str, max_bytes: int = MAX_FILE_BYTES) -> None:
    """Writes ``<stem>.safetensors``, or ``<stem>-00001.safetensors`` and so on; tied tensors once."""
    files: list[dict[str, Tensor]] = [{}]
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    tied: dict[str, str] = {}
    size = 0
    for name, value in named.items():
        identity = (value.data_ptr(), tuple(value.shape))
        if value.numel() and identity in first:
            tied[name] = first[identity]
            continue
        first[identity] = name
        size += value.nbytes
        if files[-1] and size > max_bytes:
            files.append({})
            size = value.nbytes
        files[-1][name] = value.detach().cpu().contiguous()
    metadata = {ABOUT: json.dumps({TIED: tied, FILES: len(files)})}
    for number, part in enumerate(files, start=1):
        suffix = "" if len(files) == 1 else f"-{number:05d}"
        save_file(part, folder / f"{stem}{suffix}.safetensors", metadata=metadata)


def has_tensors(folder: Path, stem: str) -> bool:
    return bool(_files(folder, stem))


def load_tensors(folder: Path, stem: str) -> dict[str, Tensor]:
    """All that ``save_tensors`` wrote; tied ones are the same tensor again.

    Raises:
        CorruptError: a file is missing or damaged.
    """
    found: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    paths, expected = _files(folder, stem), 1
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                about = json.loads(file.metadata()[ABOUT])
        except SafetensorError as error:
            raise CorruptError(f"{path} is damaged ({error}); restore it from a backup") from error
        tied |= about[TIED]
        expected = about[FILES]
    if len(paths) != expected:
        raise CorruptError(
            f"{folder} holds {len(paths)} of {expected} files {stem}*.safetensors; restore it from a backup"
        )
    return found | {name: found[other] for name, other in tied.items()}


def _files(folder: Path, stem: str) -> list[Path]:
    single = folder / f"{stem}.safetensors"
    return [single] if single.exists() else sorted(folder.glob(f"{stem}-[0-9][0-9][0-9][0-9][0-9].safetensors"))
