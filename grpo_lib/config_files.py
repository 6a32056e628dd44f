"""Configurations from YAML files and ``key=value`` overrides, with messages that name value, bound and remedy."""

import json
import re
from collections.abc import Hashable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError
from yaml.constructor import ConstructorError

from grpo_lib.config import RunConfig, Section, StoreConfig
from grpo_lib.config_algorithm import AlgorithmConfig
from grpo_lib.config_data import DATA_SECTIONS
from grpo_lib.config_retrain import RetrainConfig
from grpo_lib.errors import ConfigError
from grpo_lib.urls import shown, without_secrets

AnySection = TypeVar("AnySection", bound=Section)


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Reads a YAML file, applies ``key.sub=value`` overrides and validates.

    A file may name another one in ``extends`` (a path beside it); its own settings go over those of that file.

    Raises:
        ConfigError: naming file, key, value, bound and remedy.
    """
    return make_config(_read(Path(path), ()), overrides, origin=str(path))


def load_retrain_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RetrainConfig:
    """The same of a retraining, whose section ``train`` may name a file in ``extends`` too.

    Raises:
        ConfigError: naming file, key, value, bound and remedy.
    """
    place = Path(path)
    values = _read(place, ())
    if isinstance(values.get("train"), dict):
        values["train"] = _extended(place, values["train"], ())
    return _made(RetrainConfig, values, overrides, str(path))


def _read(path: Path, extended_by: tuple[Path, ...]) -> dict[str, Any]:
    """The settings of a file, over those of the file that it extends."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't read the configuration {path}: {error.strerror}; name a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration {path} is not UTF-8 text ({error}); name a YAML file") from error
    try:
        values = yaml.load(text, _UniqueKeys)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {_one_line(error)}") from error
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise ConfigError(f"{path} must hold a mapping of settings at its top, found {found}")
    return _extended(path, values, extended_by)


def _extended(path: Path, values: dict[str, Any], extended_by: tuple[Path, ...]) -> dict[str, Any]:
    """Settings of a file over those of the file that they extend, if they do."""
    if "extends" not in values:
        return values
    base = values.pop("extends")
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends={base!r} must be the path of a YAML file, from the folder of this one")
    place = path.parent / base
    if place.resolve() in (path.resolve(), *(each.resolve() for each in extended_by)):
        raise ConfigError(f"{path}: extends={base} leads back to where it came from; break the circle")
    return _over(_read(place, (*extended_by, path)), values)


def _over(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """``values`` over ``base``, section by section; options of a function that ``values`` replaces are dropped."""
    merged = dict(base)
    for key, value in values.items():
        _forget_options(merged, key, value)
    for key, value in values.items():
        below = merged.get(key)
        merged[key] = _over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def make_config(
    values: dict[str, Any], overrides: list[str] | tuple[str, ...] = (), origin: str = "config"
) -> RunConfig:
    """Validates a mapping after applying ``key.sub=value`` overrides (values are read as YAML)."""
    return _made(RunConfig, values, overrides, origin)


def _made(
    kind: type[AnySection], values: dict[str, Any], overrides: list[str] | tuple[str, ...], origin: str
) -> AnySection:
    try:
        values = json.loads(json.dumps(values, default=str))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: this is not a tree of plain values ({error})") from None
    parsed = [_parsed(override) for override in overrides]
    for steps, value, _ in parsed:
        inside = values.get("train") if kind is RetrainConfig and steps[0] == "train" else values
        steps = steps[1:] if inside is not values else steps
        if len(steps) == 2 and isinstance(inside, dict) and isinstance(inside.get(steps[0]), dict):
            _forget_options(inside[steps[0]], steps[1], value)
    for steps, value, override in parsed:
        _set(values, steps, value, override)
    return validated(kind, values, origin)


def validated(section: type[AnySection], values: dict[str, Any], origin: str) -> AnySection:
    """A section from plain values.

    Raises:
        ConfigError: naming key, value, bound and remedy.
    """
    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise _config_error(origin, error, section) from None


def make_store_config(uri: str, endpoint_url: str | None = None) -> StoreConfig:
    """The store that options of the command line name.

    Raises:
        ConfigError: naming the option's value and the remedy.
    """
    return validated(StoreConfig, {"uri": uri, "endpoint_url": endpoint_url}, "store")


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error; PyYAML would take the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for place, key in enumerate(keys):
            if key in keys[:place]:
                raise ConstructorError(None, None, f"{key!r} is given twice; join the two", node.start_mark)
        return super().construct_mapping(node, deep)


def _parsed(override: str) -> tuple[list[str], Any, str]:
    """Path and value of an override, with itself."""
    key, equals, text = override.partition("=")
    steps = key.strip().split(".")
    if not equals or not all(steps):
        raise ConfigError(f"override {shown(override)} is not of the form key=value, e.g. rollout.samples=16")
    try:
        value = yaml.load(text, _UniqueKeys)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"override {shown(override)}: the value is not valid YAML: {_one_line(error)}") from None
    if isinstance(value, str) and _EXPONENTIAL.fullmatch(value):
        value = float(value)  # YAML reads 1e-6 as a string
    return steps, value, override


