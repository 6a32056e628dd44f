"""The functions that make up a run's reward, found, checked and with their options set."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue

from grpo_lib.config_reward import RewardConfig, RewardFunctionConfig
from grpo_lib.errors import ConfigError, GrpoError
from grpo_lib.plugins import load_function, load_plugins
from grpo_lib.rewards.registry import REWARDS
from grpo_lib.types import Problem, RewardFunction

Kind = Literal["sample", "samples", "async sample", "async samples"]
BUILT_IN = (
    "grpo_lib.rewards.builtin",
    "grpo_lib.rewards.endpoint",
    "grpo_lib.rewards.model",
    "grpo_lib.rewards.code",
)
REWARD_SETTINGS = (
    "reward.correct",
    "reward.format_only",
    "reward.functions",
    "reward.timeout_seconds",
    "reward.max_failed",
)
"""That what is judged depends on; `reward.runner` says how, and is in no key."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """One function of the reward."""

    name: str
    weight: float
    data_sources: Sequence[str] | None
    kind: Kind
    function: Callable[..., Any]
    """With its options set: takes a sample, or all."""
    place: str
    """``module:name`` or ``file.py:name``, as another process finds it."""
    options: Mapping[str, JsonValue]
    isolated: bool
    """It runs in a process of its own: what the user wrote, and what may hang on a response."""
    digest: str
    """Of what it computes: its source and its options."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Of the user's own with their sha256: what another process must find there to judge the same."""
    check: Callable[[], None] | None = None
    """Raises a ``GrpoError`` if it can't work on this machine."""

    def judges(self, data_source: str) -> bool:
        """Whether it is asked about responses to prompts of that source."""
        return self.data_sources is None or data_source in self.data_sources


@dataclass(frozen=True, kw_only=True)
class Reward:
    """All that makes up the reward of a run."""

    judges: Sequence[Judge]
    settings: RewardConfig
    plugins: Sequence[str] = ()


def run_reward(problem: Problem, config: Any, outside: Mapping[str, str] | None = None) -> Reward:
    """The functions of ``reward.functions``, or the problem's own.

    Args:
        config: with ``data``, ``reward`` and ``algorithm.plugins``.
        outside: what the flow put into the key, with `reward_digests`.

    Raises:
        ConfigError: see `make_judges`; or a function is not what the flow has.
    """
    if not config.reward.functions:
        return own_reward(problem.make_reward(config.data, config.reward), config.reward)
    plugins = config.algorithm.plugins
    judges = make_judges(config.reward.functions, plugins)
    others = [] if outside is None else [name for name, each in _digests(judges).items() if outside.get(name) != each]
    if others:
        raise ConfigError(
            f"{', '.join(others)} on {socket.gethostname()} ({os.getcwd()}) is not what the flow has, or was changed "
            "since the stage was called; copy the file there, or resume"
        )
    return Reward(judges=judges, settings=config.reward, plugins=plugins)


def own_reward(function: RewardFunction, settings: RewardConfig | None = None) -> Reward:
    """One function as the whole reward, in this process: it is this package's, or trusted."""
    judge = Judge(
        name="reward", weight=1.0, data_sources=None, kind="sample", function=function, place="", options={},
        isolated=False, digest="",
    )  # fmt: skip
    return Reward(judges=[judge], settings=settings or RewardConfig())


def reward_digests(config: Any) -> dict[str, str]:
    """Of the functions' sources, part of the key of what they judge; the problem's own has none."""
    if not config.reward.functions:
        return {}
    return _digests(make_judges(config.reward.functions, config.algorithm.plugins))


def _digests(judges: Sequence[Judge]) -> dict[str, str]:
    return {f"reward/{place}/{each.name}": each.digest for place, each in enumerate(judges)}


def check_machine(reward: Reward) -> None:
    """What the functions need of this machine is there; no sample is judged for that.

    Raises:
        GrpoError: it is not; with the function and the remedy.
    """
    for place, judge in enumerate(reward.judges):
        try:
            if judge.check is not None:
                judge.check()
        except GrpoError as error:
            raise type(error)(f"reward.functions[{place}] ({judge.name}): {error}") from None


def load_built_in() -> None:
    """Enters this package's functions into the registry."""
    for module in BUILT_IN:
        importlib.import_module(module)


def make_judges(functions: Sequence[RewardFunctionConfig], plugins: Sequence[str]) -> list[Judge]:
    """The functions that the configuration names.

    Raises:
        ConfigError: there is no such file, function or option, or it can't be called with one sample.
    """
    load_built_in()
    load_plugins(plugins)
    return [_judge(each, f"reward.functions[{place}]") for place, each in enumerate(functions)]


