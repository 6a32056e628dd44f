"""Why a stage's key is not that of what was committed: the components that differ, one by one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lib.config import RunConfig
from grpo_lib.storage.keys import StageSpec, config_slice
from grpo_lib.storage.manifests import ArtifactRef, InputRef, Manifest

SHOWN = 12
"""Digits of a digest that people are shown."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One component of a key that is another than it was."""

    component: str
    """``config``, ``version``, ``seed``, ``input``, ``external``, or ``key`` where nothing recorded differs."""
    name: str
    """Of the setting, the input's stage, or the thing outside the store."""
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.component == "config":
            return f"{self.name}: {self.old!r} -> {self.new!r}"
        if self.component == "external" and self.name == "branch":
            return "it is the first stage of a branch"
        if self.component == "key":
            return "something that its manifest does not record (it was written by an older version)"
        what = {"version": "stage version", "seed": "seed", "input": f"input {self.name}"}.get(
            self.component, self.name
        )
        if self.old is None or self.new is None:
            return f"{what}: {'is new' if self.old is None else 'is gone'}"
        return f"{what}: {self.old} -> {self.new}"


def key_differences(
    before: Manifest,
    spec: StageSpec,
    config: RunConfig,
    inputs: Sequence[ArtifactRef],
    external: Mapping[str, str],
) -> list[Difference]:
    """What differs between a committed artifact and a stage as it would run now; nothing: it has the same key."""
    found = []
    if before.stage_version != spec.version:
        found.append(Difference(component="version", name=spec.name, old=before.stage_version, new=spec.version))
    found += setting_differences(before.config, config_slice(config, spec.reads))
    if before.seed != config.seed and "seed" not in before.config:
        found.append(Difference(component="seed", name="seed", old=before.seed, new=config.seed))
    found += _input_differences(before.inputs, inputs)
    if before.external is not None:
        found += [
            Difference(component="external", name=name, old=_short(old), new=_short(new))
            for name, old, new in _changed(before.external, external)
        ]
    return found


def setting_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Of two slices of configurations, by dotted name."""
    return [
        Difference(component="config", name=name, old=old, new=new)
        for name, old, new in _changed(dict(_leaves(before)), dict(_leaves(after)))
    ]


def _input_differences(before: Sequence[InputRef], after: Sequence[ArtifactRef]) -> Iterator[Difference]:
    """By stage and place among its shards."""
    old, new = _numbered(before), _numbered(after)
    for (stage, number), was, now in _changed(old, new):
        several = sum(each[0] == stage for each in old.keys() | new.keys()) > 1
        name = f"{stage}.{number}" if several else stage
        yield Difference(component="input", name=name, old=_short(was), new=_short(now))


def _numbered(refs: Sequence[InputRef] | Sequence[ArtifactRef]) -> dict[tuple[str, int], str]:
    found: dict[tuple[str, int], str] = {}
    for ref in refs:
        number = sum(stage == ref.stage for stage, _ in found)
        found[ref.stage, number] = ref.digest
    return found


def _changed(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    for name in [*old, *(each for each in new if each not in old)]:
        if old.get(name) != new.get(name):
            yield name, old.get(name), new.get(name)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _short(digest: str | None) -> str | None:
    return None if digest is None else digest[:SHOWN]
