"""A training run: its configuration, its name, and its place in the store."""

import json
from functools import lru_cache
from typing import Any

from grpo_lib.config import RunConfig, StoreConfig
from grpo_lib.config_files import make_config
from grpo_lib.errors import ConfigError, CorruptError, NotFoundError
from grpo_lib.storage.objects import ObjectStore, open_store
from grpo_lib.storage.paths import continuation_file, run_file
from grpo_lib.storage.stages import Manifest, StageStore, config_slice

# May differ between a run and its continuation: nothing of this is in the key of a stage that trains. Threads and
# device change results in the last bits, so that a replay of updates made with others is refused.
CONTINUABLE = (
    "store.", "tracking.", "placement.", "checkpoint.", "evaluation.every", "name", "iterations",
    "rollout.vllm.", "rollout.server.",  # how engines are run, not what they draw
)  # fmt: skip


class Run:
    """What every stage needs to find its data. Cheap to make; equal configurations share one open store."""

    __slots__ = ("config", "name")

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.name = config.run_name

    @property
    def objects(self) -> ObjectStore:
        return _objects(self.config.store)

    @property
    def stages(self) -> StageStore:
        return _stages(self.config.store, self.name)

    def manifests(self, iteration: int | None = None) -> list[Manifest]:
        """What the run committed with its own settings: an `evaluate` with others stands beside it in the store."""
        found = self.stages.manifests(iteration)
        return [each for each in found if each.config == config_slice(self.config, each.config)]

    @property
    def store_option(self) -> str:
        """How commands name the run's store."""
        store = self.config.store
        return f"--store {store.uri}" + (f" --endpoint-url {store.endpoint_url}" if store.endpoint_url else "")

    @property
    def place(self) -> str:
        """Where the run's data lies, for people."""
        return self.objects.location(run_file(self.name).rpartition("/")[0])


@lru_cache(maxsize=8)
def _objects(config: StoreConfig) -> ObjectStore:
    return open_store(config)


@lru_cache(maxsize=8)
def _stages(config: StoreConfig, name: str) -> StageStore:
    return StageStore(_objects(config), name)


def open_run(config: RunConfig) -> Run:
    """Registers the run in the store, or continues the one that is there.

    Raises:
        ConfigError: a run of that name was made with settings that would compute something else.
    """
    run = Run(config)
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, indent=1)
    if run.objects.create(run_file(run.name), text.encode()):
        return run
    different = _differences(make_config(stored_values(run.objects, run.name)), config)
    if different:
        raise ConfigError(
            f"run {run.name!r} exists with other settings ({'; '.join(different)}); give this one another name, "
            "e.g. name=" + run.name + "-2 (what both share is reused)"
        )
    run.objects.put_bytes(continuation_file(run.name), text.encode())
    return run


def load_run(store: StoreConfig, name: str, overrides: list[str] | tuple[str, ...] = ()) -> Run:
    """The run ``name`` of a store.

    Raises:
        NotFoundError: naming the runs that are there.
    """
    objects = _objects(store)
    values = stored_values(objects, name)
    if objects.exists(continuation_file(name)):
        values = _read_json(objects, continuation_file(name))
    given = {key: value for key, value in store.model_dump(mode="json").items() if value is not None}
    values |= {"name": name, "store": values["store"] | given}
    return Run(make_config(values, overrides, origin=f"run {name}"))


def run_names(objects: ObjectStore) -> list[str]:
    """Names of all runs in a store."""
    return sorted(info.path.split("/")[1] for info in objects.list("runs") if info.path.endswith("/run.json"))


def stored_values(objects: ObjectStore, name: str) -> dict[str, Any]:
    """The configuration that run ``name`` was made with."""
    path = run_file(name)
    try:
        text = objects.get(path)
    except NotFoundError:
        known = run_names(objects)
        listing = f"it holds: {', '.join(known[-10:])}" if known else "it holds no run yet; start one with `grpo run`"
        raise NotFoundError(f"no run {name!r} in the store {objects.uri}; {listing}") from None
    return _parse(objects, path, text)


def _read_json(objects: ObjectStore, path: str) -> dict[str, Any]:
    return _parse(objects, path, objects.get(path))


def _parse(objects: ObjectStore, path: str, text: bytes) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        place = objects.location(path)
        raise CorruptError(f"{place} is not JSON any more ({error}); restore it from a backup") from None


def _differences(before: RunConfig, after: RunConfig) -> list[str]:
    old, new = _shaping(before), _shaping(after)
    keys = sorted(old.keys() | new.keys())
    return [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]


def _shaping(config: RunConfig) -> dict[str, Any]:
    """Every setting that shapes what the run computes, by dotted name."""
    settings = _flatten(config.model_dump(mode="json"))
    flat = {key: value for key, value in settings.items() if not key.startswith(CONTINUABLE)}
    if config.trainer.optimizer.schedule != "constant":
        flat["trainer.optimizer.decay_steps"] = config.decay_steps  # else `iterations` would stretch the schedule
    return flat


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