def _set(values: dict[str, Any], steps: list[str], value: Any, override: str) -> None:
    *parents, last = steps
    place = values
    for parent in parents:
        if place.get(parent) is None:
            place[parent] = {}
        place = place[parent]
        if not isinstance(place, dict):
            raise ConfigError(f"override {shown(override)}: {parent!r} is a value, not a section")
    place[last] = value


def _forget_options(section: dict[str, Any], key: str, value: Any) -> None:
    """Options belong to the function that was named: another name comes with options of its own."""
    default = AlgorithmConfig.model_fields[key].default if key in AlgorithmConfig.model_fields else None
    if section.get(key, default) != value:
        section.pop(f"{key}_options", None)


_EXPONENTIAL = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")


def _one_line(error: Exception) -> str:
    return without_secrets(" ".join(str(error).split()))


def _config_error(origin: str, error: ValidationError, kind: type[Section] = RunConfig) -> ConfigError:
    return ConfigError(f"{origin}: " + "; ".join(_describe(problem, kind) for problem in error.errors()))


def _describe(problem: Any, root: type[Section]) -> str:
    place = ".".join(str(part) for part in problem["loc"] if part not in _problems())
    message = problem["msg"].removeprefix("Value error, ")
    kind = problem["type"]
    if kind == "extra_forbidden":
        return f"{place}: no such setting{_nearest(place, root)}"
    if kind == "missing":
        return f"{place}: must be given"
    if kind == "union_tag_not_found":
        return f"{place}.problem: must be given, one of {', '.join(_problems())}"
    if kind == "union_tag_invalid":
        return f"{place}.problem={problem['ctx']['tag']!r}: no such problem; use one of {', '.join(_problems())}"
    if kind in ("model_type", "model_attributes_type"):
        return f"{place} is a section with settings of its own, found {_shown(problem['input'])}"
    if kind == "value_error":
        return f"{place}: {message}" if place else message
    if kind == "string_pattern_mismatch":
        message = f"must match {problem['ctx']['pattern']}"
    if kind == "string_type":
        message += "; put it into quotes"
    return f"{place}={_shown(problem['input'])}: {message}"


def _shown(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _problems() -> list[str]:
    """The values of ``data.problem``."""
    return [each.model_fields["problem"].default for each in DATA_SECTIONS]


def _nearest(place: str, root: type[Section]) -> str:
    """A hint at settings with a similar name: those of the same section, else those of others."""
    section, _, name = place.rpartition(".")
    known: dict[str, list[str]] = {}
    for path in _setting_paths(root):
        known.setdefault(path.rpartition(".")[2], []).append(path)
    here = [each for each, paths in known.items() if any(path.rpartition(".")[0] == section for path in paths)]
    close = [f"{section}.{each}".lstrip(".") for each in get_close_matches(name, here, n=2)]
    close = close or [path for each in get_close_matches(name, known, n=2) for path in known[each]]
    return f"; did you mean {' or '.join(dict.fromkeys(close))}?" if close else ""


def _setting_paths(section: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all settings below a section; it may be a union of sections."""
    if isinstance(section, type) and issubclass(section, Section):
        for name, field in section.model_fields.items():
            yield prefix + name
            yield from _setting_paths(field.annotation, f"{prefix}{name}.")
    else:
        for variant in get_args(section):
            yield from _setting_paths(variant, prefix)
