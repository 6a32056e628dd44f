"""Wraps modules right after they were executed, in processes that a test or a benchmark looks into."""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def watch_imports(watched: Mapping[str, Callable[[Any], None]]) -> None:
    """From now on each of these modules is given to its function when it is imported."""
    sys.meta_path.insert(0, _Watch(watched))


class _Watch(MetaPathFinder):
    def __init__(self, watched: Mapping[str, Callable[[Any], None]]) -> None:
        self._watched = watched

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._watched:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Wrapping(spec.loader, self._watched[name])
        return spec


class _Wrapping(Loader):
    def __init__(self, loader: Loader, wrap: Callable[[Any], None]) -> None:
        self._loader, self._wrap = loader, wrap

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._wrap(module)
