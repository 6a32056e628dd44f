"""A policy of a run as a Hugging Face model folder."""

import tempfile
from pathlib import Path

from flows.evaluate import policy_of, policy_version
from grpo_lib.errors import ConfigError
from grpo_lib.placement.devices import use_threads
from grpo_lib.placement.local import workers
from grpo_lib.placement.train import DTYPES
from grpo_lib.run import Run
from grpo_lib.training.export import export_model


def export(run: Run, version: int | None, folder: Path) -> dict[str, str | int]:
    """Writes policy ``version`` (default the last) into a new folder: weights in model.dtype, config, tokenizer.

    Adapters are merged. A version without a checkpoint of its own is replayed from the nearest before it.

    Raises:
        ConfigError: the folder has something in it.
        NotFoundError: there is no such version.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; give a folder that does not exist yet")
    use_threads(run.config.placement.threads)
    manifest = policy_of(run, version)
    policy = manifest.to_ref(reused=True)
    engines = workers(run.at("checkpoint", policy_version(manifest) - 1), policy)  # a branch's first are another's
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".grpo-export-") as name:  # whole, or not there
        made = Path(name) / "model"
        try:
            with engines.trainer_at(policy) as trainer:
                digest = export_model(engines.description, trainer.weights(), DTYPES[run.config.model.dtype], made)
        finally:
            engines.end_processes()
        engines.tokenizer.save_pretrained(made)
        made.replace(folder)
    return {
        "run": run.name,
        "policy_version": policy_version(manifest),
        "folder": str(folder),
        "dtype": run.config.model.dtype,
        "digest": digest,
    }
