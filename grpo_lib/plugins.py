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
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from grpo_lib.algorithms.registry import Entry
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
