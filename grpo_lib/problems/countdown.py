"""Countdown: reach a target from given numbers, each used exactly once.

A prompt reads ``<nums>30,12,7<target>25`` (numbers in descending order), a response
``<think>...</think><answer>30-12+7</answer>``. Puzzles are made on the spot from a seed, and all can be solved: with
only + and - they come from a chain over the listed numbers that starts with the largest, with * or / from a random
expression. Answers are read by a parser of our own, in exact fractions; nothing that a policy writes is evaluated.
"""

import json
import random
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import TypeVar

import pyarrow as pa

from grpo_lib.config import CountdownData, RewardConfig
from grpo_lib.errors import DataError
from grpo_lib.types import Problem, RewardFunction, RewardResult, Sample

MAX_ANSWER_CHARS = 200
"""Longer answers are not read."""
MAX_DEPTH = 20
"""Deeper nesting of parentheses and minus signs is not read."""
RESPONSE_TAGS = ("<think>", "</think>", "<answer>", "</answer>")

PROMPT_SCHEMA = pa.schema([(name, pa.string()) for name in ("prompt_id", "prompt", "reference", "data_source")])

Item = TypeVar("Item", bound=Hashable)
Puzzle = tuple[tuple[int, ...], int]

_RESPONSE = re.compile(r"\s*<think>.*</think>\s*<answer>(?P<answer>.*)</answer>\s*", re.DOTALL)
_TOKEN = re.compile(r"[ \t]*([0-9]+|[-+*/()])[ \t]*")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


# Puzzles


def load(options: CountdownData, split: str, seed: int) -> pa.Table:
    """The puzzles of one split; train and held-out ones differ in numbers or target.

    The held-out puzzles are drawn first, so they don't change with ``train_prompts``.

    Raises:
        DataError: there are fewer unique puzzles than asked for.
    """
    puzzles = make_puzzles(options, options.heldout_prompts + options.train_prompts, seed)
    chosen = puzzles[split_rows(split, options.heldout_prompts)]
    return pa.table(
        {
            "prompt_id": [f"countdown-{'_'.join(map(str, numbers))}-{target}" for numbers, target in chosen],
            "prompt": [f"<nums>{','.join(map(str, numbers))}<target>{target}" for numbers, target in chosen],
            "reference": [json.dumps({"numbers": numbers, "target": target}) for numbers, target in chosen],
            "data_source": ["countdown"] * len(chosen),
        },
        schema=PROMPT_SCHEMA,
    )


def make_puzzles(options: CountdownData, count: int, seed: int) -> list[Puzzle]:
    """``count`` different puzzles (numbers in descending order, target) in an order fixed by ``seed``.

    Raises:
        DataError: there are fewer.
    """
    rng = random.Random(f"countdown puzzles {seed}")
    draw = _draw_chain if set(options.operators) <= {"+", "-"} else _draw_expression
    remedy = (
        "lower data.train_prompts or data.heldout_prompts, or raise data.max_number, data.numbers or data.max_target"
    )
    return collect_unique(lambda: draw(options, rng), count, remedy)


def collect_unique(draw: Callable[[], Item | None], count: int, remedy: str) -> list[Item]:
    """Draws until ``count`` different puzzles are found; ``None`` from ``draw`` is a miss.

    Raises:
        DataError: nothing new came for 10,000 draws and ten more for each puzzle found.
    """
    found: dict[Item, None] = {}
    misses = 0
    while len(found) < count:
        puzzle = draw()
        if puzzle is not None and puzzle not in found:
            found[puzzle] = None
            misses = 0
        else:
            misses += 1
            if misses > 10_000 + 10 * len(found):
                raise DataError(
                    f"{count} unique puzzles are asked for, and only {len(found)} could be found "
                    f"(then {misses} draws gave no new one): {remedy}"
                )
    return list(found)


def split_rows(split: str, heldout: int) -> slice:
    """Where a split stands in a list whose first ``heldout`` entries are held out."""
    if split == "heldout":
        return slice(None, heldout)
    if split == "train":
        return slice(heldout, None)
    raise DataError(f"there is no split {split!r}: use train or heldout")


