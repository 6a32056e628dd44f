"""Names to functions, with what a reader wants to know of each, and errors that help.

To add a variant write one function and put ``@REGISTRY.register("name", ...)`` above it; nothing else has to know.
A user's own module does the same and is named in ``algorithm.plugins``.

Positional parameters are the columns that the function wants, by name; it receives those and nothing else.
Keyword-only parameters are its options, with bounds and a description where ``Annotated`` gives them:

    @ADVANTAGES.register("half", formula="(R - mean_g) / 2", paper="ours", use="an example")
    def half(rewards: Tensor, group_ids: Tensor, *, factor: Annotated[float, Option(gt=0)] = 0.5) -> Tensor: ...
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from grpo_lib.errors import ConfigError
from grpo_lib.urls import shown

if TYPE_CHECKING:
    from pydantic import BaseModel

F = TypeVar("F", bound=Callable[..., object])
G = TypeVar("G", bound=Callable[..., object])


@dataclass(frozen=True, kw_only=True)
class Option:
    """Bounds and meaning of an option, in its ``Annotated``; pydantic's ``Field`` does as well.

    The mathematics itself runs where pydantic is not installed.
    """

    description: str | None = None
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    min_length: int | None = None

    def field(self) -> Any:
        from pydantic import Field

        return Field(**{name: value for name, value in vars(self).items() if value is not None})


ClipLow = Annotated[float, Option(gt=0, lt=1, description="The ratio is clipped below 1 - clip_low.")]
ClipHigh = Annotated[float, Option(gt=0, le=1000, description="The ratio is clipped above 1 + clip_high.")]


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[F]):
    """One implementation."""

    name: str
    kind: str
    function: F
    formula: str
    paper: str
    use: str
    """What it is good for, in a sentence."""
    aliases: tuple[str, ...] = ()
    helper: Callable[..., object] | None = None
    """A second function that belongs to it (the selector of a loss); its options are options of the entry."""
    traits: Mapping[str, object]
    """What those who call it have to know."""
    source: Mapping[str, tuple[str, str]]
    """By module, for functions that are not this package's: file, and its sha256 when it was registered."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the positional parameters."""
        return columns_of(self.function)

    @cached_property
    def options(self) -> "type[BaseModel]":
        """The keyword-only parameters of function and helper as a pydantic model: types, bounds, defaults."""
        from pydantic import ConfigDict, create_model

        fields: dict[str, Any] = {}
        for function in (self.helper, self.function) if self.helper else (self.function,):
            hints = get_type_hints(_called(function), include_extras=True)
            for name, parameter in inspect.signature(function).parameters.items():
                if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                    default = ... if parameter.default is inspect.Parameter.empty else parameter.default
                    fields[name] = (_for_pydantic(hints.get(name, Any)), default)
        return create_model(self.name, __config__=ConfigDict(extra="forbid", allow_inf_nan=False), **fields)

    def bind(self, options: Mapping[str, object], origin: str) -> F:
        """The function with its options set.

        Raises:
            ConfigError: an option that it does not have, or a value out of bounds; ``origin`` names the setting.
        """
        return partial(self.function, **self._chosen(self.function, options, origin))  # type: ignore[return-value]

    def bind_helper(self, options: Mapping[str, object], origin: str) -> Callable[..., Any] | None:
        """The helper with its options set, or None where there is none."""
        return partial(self.helper, **self._chosen(self.helper, options, origin)) if self.helper else None

    def _chosen(self, function: Callable[..., object], options: Mapping[str, object], origin: str) -> dict[str, Any]:
        from pydantic import ValidationError

        try:
            values = self.options.model_validate(dict(options))
        except ValidationError as error:
            raise ConfigError("; ".join(self._describe(problem, origin) for problem in error.errors())) from None
        names = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        return {name: getattr(values, name) for name in names}

    def _describe(self, problem: Any, origin: str) -> str:
        place = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            known = list(self.options.model_fields)
            hint = nearest(place, known) if known else "it has none"
            return f"{origin}.{place}: {self.kind} {self.name!r} has no such option; {hint}"
        if problem["type"] == "missing":
            return f"{origin}.{place}: {self.kind} {self.name!r} needs it"
        return f"{origin}.{place}={shown(problem['input'])}: {problem['msg'].removeprefix('Value error, ')}"


def _called(function: Callable[..., object]) -> Callable[..., object]:
    """What has the annotations: of a class its ``__init__``."""
    return function.__init__ if inspect.isclass(function) else function


