"""Names to functions, with an error that helps.

A registry is a plain dict with a decorator. To add a variant write one function and put ``@REGISTRY.register("name")``
above it; nothing else has to know.
"""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Generic, TypeVar

from grpo_lib.errors import ConfigError

F = TypeVar("F", bound=Callable[..., object])


class Registry(Generic[F]):
    """Implementations of one kind, by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator that enters a function under ``name``; a name is given once."""

        def enter(function: F) -> F:
            assert name not in self._functions, f"{self.kind} {name!r} is registered twice"
            self._functions[name] = function
            return function

        return enter

    def __getitem__(self, name: str) -> F:
        if name not in self._functions:
            close = get_close_matches(name, self.names(), n=3)
            hint = f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(self.names())}"
            raise ConfigError(f"unknown {self.kind} {name!r}; {hint}")
        return self._functions[name]

    def names(self) -> list[str]:
        return sorted(self._functions)