def _draw_numbers(options: CountdownData, rng: random.Random) -> list[int]:
    """Numbers in descending order, every multiset equally likely, so that early and late draws look alike.

    Different places in a range that is longer by the count of numbers, less one, stand for the multisets.
    """
    last = options.numbers - 1
    places = sorted(rng.sample(range(1, options.max_number + last + 1), options.numbers), reverse=True)
    return [place - (last - index) for index, place in enumerate(places)]


def _draw_chain(options: CountdownData, rng: random.Random) -> Puzzle | None:
    """Only + and -: left to right over the listed numbers, so that the demonstrations' search finds it."""
    numbers = _draw_numbers(options, rng)
    target = numbers[0]
    for number, operator in zip(numbers[1:], rng.choices(options.operators, k=options.numbers - 1), strict=True):
        target += number if operator == "+" else -number
    return (tuple(numbers), target) if 0 <= target <= options.max_target else None


def _draw_expression(options: CountdownData, rng: random.Random) -> Puzzle | None:
    """Joins two random values by a random operator until one is left; it may be any fraction on the way."""
    numbers = _draw_numbers(options, rng)
    values: list[int | Fraction] = list(numbers)
    while len(values) > 1:
        left, right = (values.pop(rng.randrange(len(values))) for _ in range(2))
        joined = calculate(rng.choice(options.operators), left, right)
        if joined is None:
            return None
        values.append(joined)
    target = values[0]
    if target.denominator != 1 or not 0 <= target <= options.max_target:
        return None
    return tuple(numbers), int(target)


# Answers


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """An arithmetic expression that was read."""

    value: Fraction | None
    """Its exact value; ``None`` where it divides by zero."""
    numbers: tuple[int, ...]
    """The numbers in it, from left to right."""
    operators: frozenset[str]
    """The operators in it; a minus sign counts as ``-``."""


def calculate(operator: str, left: int | Fraction | None, right: int | Fraction | None) -> int | Fraction | None:
    """``left operator right``, exactly; ``None`` for a division by zero or when an operand is ``None``.

    >>> calculate("/", 1, 3)
    Fraction(1, 3)
    >>> calculate("/", 1, 0) is None
    True
    """
    if left is None or right is None:
        return None
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    return Fraction(left) / right if right else None


def parse_arithmetic(text: str) -> Arithmetic | None:
    """Reads whole numbers, + - * /, minus signs and parentheses; ``None`` where that is not what stands there.

    Answers of more than ``MAX_ANSWER_CHARS`` characters or nested deeper than ``MAX_DEPTH`` are not read.

    >>> parse_arithmetic("(30-12)/4").value
    Fraction(9, 2)
    >>> parse_arithmetic("30**2") is None
    True
    """
    if len(text) > MAX_ANSWER_CHARS:
        return None
    try:
        return _Parser(_tokens(text)).parse()
    except _NotArithmeticError:
        return None


class _NotArithmeticError(Exception):
    """The text is no arithmetic expression; never leaves `parse_arithmetic`."""


def _tokens(text: str) -> list[str]:
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _NotArithmeticError
        tokens.append(match[1])
        position = match.end()
    return tokens


