"""Starting from another run's policy: its checkpoint in the store, and the whole model that it stands for."""

import json
import tempfile
from pathlib import Path
from typing import Any

from grpo_lib.config import RunConfig, StoreConfig
from grpo_lib.errors import ConfigError, CorruptError, NotFoundError
from grpo_lib.problems import get_problem
from grpo_lib.run import Run, load_run
from grpo_lib.storage.manifests import FIRST_POLICIES, Manifest, latest

TOKENIZER = "tokenizer.json"


def checkpoint_to_start_from(config: RunConfig) -> Manifest:
    """The checkpoint that ``model.start`` names.

    Raises:
        NotFoundError: there is no such run, or no checkpoint of that version; naming those that are there.
    """
    start = config.model.start
    assert start is not None
    return checkpoint_of(config.store, start.run, start.version)


def checkpoint_of(store: StoreConfig, name: str, version: int, digest: str | None = None) -> Manifest:
    """The checkpoint of a policy of a run.

    Args:
        digest: of the policy, if it is known.

    Raises:
        NotFoundError: there is no such run in the store, or no such checkpoint, naming those that are there; or a file
            of it is gone.
    """
    run = load_run(store, name)
    saved = {int(str(each.summary["policy_version"])): each for each in latest(run.manifests(), "checkpoint")}
    found = saved.get(version)
    if found is None or digest not in (None, found.summary["policy_digest"]):
        wanted = "" if digest is None else f" with digest {digest[:12]}"
        raise NotFoundError(
            f"run {name!r} in {run.objects.uri} has no checkpoint of policy {version}{wanted}; it has those of "
            f"{', '.join(map(str, sorted(saved))) or 'none'}"
        )
    gone = next((part.path for part in found.parts if not run.objects.exists(part.path)), None)
    if gone is not None:
        raise NotFoundError(f"{run.objects.location(gone)} is gone; `grpo verify {name}` says what can be made again")
    return found


def check_start(config: RunConfig) -> None:
    """The policy to start from is there, and the run's tokenizer is the one that it learned with.

    Raises:
        NotFoundError: there is no such checkpoint.
        ConfigError: the tokenizers differ.
    """
    if config.model.start is None:
        return
    from grpo_lib.models import run_tokenizer

    checkpoint = checkpoint_to_start_from(config)
    theirs = json.loads(bytes(Run(config).stages.files(checkpoint.to_ref(reused=True))[TOKENIZER]))
    with tempfile.TemporaryDirectory() as folder:
        run_tokenizer(config.model.path, get_problem(config.data.problem)).save_pretrained(folder)
        ours = json.loads((Path(folder) / TOKENIZER).read_bytes())
    different = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
    if different:
        origin = "the problem's small model" if config.model.path is None else f"model.path={config.model.path!r}"
        raise ConfigError(
            f"the tokenizer of {origin} is not the one that policy {config.model.start.version} of run "
            f"{config.model.start.run!r} learned with (they differ in {', '.join(different)}); set model.path to the "
            f"model that it began as, or to what `grpo export {config.model.start.run} FOLDER` writes"
        )


def whole_model(config: RunConfig, checkpoint: Manifest, folder: Path) -> str:
    """Writes the policy of a checkpoint as a model folder in float32, adapters merged.

    Args:
        config: its store says where the run of the checkpoint is.

    Returns:
        The digest of the weights.

    Raises:
        CorruptError: they are not those that the checkpoint was made of; of adapters: that they were trained on.
    """
    import torch

    from grpo_lib.training.export import describe, export_model

    run = load_run(config.store, checkpoint.run)
    with tempfile.TemporaryDirectory(prefix="grpo-start-") as name:
        saved = Path(name) / "checkpoint"
        saved.mkdir()
        run.stages.download(checkpoint.to_ref(reused=True), saved)
        if (saved / "adapter_config.json").exists():
            first, model = _first_model(run, Path(name) / "first")
            digest = export_model(describe(first), _merged(run.config, model, saved), torch.float32, folder)
        else:
            digest = export_model(describe(str(saved)), _weights(saved), torch.float32, folder)
            if digest != checkpoint.summary["policy_digest"]:
                raise CorruptError(
                    f"{checkpoint.path} holds weights with digest {digest[:12]}, recorded is "
                    f"{str(checkpoint.summary['policy_digest'])[:12]}; `grpo verify {run.name}` says what is damaged"
                )
    return digest


def _weights(saved: Path) -> dict[str, Any]:
    import torch

    from grpo_lib.models import load_model
    from grpo_lib.training.tensors import has_tensors, load_tensors

    if has_tensors(saved, "weights"):  # the model beside it is in less than float32
        return load_tensors(saved, "weights")
    return dict(load_model(str(saved), torch.float32, "cpu").state_dict())


def _merged(config: RunConfig, model: Any, saved: Path) -> dict[str, Any]:
    import torch

    from grpo_lib.training.lora import add_adapter

    settings = config.trainer.lora
    assert settings is not None, "only runs with trainer.lora save adapters"
    adapter = add_adapter(model, rank=settings.rank, alpha=settings.alpha, targets=settings.targets, seed=0)
    with torch.no_grad():
        return adapter.merged({**model.state_dict(), **adapter.load(saved)})


def _first_model(run: Run, folder: Path) -> tuple[str, Any]:
    """Where the model lies that a run began with, and the model in float32."""
    import torch

    from grpo_lib.models import load_model
    from grpo_lib.training.digest import weights_digest

    owner = run.lineage[-1]
    first = next(each for each in owner.manifests() if each.stage in FIRST_POLICIES)
    place = str(first.summary.get("path", folder))
    if "path" not in first.summary:
        folder.mkdir()
        owner.stages.download(first.to_ref(reused=True), folder)
    model = load_model(place, torch.float32, "cpu")
    found, recorded = weights_digest(model.state_dict()), str(first.summary["policy_digest"])
    if found != recorded:
        raise CorruptError(
            f"{place} holds weights with digest {found[:12]}, the adapters of run {run.name!r} were trained on those "
            f"with {recorded[:12]}; put these back"
        )
    return place, model