def _judge(config: RewardFunctionConfig, origin: str) -> Judge:
    check = None
    if config.path is None:
        entry = REWARDS[config.name]
        traits: Mapping[str, Any] = entry.traits
        bound: Any = entry.bind(config.kwargs, f"{origin}.kwargs")
        own = bool(entry.source)
        function, isolated = entry.function, own or bool(traits.get("isolated"))
        place = f"registry:{config.name}"
        files = dict(entry.source.values())
        source = next(iter(files.values())) if own else _file_digest(_file_of(function))
        for module in traits.get("modules", ()):
            source += _module_digest(module)
        for option in traits.get("files", ()):
            source += _content_digest(config.kwargs.get(option))
        for package in traits.get("packages", ()):
            source += _version(package)
        if "check" in traits:
            check = partial(traits["check"], **bound.keywords)
    else:
        place = f"{config.path}:{config.name}"
        function = load_function(place, origin)
        bound, isolated = partial(function, **config.kwargs), True
        named, own_file = _file_named(config.path), _file_of(function)  # two, where a decorator of another file made it
        files = {str(each): _file_digest(each) for each in (named, own_file)}
        source = "".join(files.values())
    kind = kind_of(function, place, config.kwargs, origin)
    text = json.dumps([place, source, config.kwargs], sort_keys=True)
    return Judge(
        name=config.name,
        weight=config.weight,
        data_sources=config.data_sources,
        kind=kind,
        function=bound,
        place=place,
        options=config.kwargs,
        isolated=isolated,
        digest=hashlib.sha256(text.encode()).hexdigest(),
        check=check,
        files=files,
    )


def kind_of(function: Callable[..., Any], place: str, options: Mapping[str, Any], origin: str) -> Kind:
    """How a function wants to be called.

    Raises:
        ConfigError: it can't be called with one sample, or with the options that are given.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{origin}: {place} has no signature that can be read: {error}") from None
    positional = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first = positional[0].name if positional else None
    if first not in ("sample", "samples"):
        raise ConfigError(
            f"{origin}: {place}{signature} must take `sample` first (one response), or `samples` (a list of them)"
        )
    try:
        signature.bind(None, **options)
    except TypeError as error:
        given = f"with kwargs of {', '.join(options)}" if options else "without kwargs"  # their values may be secret
        raise ConfigError(f"{origin}: {place}{signature} can't be called {given}: {error}") from None
    is_async = inspect.iscoroutinefunction(inspect.unwrap(function))
    if first == "sample":
        return "async sample" if is_async else "sample"
    return "async samples" if is_async else "samples"


def _content_digest(path: object) -> str:
    """Of a file, or of the files of a folder, that an option names; empty where there is none."""
    place = Path(str(path)).expanduser() if path is not None else None
    if place is None or not place.exists():
        return ""
    digest = hashlib.sha256()
    for each in [place] if place.is_file() else sorted(place.glob("*.*")):
        if each.is_file():
            now = each.stat()
            digest.update(f"{each.name} {_known_digest(each, now.st_size, now.st_mtime_ns)}\n".encode())
    return digest.hexdigest()


@lru_cache(maxsize=1024)
def _known_digest(path: Path, size: int, changed: int) -> str:
    """It is asked for in every iteration, and may be gigabytes of a reward model."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _module_digest(name: str) -> str:
    spec = importlib.util.find_spec(name)  # found, not imported: torch would take seconds
    assert spec is not None, name
    assert spec.origin is not None, name
    return _file_digest(Path(spec.origin))


def _file_named(path: str) -> Path:
    """Of the ``path`` of a function that was loaded from there: a file or a module."""
    if path.endswith(".py"):
        return Path(path).resolve()
    return Path(str(sys.modules[path].__file__)).resolve()


def _file_of(function: Callable[..., Any]) -> Path:
    try:
        return Path(inspect.getfile(inspect.unwrap(function))).resolve()
    except (OSError, TypeError) as error:
        raise ConfigError(f"{function!r}: a reward function must stand in a file: {error}") from None


def _file_digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"a reward function must stand in a file: {error}") from None


@lru_cache
def _version(module: str) -> str:
    """Of the distribution that a module belongs to; empty where it is not installed."""
    for name in (module, *importlib.metadata.packages_distributions().get(module, ())):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
