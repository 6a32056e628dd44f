"""A training run: its configuration, its name, and its place in the store."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from grpo_lib.config import RunConfig, StoreConfig
from grpo_lib.config_files import make_config
from grpo_lib.errors import ConfigError, CorruptError, NotFoundError, RunError
from grpo_lib.patience import impatient
from grpo_lib.storage.objects import ObjectStore, open_store
from grpo_lib.storage.paths import continuation_file, run_file
from grpo_lib.storage.stages import ArtifactRef, Manifest, StageSpec, StageStore, config_slice, stage_key

# May differ between a run and its continuation: nothing of this is in the key of a stage that trains. Threads and
# device change results in the last bits, so that a replay of updates made with others is refused.
CONTINUABLE = (
    "store.", "tracking.", "placement.", "checkpoint.", "evaluation.every", "name", "iterations",
    "rollout.vllm.", "rollout.server.",  # how engines are run, not what they draw
)  # fmt: skip


def hands_over(config: RunConfig) -> bool:
    """Whether engines get policies as `weights` artifacts: the trainer is elsewhere, or further on."""
    apart = config.placement.kind == "ray" and config.placement.ray.rollout_workers > 0
    return apart or config.pipeline.max_staleness > 0


class Run:
    """What every stage needs to find its data. Cheap to make; equal configurations share one open store."""

    __slots__ = ("config", "name")

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.name = config.run_name

    def to_json(self) -> dict[str, Any]:
        """What another process makes the same run from; ``name`` and ``place`` are for those who only look at it."""
        config = self.config.model_dump(mode="json") | {"name": self.name}
        config["store"]["uri"] = self.objects.uri  # absolute: a worker serves flows of several folders
        return {"config": config, "name": self.name, "place": self.place}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Run":
        return cls(make_config(values["config"]))

    @property
    def objects(self) -> ObjectStore:
        return _objects(self.config.store)

    @property
    def stages(self) -> StageStore:
        branch = self.config.branch
        return _stages(self.config.store, self.name, None if branch is None else branch.run)

    def at(self, stage: str, iteration: int | None, shard: int = 0) -> "Run":
        """The run whose settings apply there: this one, or for what a branch shares the one that it branched off."""
        branch = self.config.branch
        if branch is None or stage == "publish":  # each run has points of its own in MLflow
            return self
        batch = shard // self.config.rollout.shards if stage in ("rollout", "reward") else shard
        if not branch.shares(stage, iteration, batch):
            return self
        return self.lineage[1].at(stage, iteration, shard)

    @property
    def lineage(self) -> list["Run"]:
        """This run, the one that it branched off, and so on."""
        branch = self.config.branch
        return [self] if branch is None else [self, *_base(self.config.store, branch.run).lineage]

    def shares(self, stage: str, iteration: int | None, shard: int = 0) -> bool:
        """Whether that is data of the run that this one branched off."""
        return self.at(stage, iteration, shard) is not self

    def external(self, stage: str, iteration: int | None, external: Mapping[str, str] | None) -> dict[str, str]:
        """What a stage's result depends on outside the store. The first stage of a branch depends on the branch, so
        that it runs anew even where nothing differs."""
        owner, found = self.at(stage, iteration), dict(external or {})
        branch = owner.config.branch
        if branch is not None and (branch.stage, branch.iteration) == (stage, iteration):
            found["branch"] = owner.name
        return found

    def key(
        self,
        spec: StageSpec,
        inputs: Sequence[ArtifactRef],
        iteration: int | None,
        shard: int = 0,
        external: Mapping[str, str] | None = None,
    ) -> str:
        """Key of a stage of this run. What a branch shares has the key that it has in the base, even where something
        outside the store, such as a plugin, is another now."""
        owner, outside = self.at(spec.name, iteration, shard), self.external(spec.name, iteration, external)
        key = stage_key(spec, owner.config, inputs, iteration, shard, outside)
        if owner is self or not outside or owner.stages.peek(spec, key, iteration, shard) is not None:
            return key
        place, made_from = (spec.name, spec.version, iteration, shard), [ref.digest for ref in inputs]
        for each in reversed(owner.manifests(iteration)):
            there = (each.stage, each.stage_version, each.iteration, each.shard)
            if there == place and [ref.digest for ref in each.inputs] == made_from:
                return each.key
        return key

    def check_may_make(self, stage: str, iteration: int | None, shard: int) -> None:
        """Of what a branch shares it makes nothing itself, but for copies of a policy.

        Raises:
            RunError: it is shared, and not there.
        """
        owner = self.at(stage, iteration, shard)
        if owner is not self and stage not in ("checkpoint", "weights"):
            place = "" if iteration is None else f" of iteration {iteration}"
            raise RunError(
                f"run {self.name!r} shares {stage}{place} with {owner.name!r}, which has none with its settings and "
                f"today's code and files; `grpo resume {owner.name}` makes what is missing, and `grpo rerun "
                f"{owner.name} --iteration {iteration or 0} --stage {stage} --dry-run` says what differs"
            )

    def manifests(self, iteration: int | None = None) -> list[Manifest]:
        """What the run committed with its own settings: an `evaluate` with others stands beside it in the store."""
        return [each for each in self.stages.manifests(iteration) if self._is_own(each)]

    def _is_own(self, manifest: Manifest) -> bool:
        config = self.at(manifest.stage, manifest.iteration, manifest.shard).config
        return manifest.config == config_slice(config, manifest.config)

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
def _stages(config: StoreConfig, name: str, base: str | None) -> StageStore:
    return StageStore(_objects(config), name, base)


@lru_cache(maxsize=8)
def _base(config: StoreConfig, name: str) -> Run:
    return load_run(config, name)


def open_run(config: RunConfig) -> Run:
    """Registers the run in the store, or continues the one that is there.

    Raises:
        ConfigError: a run of that name was made with settings that would compute something else.
    """
    run = Run(config)
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, indent=1)
    if run.objects.create(run_file(run.name), text.encode()):
        return run
    different = differences(make_config(stored_values(run.objects, run.name)), config)
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
    with impatient():  # the address may be wrong, and somebody waits for the answer
        values = stored_values(objects, name)
        if objects.exists(continuation_file(name)):
            values = stored_json(objects, continuation_file(name))
    asked = store.model_dump(mode="json", exclude_unset=True)
    given = {key: value for key, value in asked.items() if value is not None}
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


def stored_json(objects: ObjectStore, path: str) -> dict[str, Any]:
    """A JSON object of the store.

    Raises:
        CorruptError: it is none any more.
    """
    return _parse(objects, path, objects.get(path))


def _parse(objects: ObjectStore, path: str, text: bytes) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        place = objects.location(path)
        raise CorruptError(f"{place} is not JSON any more ({error}); restore it from a backup") from None


def differences(before: RunConfig, after: RunConfig) -> list[str]:
    """Of the settings that shape what a run computes, for people."""
    old, new = _shaping(before), _shaping(after)
    keys = sorted(old.keys() | new.keys())
    return [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]


def _shaping(config: RunConfig) -> dict[str, Any]:
    """Every setting that shapes what the run computes, by dotted name."""
    settings = flat_settings(config)
    flat = {key: value for key, value in settings.items() if not key.startswith(CONTINUABLE)}
    if config.trainer.optimizer.schedule != "constant":
        flat["trainer.optimizer.decay_steps"] = config.decay_steps  # else `iterations` would stretch the schedule
    return flat


def flat_settings(config: RunConfig) -> dict[str, Any]:
    """Every setting by dotted name."""
    return _flatten(config.model_dump(mode="json"))


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
