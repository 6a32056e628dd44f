"""A function by `module:name` or `file.py:name`, and what is said when there is none."""

import os
import sys
from pathlib import Path

import pytest

from grpo_lib.errors import ConfigError
from grpo_lib.plugins import load_function

SOURCE = """
from dataclasses import dataclass
from beside_it import BONUS

@dataclass
class Table:
    points: int = 2

def points(sample):
    return Table().points + BONUS

limit = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_rewards.py").write_text(SOURCE)
    (tmp_path / "beside_it.py").write_text("BONUS = 1\n")
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("own_rewards", "beside_it", "broken_rewards"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_function_of_a_file_is_found_with_what_lies_beside_the_file(folder: Path) -> None:
    assert load_function(f"{folder}/own_rewards.py:points", "--reward")(None) == 3


def test_a_function_of_a_module_in_the_working_folder_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert load_function("own_rewards:points", "--reward")(None) == 3
    assert load_function("os.path:basename", "--reward")("a/b") == "b"


def test_a_file_that_was_changed_is_read_again(folder: Path) -> None:
    load_function(f"{folder}/own_rewards.py:points", "--reward")
    (folder / "own_rewards.py").write_text("def points(sample):\n    return 7\n")
    assert load_function(f"{folder}/own_rewards.py:points", "--reward")(None) == 7


def test_a_file_that_was_changed_is_read_again_though_it_is_as_long_and_as_old(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = folder / "own_rewards.py"
    for value in (7, 8):
        file.write_text(f"def points(sample):\n    return {value}\n")
        os.utime(file, (1_000_000_000, 1_000_000_000))
        assert load_function(f"{file}:points", "--reward")(None) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("own_rewards", "name a function as module:function or path/to/file.py:function"),
        (":points", "name a function as"),
        ("{folder}/nothing.py:points", "there is no file"),
        ("no_such_module_here:points", "there is no such module"),
        ("{folder}/own_rewards.py:point", "there is no 'point' in it; did you mean points?"),
        ("{folder}/own_rewards.py:limit", "'limit' in it is no function"),
        ("{folder}/broken_rewards.py:points", "fails when it is imported: ZeroDivisionError"),
    ],
)
def test_what_can_t_be_found_is_named(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_function(text.format(folder=folder), "--reward")
    assert message in str(caught.value) and "--reward=" in str(caught.value)
