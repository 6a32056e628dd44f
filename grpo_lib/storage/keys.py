"""When is a stage's result the same? Same stage and version, same inputs, same seed, same part of the configuration.

A stage declares what it reads of the configuration in a ``StageSpec``. The key holds just that, so that changing the
reward leaves the rollouts alone; and the body only gets a ``ConfigView`` of that, so that it can't read anything else.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from grpo_lib.config import RunConfig
from grpo_lib.storage.manifests import ArtifactRef, canonical_json


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """What identifies a kind of stage."""

    name: str
    """Of the stage: one step of a path."""
    version: int
    """Raised when the same inputs give another result, or the columns change."""
    reads: tuple[str, ...]
    """Dotted paths into RunConfig; a section stands for everything in it, a property for its value."""


class ConfigView:
    """The part of a configuration that a stage declared, to be read like the configuration itself.

    A section that is declared whole comes as it is; one of which only parts are declared comes as a view.

    Raises:
        AttributeError: for a setting that the stage did not declare, naming both.
    """

    __slots__ = ("_config", "_prefix", "_spec")

    def __init__(self, config: RunConfig, spec: StageSpec, prefix: str = "") -> None:
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_spec", spec)
        object.__setattr__(self, "_prefix", prefix)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        path, reads = self._prefix + name, self._spec.reads
        if any(path == declared or path.startswith(f"{declared}.") for declared in reads):
            return _lookup(self._config, path)
        if any(declared.startswith(f"{path}.") for declared in reads):
            section = _lookup(self._config, path)
            return None if section is None else ConfigView(self._config, self._spec, f"{path}.")
        raise AttributeError(
            f"stage {self._spec.name!r} reads {path!r}, which its StageSpec.reads does not declare; "
            "declare it there, so that the stage's key depends on it"
        )

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"can't set {self._prefix + name!r}: a configuration never changes")

    def __repr__(self) -> str:
        return f"ConfigView({self._spec.name!r}, {self._prefix or '.'!r}, reads={self._spec.reads})"


def config_slice(config: RunConfig, reads: Iterable[str]) -> dict[str, Any]:
    """The JSON value of each declared path; None below a section that is null.

    Raises:
        AssertionError: for a path that does not exist.
    """
    return {path: _json_value(_lookup(config, path)) for path in reads}


def stage_key(
    spec: StageSpec,
    config: RunConfig,
    inputs: Sequence[ArtifactRef],
    iteration: int | None,
    shard: int = 0,
    external: Mapping[str, str] | None = None,
) -> str:
    """sha256 (64 hex digits) of everything that a stage's result depends on; the order of the inputs counts.

    Args:
        external: what else the result depends on, by name: digests of files, a column asked for.
    """
    identity = {
        "stage": spec.name,
        "version": spec.version,
        "config": config_slice(config, spec.reads),
        "inputs": [ref.digest for ref in inputs],
        "seed": config.seed,
        "iteration": iteration,
        "shard": shard,
        "external": dict(external or {}),
    }
    return hashlib.sha256(canonical_json(identity)).hexdigest()


def _lookup(config: RunConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        if value is None:
            return None
        kind = type(value)
        known = issubclass(kind, BaseModel) and (
            name in kind.model_fields or isinstance(getattr(kind, name, None), property)
        )
        assert known, f"the configuration has no setting {path!r}: {kind.__name__} has no {name!r}"
        value = getattr(value, name)
    return value


def _json_value(value: Any) -> Any:
    return to_jsonable_python(value)
