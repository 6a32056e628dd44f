"""Which code this process was born with: workers and flows of different code must not work together."""

import hashlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from grpo_lib.errors import ConfigError

PACKAGES = ("grpo_lib", "tasks")


@cache
def code_digest() -> str:
    """sha256, 16 hex digits, over this project's source files, as they were when this was first asked."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None, package
        assert spec.origin is not None, package
        root = Path(spec.origin).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{package}/{path.relative_to(root)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def module_digests(modules: Sequence[str]) -> dict[str, str]:
    """sha256 of the user's own modules, as they lie on the disk.

    Raises:
        ConfigError: a module that is not there.
    """
    found = {}
    for module in modules:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ConfigError(f"algorithm.plugins: there is no module {module!r} here; add its folder to PYTHONPATH")
        found[module] = hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    return found