class _Parser:
    """Precedence climbing; evaluates while it reads."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = [*tokens, ""]  # the empty token marks the end
        self._position = 0
        self._numbers: list[int] = []
        self._operators: set[str] = set()

    def parse(self) -> Arithmetic:
        value = self._expression(1, 0)
        if self._take() != "":
            raise _NotArithmeticError
        exact = None if value is None else Fraction(value)
        return Arithmetic(value=exact, numbers=tuple(self._numbers), operators=frozenset(self._operators))

    def _take(self) -> str:
        token = self._tokens[self._position]
        self._position += 1
        return token

    def _expression(self, level: int, depth: int) -> int | Fraction | None:
        """Operators of precedence ``level`` and above, left-associative."""
        value = self._operand(depth)
        while _PRECEDENCE.get(self._tokens[self._position], 0) >= level:
            operator = self._take()
            self._operators.add(operator)
            value = calculate(operator, value, self._expression(_PRECEDENCE[operator] + 1, depth))
        return value

    def _operand(self, depth: int) -> int | Fraction | None:
        token = self._take()
        if token.isdigit():
            self._numbers.append(int(token))
            return self._numbers[-1]
        if depth == MAX_DEPTH or token not in ("-", "("):
            raise _NotArithmeticError
        if token == "-":
            self._operators.add("-")
            return calculate("-", 0, self._operand(depth + 1))
        value = self._expression(1, depth + 1)
        if self._take() != ")":
            raise _NotArithmeticError
        return value


def answer_of(response: str) -> str | None:
    """What stands in the answer block; ``None`` unless the response is one think and one answer block.

    >>> answer_of("<think>...</think><answer>30-12+7</answer>")
    '30-12+7'
    >>> answer_of("<answer>30-12+7</answer>") is None
    True
    """
    if any(response.count(tag) != 1 for tag in RESPONSE_TAGS):
        return None
    match = _RESPONSE.fullmatch(response)
    return match["answer"] if match else None


def graded(reward: RewardConfig, *, well_formed: bool, correct: bool) -> RewardResult:
    """The reward of an answer: right, wrong in the right format, or neither."""
    value = reward.correct if correct else reward.format_only if well_formed else 0.0
    return RewardResult(value=value, components={"correct": float(correct), "format": float(well_formed)})


def make_reward(options: CountdownData, reward: RewardConfig) -> RewardFunction:
    """Judges the answer block; a right answer uses every number once and only the operators of ``options``."""
    allowed = frozenset(options.operators)

    def judge(sample: Sample) -> RewardResult:
        puzzle = json.loads(sample.reference)
        answer = answer_of(sample.response)
        read = parse_arithmetic(answer) if answer is not None else None
        if read is None:
            return graded(reward, well_formed=False, correct=False)
        correct = (
            read.value == puzzle["target"]
            and sorted(read.numbers) == sorted(puzzle["numbers"])
            and read.operators <= allowed
        )
        return graded(reward, well_formed=True, correct=correct)

    return judge


# Demonstrations


def demonstrate(options: CountdownData, table: pa.Table, seed: int) -> list[str]:
    """A search for each puzzle: ``30+12=42,42-7=35x;30-12=18,18+7=25v``, then the last try as the answer.

    A try goes through the listed numbers from left to right and ends in the writer's own check, v or x. Tries follow
    a fixed cycle of operator patterns from a random start. A fraction ``options.persistence`` of the writers go on
    until a try passes (or the cycle is through); the others hand in their first try whatever its check says.
    """
    rng = random.Random(f"countdown demonstrations {seed}")
    patterns = list(product(options.operators, repeat=options.numbers - 1))
    texts = []
    for reference in table.column("reference").to_pylist():
        puzzle = json.loads(reference)
        start = rng.randrange(len(patterns))
        persistent = rng.random() < options.persistence
        cycle = patterns[start:] + patterns[:start]
        texts.append(_demonstration(puzzle["numbers"], puzzle["target"], cycle, persistent))
    return texts


def _demonstration(numbers: list[int], target: int, cycle: list[tuple[str, ...]], persistent: bool) -> str:
    tries: list[str] = []
    answer = _written(numbers, cycle[0])
    for pattern in cycle:
        tried = _try(numbers, pattern)
        if tried is None:  # it divides unevenly
            continue
        steps, value = tried
        tries.append(steps + ("v" if value == target else "x"))
        answer = _written(numbers, pattern)
        if value == target or not persistent:
            break
    return f"<think>{';'.join(tries)}</think><answer>{answer}</answer>"


def _try(numbers: list[int], pattern: tuple[str, ...]) -> tuple[str, int] | None:
    """The steps as text and their result; ``None`` where a division leaves a remainder or is by zero."""
    steps, value = [], numbers[0]
    for operator, number in zip(pattern, numbers[1:], strict=True):
        result = calculate(operator, value, number)
        if result is None or result.denominator != 1:
            return None
        steps.append(f"{value}{operator}{number}={result}")
        value = int(result)
    return ",".join(steps), value


def _written(numbers: list[int], pattern: tuple[str, ...]) -> str:
    """The pattern as an expression, with parentheses where precedence would change it."""
    text, is_sum = str(numbers[0]), False
    for operator, number in zip(pattern, numbers[1:], strict=True):
        if is_sum and operator in "*/":
            text = f"({text})"
        is_sum = operator in "+-"
        text += f"{operator}{number}"
    return text


PROBLEM = Problem(
    name="countdown",
    load=load,
    make_reward=make_reward,
    demonstrate=demonstrate,
    tags=("<nums>", "<target>", *RESPONSE_TAGS),
    alphabet="0123456789+-*/=,;xv()",
)
