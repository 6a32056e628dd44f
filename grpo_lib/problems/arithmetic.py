"""Reads arithmetic in exact fractions, with a parser of our own: nothing that a policy writes is evaluated."""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER_CHARS = 200
"""Longer answers are not read."""
MAX_DEPTH = 20
"""Deeper nesting of parentheses and minus signs is not read."""

_TOKEN = re.compile(r"[ \t]*([0-9]+|[-+*/()])[ \t]*")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


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
