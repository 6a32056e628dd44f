"""Functions of the user's own: modules named in ``algorithm.plugins``, and installed packages with an entry point.

A module registers what it brings when it is imported:

    # my_module.py
    from grpo_lib.algorithms.advantages import ADVANTAGES

    @ADVANTAGES.register("sign", formula="sign(R - mean_g)", paper="ours", use="bounded advantages")
    def sign(rewards, group_ids):
        ...

A package does the same and says in its pyproject.toml where: ``[project.entry-points."grpo_pipeline.plugins"]``.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from grpo_lib.algorithms.registry import Entry, nearest
from grpo_lib.errors import ConfigError, GrpoError

GROUP = "grpo_pipeline.plugins"


def load_plugins(modules: Sequence[str]) -> None:
    """Imports every installed plugin and the named modules, once in a process. The current folder is searched too.

    Raises:
        ConfigError: a module that is not there or fails, with its error.
    """
    for point in entry_points(group=GROUP):
        _import(point.module, f"the installed plugin {point.name!r}")
    if modules and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for module in modules:
        _import(module, f"algorithm.plugins: {module!r}")


def load_function(text: str, origin: str) -> Callable[..., Any]:
    """The function that ``module:name`` or ``path/to/file.py:name`` means; the current folder is searched too.

    Args:
        origin: the option or setting that names it, for messages.

    Raises:
        ConfigError: there is no such module, file or function, or importing it fails.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ConfigError(f"{origin}={text!r}: name a function as module:function or path/to/file.py:function")
    if place.endswith(".py"):
        module = _import_file(Path(place), f"{origin}={text!r}")
    else:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        _import(place, f"{origin}={text!r}")
        module = sys.modules[place]
    function = getattr(module, name, None)
    if callable(function):
        return function
    known = {each: None for each, value in vars(module).items() if callable(value) and not each.startswith("_")}
    found = f"{name!r} in it is no function" if hasattr(module, name) else f"there is no {name!r} in it"
    raise ConfigError(f"{origin}={text!r}: {found}" + (f"; {nearest(name, known)}" if known else ""))


def source_digests(entries: Iterable[Entry[Any]]) -> dict[str, str]:
    """sha256 of the files of those functions that are not this package's: part of the key of what they compute.

    Raises:
        ConfigError: a file is not any more what this process has loaded.
    """
    digests = {}
    for module, (path, digest) in (each for entry in entries for each in entry.source.items()):
        file = Path(path)
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise ConfigError(f"{path} was changed after this process had loaded it; start the process again")
        digests[f"plugin/{module}"] = digest
    return digests


def _import(module: str, origin: str) -> None:
    try:
        importlib.import_module(module)
    except GrpoError:
        raise
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise ConfigError(f"{origin} needs the module {error.name!r}, which is not installed") from error
        raise ConfigError(
            f"{origin}: there is no such module; start in its folder, install it, or add its folder to PYTHONPATH"
        ) from None
    except Exception as error:
        raise ConfigError(f"{origin} fails when it is imported: {type(error).__name__}: {error}") from error


class _Uncached(SourceFileLoader):
    """Without compiled files: Python takes one for that of a file that was edited within a second, to equal length."""

    def path_stats(self, path: str) -> NoReturn:
        raise OSError("not asked for")


def _import_file(path: Path, origin: str) -> Any:
    """A module from a file; it finds what lies beside it."""
    if not path.is_file():
        raise ConfigError(f"{origin}: there is no file {path}")
    loader = _Uncached(path.stem, str(path.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve(), loader=loader)
    assert spec is not None, path
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # dataclasses look themselves up there
    try:
        loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{origin} fails when it is imported: {type(error).__name__}: {error}") from error
    finally:
        if before is not None:
            sys.modules[path.stem] = before
    return module
