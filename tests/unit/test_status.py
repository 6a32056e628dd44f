"""`grpo status --json`: a line of JSON on the standard output, whatever libraries print there."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer

from flows.cli import status


def test_only_the_answer_is_on_the_standard_output(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def noisy(folder: Path, address: str | None) -> dict[str, Any]:
        print("from Python")
        os.write(1, b"from C\n")
        return {"folder": str(folder), "problem": "nothing runs"}

    monkeypatch.setattr(status, "look", noisy)
    with pytest.raises(typer.Exit):
        status.status(folder=Path("/nowhere"), address=None, as_json=True)
    out, err = capfd.readouterr()
    assert json.loads(out) == {"folder": "/nowhere", "problem": "nothing runs"}
    assert sorted(err.splitlines()) == ["from C", "from Python"]


def test_what_is_written_to_an_output_that_somebody_kept_is_not_the_answer(
    monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    with open(1, "w", closefd=False) as kept:
        monkeypatch.setattr("sys.stdout", kept)
        with status.only_errors_printed():
            kept.write("buffered")
        kept.write("answer")
    out, err = capfd.readouterr()
    assert (out, err) == ("answer", "buffered")


def test_the_standard_output_is_back_after_an_error(capfd: Any) -> None:
    with pytest.raises(OSError, match="away"), status.only_errors_printed():
        raise OSError("away")
    print("here")
    assert capfd.readouterr().out == "here\n"
