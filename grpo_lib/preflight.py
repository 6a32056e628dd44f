"""What can be checked of a configuration and its surroundings in seconds, before anything expensive starts."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from grpo_lib.config import Gsm8kData, RunConfig
from grpo_lib.errors import DataError, ModelError
from grpo_lib.run import Run
from grpo_lib.storage.objects import check_store
from grpo_lib.tracking.mlflow import check_tracking, tracking_uri


def check_surroundings(config: RunConfig) -> None:
    """Store, MLflow, device, and files that the configuration names.

    Raises:
        GrpoError: for the first that is missing or broken, with the remedy.
    """
    for path in data_files(config):
        if not path.is_file():
            raise DataError(f"the data file {path} does not exist; set data.path to a jsonl file")
    check_model_path(config.model.path)
    check_store(Run(config).objects)
    check_tracking(tracking_uri(config))
    if config.placement.device not in ("auto", "cpu"):
        from grpo_lib.placement.devices import torch_device

        torch_device(config.placement.device)


def check_model_path(path: str | None) -> None:
    """A path that looks like a folder must be one with a model in it; hub names are left to Transformers."""
    if path is None:
        return
    folder = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or folder.exists()
    if not looks_local:
        return
    if not folder.is_dir():
        raise ModelError(f"model.path={path!r}: there is no such folder; give a folder with config.json, or a hub name")
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path={path!r} holds no config.json; it must be a Transformers model folder")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"model.path={path!r} holds no *.safetensors weights; convert them with save_pretrained")


def data_files(config: RunConfig) -> list[Path]:
    """The files that the run's prompts come from."""
    data = config.data
    if not isinstance(data, Gsm8kData):
        return []
    files = [Path(data.path)]
    beside = files[0].with_name("test.jsonl")
    if data.heldout_path is not None:
        files.append(Path(data.heldout_path))
    elif beside != files[0] and beside.is_file():
        files.append(beside)
    return files


def data_digests(config: RunConfig) -> dict[str, str]:
    """sha256 of every data file and of a local tokenizer: part of the key of what is made from them."""
    digests = {f"data{number}": _sha256(path) for number, path in enumerate(data_files(config))}
    return digests | {f"model/{path.name}": _sha256(path) for path in _model_files(config, ("*.json", "*.txt", "*.jinja"))}


def model_digests(config: RunConfig) -> dict[str, str]:
    """sha256 of every file of a local pretrained model."""
    return {f"model/{path.name}": _sha256(path) for path in _model_files(config, ("*.json", "*.safetensors"))}


def _model_files(config: RunConfig, patterns: tuple[str, ...]) -> Iterator[Path]:
    if config.model.path is None:
        return
    folder = Path(config.model.path).expanduser()
    for pattern in patterns:
        yield from sorted(folder.glob(pattern))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