def _for_pydantic(hint: Any) -> Any:
    """``Annotated[T, Option(...)]`` -> ``Annotated[T, Field(...)]``, in a union too."""
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(_for_pydantic(each) for each in get_args(hint))]  # noqa: UP007
    if get_origin(hint) is not Annotated:
        return hint
    inside, *extras = get_args(hint)
    fields = [each.field() if isinstance(each, Option) else each for each in extras]
    return Annotated[(_for_pydantic(inside), *fields)]


class Registry(Generic[F]):
    """Implementations of one kind, by name.

    Args:
        kind: what they are, for messages.
        columns: names that positional parameters may have, each with its meaning.
        helper_columns: names that those of a helper may have.
    """

    def __init__(self, kind: str, columns: Mapping[str, str], helper_columns: Sequence[str] = ()) -> None:
        self.kind = kind
        self.columns = dict(columns)
        self.helper_columns = tuple(helper_columns)
        self._entries: dict[str, Entry[F]] = {}

    def register(
        self,
        name: str,
        *,
        formula: str = "",
        paper: str = "",
        use: str = "",
        aliases: Sequence[str] = (),
        helper: Callable[..., object] | None = None,
        **traits: object,
    ) -> Callable[[G], G]:
        """Decorator that enters a function under ``name`` and ``aliases``; a name is given once.

        Raises:
            ConfigError: the name is taken, or the function wants a column that there is not.
        """

        def enter(function: G) -> G:
            self._check_columns(name, function, self.columns)
            if helper is not None:
                self._check_columns(name, helper, self.helper_columns)
            entry: Entry[Any] = Entry(
                name=name,
                kind=self.kind,
                function=function,
                formula=formula,
                paper=paper,
                use=use or next(iter((inspect.getdoc(function) or "").splitlines()), ""),
                aliases=tuple(aliases),
                helper=helper,
                traits=traits,
                source={module: file for each in (function, helper) if each for module, file in _source(each).items()},
            )
            for taken in (each for each in (name, *aliases) if each in self._entries):
                raise ConfigError(
                    f"{self.kind} {taken!r} ({_place(function)}) is registered already, by "
                    f"{_place(self._entries[taken].function)}; give yours another name"
                )
            self._entries |= dict.fromkeys((name, *aliases), entry)
            return function

        return enter

    def _check_columns(
        self, name: str, function: Callable[..., object], known: Mapping[str, str] | Sequence[str]
    ) -> None:
        for column in columns_of(function):
            if column not in known:
                raise ConfigError(
                    f"{self.kind} {name!r} ({_place(function)}) wants a column {column!r}; "
                    f"{nearest(column, known)} (options must be keyword-only)"
                )

    def __getitem__(self, name: str) -> Entry[F]:
        if name not in self._entries:
            raise ConfigError(f"unknown {self.kind} {name!r}; {nearest(name, self._entries)}")
        return self._entries[name]

    def __iter__(self) -> Iterator[Entry[F]]:
        """Every entry once, in the order of registration."""
        return iter({entry.name: entry for entry in self._entries.values()}.values())

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        return sorted(self._entries)


def call(function: Callable[..., Any], columns: object) -> Any:
    """Calls a bound function with the attributes of ``columns`` that its positional parameters name."""
    return function(*(getattr(columns, name) for name in columns_of(function)))


def nearest(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """A hint at what was meant.

    >>> nearest("gpro", ["grpo", "rloo"])
    'did you mean grpo?'
    """
    parts = [each for each in known if len(name) > 2 and name in each]  # ppo is far from ppo_clip, letter by letter
    close = list(dict.fromkeys([*get_close_matches(name, list(known), n=3), *parts]))[:3]
    return f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(sorted(known))}"


def columns_of(function: Callable[..., object]) -> tuple[str, ...]:
    """Names of the positional parameters."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds)


def _source(function: Callable[..., object]) -> dict[str, tuple[str, str]]:
    """Module, file and sha256 of a function that is not this package's."""
    if function.__module__.startswith("grpo_lib."):
        return {}
    try:
        path = inspect.getfile(inspect.unwrap(function))
        return {function.__module__: (path, hashlib.sha256(Path(path).read_bytes()).hexdigest())}
    except (OSError, TypeError) as error:
        raise ConfigError(f"{_place(function)}: a function of your own must stand in a file: {error}") from None


def _place(function: Callable[..., object]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)
