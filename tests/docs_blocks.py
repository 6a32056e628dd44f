"""The code blocks of README and docs: what they hold, and what the comment before one says of it. See CONTRIBUTING."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("sh", "python", "yaml", "text")
PLACEHOLDERS = {"RUN": "demo", "OTHER": "other", "CONFIG": "deployments/configs/demo.yaml", "FOLDER": "exported"}
"""Words that stand for something of the reader's, and what takes their place here."""
_PLACEHOLDER = re.compile(rf"(?<![\w$.{{/-])({'|'.join(PLACEHOLDERS)})(?![\w=-])")
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--((?:(?!-->).)*)-->\s*\Z", re.DOTALL)
_NAMED = re.compile(r"\A# (\S+\.(?:py|yaml))\n")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    place: str
    """Page and line."""
    language: str
    text: str
    remarks: tuple[str, ...]
    """Comments right before it."""

    @property
    def not_run(self) -> str | None:
        """Why it is only looked at; None: it is run."""
        return next((each.partition(":")[2].strip() for each in self.remarks if each.startswith("not run")), None)

    @property
    def given(self) -> str:
        """Lines that are run before it, unseen by readers."""
        return "\n".join(each.removeprefix("given:").strip() for each in self.remarks if each.startswith("given:"))

    @property
    def exits(self) -> int:
        """Code that it ends with, as the page says."""
        return next((int(each.split()[1]) for each in self.remarks if each.startswith("exits ")), 0)

    @property
    def file(self) -> str | None:
        """Name of the file that its first line says it is."""
        named = _NAMED.match(self.text)
        return named[1] if named and self.language in ("python", "yaml") else None

    @property
    def runs(self) -> bool:
        return self.not_run is None and (self.language in ("sh", "python") or self.file is not None)


def blocks(page: Path) -> list[Block]:
    """In the order of the page."""
    text, found = page.read_text(encoding="utf-8"), []
    for fence in _FENCE.finditer(text):
        indent, language, body = fence.groups()
        remarks, before = [], text[: fence.start()]
        while comment := _COMMENT.search(before):
            remarks.insert(0, comment[1].strip())
            before = before[: comment.start()]
        line = text[: fence.start()].count("\n") + 1
        place = f"{page.relative_to(ROOT)}:{line}"
        body = re.sub(f"^{indent}", "", body, flags=re.MULTILINE)
        found.append(Block(place=place, language=language, text=body, remarks=tuple(remarks)))
    return found


def prose(page: Path) -> str:
    """What is left of a page without its blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def filled(text: str) -> str:
    """With placeholders filled in.

    >>> filled("grpo export RUN FOLDER name=RUN_2 /RUN $RUN")
    'grpo export demo exported name=RUN_2 /RUN demo'
    """
    text = text.replace("$RUN", PLACEHOLDERS["RUN"])
    return _PLACEHOLDER.sub(lambda found: PLACEHOLDERS[found[1]], text)


def grpo_lines(text: str) -> Iterator[list[str]]:
    """Arguments of every call of `grpo` in a shell script.

    >>> list(grpo_lines("export A=1  # note\\nB=2 grpo run x.yaml \\\\\\n  seed=1 & grpo show | head"))
    [['run', 'x.yaml', 'seed=1'], ['show']]
    """
    for line in filled(text).replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&()<>")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";|&()<>"):
                yield from _call(command)
                command = []
            else:
                command.append(word)


def _call(command: list[str]) -> Iterator[list[str]]:
    words = command[next((n for n, word in enumerate(command) if not re.match("[A-Z_]+=", word)), 0) :]
    if words[:1] == ["grpo"]:
        yield words[1:]
