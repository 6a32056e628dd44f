"""GSM8K: grade-school word problems from jsonl files.

Each line holds a ``question`` and an ``answer`` that ends in ``#### 72``. The prompt is the question as it stands;
the reference is the number after ``####``. Numbers are compared exactly: 18.00 is 18 and $1,200 is 1200.
"""

import json
import logging
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pyarrow as pa

from grpo_lib.config_data import Gsm8kData
from grpo_lib.config_reward import RewardConfig
from grpo_lib.errors import DataError
from grpo_lib.types import Problem, RewardFunction, RewardResult, Sample

logger = logging.getLogger(__name__)

MARKER = "####"
MAX_NUMBER_CHARS = 50
"""Longer numbers are not read."""

# The sign stands before or after the currency (-$5, $-5); after a digit, letter or bracket it is a subtraction.
_NUMBER = re.compile(
    r"(?:(?<![\w).])(?P<minus>[-\u2212]))?(?:[$€£¥] ?)?(?:(?<![\w).])(?P<late_minus>[-\u2212]))?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
)
_INSIDE = re.compile(r"[0-9][.,]")
"""Right before a number: it is only the end of one that is malformed, as the 2345 of 1,2345."""
_COLUMNS = ("prompt_id", "prompt", "reference", "data_source", "demonstration")


@dataclass(frozen=True, kw_only=True)
class _Row:
    line: int
    """Counted from 1."""
    question: str
    answer: str
    """The whole solution, ``#### 72`` included."""


# Prompts


def load(options: Gsm8kData, split: str, seed: int) -> pa.Table:
    """The rows of one split in the order of the file; ``demonstration`` is an extra column, ``seed`` is not used.

    Held out are the first ``heldout_prompts`` rows of ``heldout_path``, else of ``test.jsonl`` beside ``path``, else
    the last rows of ``path``. Training rows whose question is also held out are left out, with a warning.

    Raises:
        DataError: a file is missing, empty or malformed (file, line and fault are named), or no training row is left.
    """
    if split not in ("train", "heldout"):
        raise DataError(f"there is no split {split!r}: use train or heldout")
    path, heldout_path = Path(options.path), heldout_file(options)
    if heldout_path is not None:
        heldout = _read(heldout_path)
        if split == "heldout":
            return _table(heldout[: options.heldout_prompts], split)
        return _table(_without(_read(path), heldout, path), split)
    rows = _read(path)
    if len(rows) <= options.heldout_prompts:
        raise DataError(
            f"{path} has {len(rows)} rows, and data.heldout_prompts={options.heldout_prompts} of them are to be held "
            "out: nothing is left to train on; lower it, or name a data.heldout_path"
        )
    train, heldout = rows[: -options.heldout_prompts], rows[-options.heldout_prompts :]
    return _table(heldout if split == "heldout" else _without(train, heldout, path), split)


def heldout_file(options: Gsm8kData) -> Path | None:
    """Where the held-out rows are, if in a file of their own: named, or ``test.jsonl`` beside the training file."""
    if options.heldout_path is not None:
        return Path(options.heldout_path)
    beside = Path(options.path).with_name("test.jsonl")
    return beside if beside.is_file() and beside.resolve() != Path(options.path).resolve() else None


def _without(rows: list[_Row], heldout: list[_Row], path: Path) -> list[_Row]:
    questions = {row.question for row in heldout}
    kept = [row for row in rows if row.question not in questions]
    if not kept:
        raise DataError(f"{path}: every question is also held out, nothing is left to train on; name another file")
    if len(kept) < len(rows):
        logger.warning("%s: left out %d rows whose questions are held out", path, len(rows) - len(kept))
    return kept


def _table(rows: list[_Row], split: str) -> pa.Table:
    return pa.table(
        {
            "prompt_id": [f"gsm8k-{split}-{row.line}" for row in rows],
            "prompt": [row.question for row in rows],
            "reference": [_gold(row.answer) for row in rows],
            "data_source": ["gsm8k"] * len(rows),
            "demonstration": [row.answer for row in rows],
        },
        schema=pa.schema([(name, pa.string()) for name in _COLUMNS]),
    )


