"""What there is to choose from, for `grpo show algorithms` and the reference page."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from grpo_lib.algorithms.registry import Entry, Registry
from grpo_lib.data.samplers import SAMPLERS
from grpo_lib.recipe import REGISTRIES
from grpo_lib.rewards.judges import BUILT_IN, load_built_in
from grpo_lib.rewards.registry import REWARDS


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a function."""

    name: str
    type: str
    """With bounds, e.g. ``float, > 0``."""
    default: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Listing:
    """One implementation, for people."""

    setting: str
    """Where its name goes, e.g. ``algorithm.advantage``."""
    name: str
    aliases: tuple[str, ...]
    formula: str
    paper: str
    use: str
    columns: tuple[str, ...]
    options: tuple[Option, ...]
    function: str
    """Module and name."""
    aggregation: str | None
    """Of a loss: its default aggregation, where that is not token-mean."""


def choices() -> dict[str, Registry[Any]]:
    """Every kind of function or class that a configuration names, by its setting."""
    load_built_in()
    kinds: dict[str, Registry[Any]] = {f"algorithm.{setting}": registry for setting, registry in REGISTRIES.items()}
    return kinds | {"rollout.sampler": SAMPLERS, "reward.functions": REWARDS}


def listings() -> Iterator[Listing]:
    """Everything that is registered, kind by kind."""
    for setting, registry in choices().items():
        for entry in sorted(registry, key=_place):
            yield _listing(setting, entry)


def _place(entry: Entry[Any]) -> int:
    """Reward functions are registered when their module is imported, whichever comes first in a process."""
    module = entry.function.__module__
    return BUILT_IN.index(module) if module in BUILT_IN else len(BUILT_IN)


def type_text(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """A type with its bounds, as people write them.

    >>> type_text(float | None)
    'float or null'
    """
    bounds = [text for each in metadata for text in _bounds(each)]
    return ", ".join([_type_name(annotation), *bounds])


def _listing(setting: str, entry: Entry[Any]) -> Listing:
    options = tuple(
        Option(
            name=name,
            type=type_text(field.annotation, field.metadata),
            default="required" if field.default is PydanticUndefined else _value(field.default),
            meaning=_meaning(field),
        )
        for name, field in entry.options.model_fields.items()
    )
    aggregation = entry.traits.get("aggregation")
    return Listing(
        setting=setting,
        name=entry.name,
        aliases=entry.aliases,
        formula=entry.formula,
        paper=entry.paper,
        use=entry.use,
        columns=entry.columns,
        options=options,
        function=f"{entry.function.__module__}.{entry.function.__name__}",
        aggregation=None if aggregation is None else str(aggregation),
    )


def _meaning(field: FieldInfo) -> str:
    if field.description:
        return field.description
    # An optional option has its description inside the union.
    inner = [each for arm in get_args(field.annotation) for each in getattr(arm, "__metadata__", ())]
    return next((each.description for each in inner if getattr(each, "description", None)), "")


def _value(value: object) -> str:
    return "null" if value is None else f"{value}"


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0], [bound for each in arguments[1:] for bound in getattr(each, "metadata", [each])])
    if origin in (Union, UnionType):
        return " or ".join(_type_name(each) for each in arguments)
    if annotation is type(None):
        return "null"
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    if arguments:
        return ", ".join(f"`{each}`" for each in arguments)
    return str(getattr(annotation, "__name__", annotation))


def _bounds(constraint: Any) -> Iterator[str]:
    for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
        if getattr(constraint, name, None) is not None:
            yield f"{sign} {getattr(constraint, name)}"
