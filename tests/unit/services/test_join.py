"""`grpo join`: a command beside a node."""

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_lib.services import ray_nodes
from grpo_lib.services.supervisor import Service


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for Ray's: writes a file when it is up, and another when it ends; returns the first."""
    up = tmp_path / "up"
    program = f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path({str(tmp_path / "ended")!r}).touch()))
time.sleep(0.5)
pathlib.Path({str(up)!r}).touch()
time.sleep(60)
"""

    def made(address: str, offers: dict[str, int], log: Path, mark: str, **resources: Any) -> Service:
        assert (address, offers, resources) == ("head:6379", {}, {"gpus": 0, "cpus": 0})
        return Service(
            name="node", address=address, command=[sys.executable, "-c", program], env={}, log=log,
            ready=lambda _: up.exists(),
        )  # fmt: skip

    monkeypatch.setattr(ray_nodes, "node", made)
    monkeypatch.setattr(ray_nodes, "nodes", lambda address: [])
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    return up


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("exit 0", 0)])
def test_it_starts_when_the_node_is_up_and_both_end_with_its_code(
    node: Path, command: str, code: int, tmp_path: Path
) -> None:
    words = [
        "join",
        "--address",
        "head:6379",
        "--folder",
        str(tmp_path),
        "--",
        "sh",
        "-c",
        f"test -e {node} && {command}",
    ]
    assert CliRunner().invoke(app, words).exit_code == code
    assert (tmp_path / "ended").exists()
