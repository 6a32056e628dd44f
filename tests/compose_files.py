"""deployments/compose as `docker compose` reads it: variables put in, anchors and merges resolved."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
COMPOSE = ROOT / "deployments" / "compose" / "compose.yaml"
MAKE_ENV = ROOT / "deployments" / "cluster" / "make-env.sh"
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\}")


def make_env(file: Path) -> dict[str, str]:
    """A `.env` as a user makes it."""
    subprocess.run([str(MAKE_ENV), str(file)], check=True, capture_output=True, text=True)
    return read_env(file)


def read_env(file: Path) -> dict[str, str]:
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def services(values: Mapping[str, str], file: Path = COMPOSE) -> dict[str, dict[str, Any]]:
    """The services by name."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(filled(file.read_text(), values))["services"]
    return found


def filled(text: str, values: Mapping[str, str]) -> str:
    """``${NAME}``, ``${NAME:-default}`` and ``${NAME:?message}`` replaced."""

    def value(match: re.Match[str]) -> str:
        if found := values.get(match["name"]):
            return found
        assert match["kind"] == "-", f"{match[0]}: {match['name']} is not set"
        return str(match["rest"])

    return VARIABLE.sub(value, text)