def _gold(answer: str) -> str:
    return answer.rpartition(MARKER)[2].strip()


def _read(path: Path) -> list[_Row]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror or error}") from error
    rows = [_parse_line(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise DataError(f"{path} is empty: it must hold one JSON object a line, with question and answer")
    return rows


def _parse_line(path: Path, number: int, line: bytes) -> _Row:
    try:
        values = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {number}: not valid JSON in UTF-8 ({error})") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}, line {number}: must be a JSON object, found {type(values).__name__}")
    row = _Row(
        line=number,
        question=_text_field(path, number, values, "question"),
        answer=_text_field(path, number, values, "answer"),
    )
    if MARKER not in row.answer:
        raise DataError(f"{path}, line {number}: the answer has no {MARKER} before its final number")
    if strict_number(row.answer) is None:
        raise DataError(f"{path}, line {number}: no number follows {MARKER}, found {_gold(row.answer)[:80]!r}")
    return row


def _text_field(path: Path, number: int, values: dict[str, object], name: str) -> str:
    if name not in values:
        raise DataError(f"{path}, line {number}: the field {name!r} is missing")
    text = values[name]
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{path}, line {number}: {name!r} must be a text that is not empty, found {str(text)[:80]!r}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{path}, line {number}: {name!r} holds half of a surrogate pair ({error.reason})") from error
    return text


# Answers


def strict_number(text: str) -> Fraction | None:
    """The number right after the last ``####``, exactly; ``None`` where there is none, or more than one in that line.

    Thousands separators, a currency before the number and units behind it are understood.

    >>> strict_number("so #### $1,200.50 dollars.")
    Fraction(2401, 2)
    >>> strict_number("#### 7 or 8") is None
    True
    """
    _, marker, tail = text.rpartition(MARKER)
    line = tail.partition("\n")[0].strip()
    match = _NUMBER.match(line)
    if not marker or match is None or re.search(r"[0-9]", line[match.end() :]):
        return None
    return _value(match)


def flexible_number(text: str) -> Fraction | None:
    """The number after the last ``####`` if `strict_number` finds one, else the last number in the text.

    ``None`` where the last is malformed: neither its end nor a number before it is what the text says.

    >>> flexible_number("6 * 3 gives 18.")
    Fraction(18, 1)
    >>> flexible_number("18, no: 1,2018") is None
    True
    """
    marked = strict_number(text)
    if marked is not None:
        return marked
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    start = matches[-1].start("digits")
    return None if _INSIDE.fullmatch(text, max(0, start - 2), start) else _value(matches[-1])


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match["digits"]) > MAX_NUMBER_CHARS:
        return None
    value = Fraction(match["digits"].replace(",", ""))
    return -value if match["minus"] or match["late_minus"] else value


def make_reward(options: Gsm8kData, reward: RewardConfig) -> RewardFunction:
    """Compares the response's number with the reference; ``format`` says that it stands after ``####``."""
    extract = {"strict": strict_number, "flexible": flexible_number}[options.extraction]

    def judge(sample: Sample) -> RewardResult:
        expected = strict_number(f"{MARKER} {sample.reference}")
        if expected is None:
            raise DataError(f"the reference {sample.reference[:80]!r} is no number")
        number = extract(sample.response)
        correct = number == expected
        marked = strict_number(sample.response) is not None
        value = reward.correct if correct else reward.format_only if marked else 0.0
        components = {"correct": float(correct), "format": float(marked)}
        return RewardResult(value=value, components=components, answer=None if number is None else str(number))

    return judge


def demonstrate(options: Gsm8kData, table: pa.Table, seed: int) -> list[str]:
    """The files' own solutions."""
    solutions: list[str] = table.column("demonstration").to_pylist()
    return solutions


PROBLEM = Problem(
    name="gsm8k", load=load, make_reward=make_reward, demonstrate=demonstrate, tags=(MARKER,), alphabet=None
)
