"""Expressions: the value of a short arithmetic expression in which precedence matters.

A prompt reads ``<expr>8-3+2*4``, a response ``<think>8-3+8;5+8;13</think><answer>13</answer>``: each step is the
expression with one operation carried out. Only expressions are asked whose value from left to right differs from the
right one. Responses have the format of countdown: one think block, one answer block.
"""

import random
import re
from functools import lru_cache
from itertools import product

import pyarrow as pa

from grpo_lib.config_data import ExpressionsData
from grpo_lib.config_reward import RewardConfig
from grpo_lib.problems.arithmetic import calculate
from grpo_lib.problems.common import PROMPT_SCHEMA, RESPONSE_TAGS, answer_of, collect_unique, graded, split_rows
from grpo_lib.types import Problem, RewardFunction, RewardResult, Sample

Expression = tuple[tuple[int, ...], tuple[str, ...]]
"""Operands, and the operators between them."""

_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,20}")


def load(options: ExpressionsData, split: str, seed: int) -> pa.Table:
    """The expressions of one split; none stands in both.

    The held-out expressions are drawn first, so they don't change with ``train_prompts``.

    Raises:
        DataError: there are fewer unique expressions than asked for.
    """
    expressions = make_expressions(options, options.heldout_prompts + options.train_prompts, seed)
    chosen = expressions[split_rows(split, options.heldout_prompts)]
    texts = [_written(*expression) for expression in chosen]
    return pa.table(
        {
            "prompt_id": [f"expressions-{text}" for text in texts],
            "prompt": [f"<expr>{text}" for text in texts],
            "reference": [str(evaluate(*expression, precedence=True)[-1]) for expression in chosen],
            "data_source": ["expressions"] * len(chosen),
        },
        schema=PROMPT_SCHEMA,
    )


@lru_cache(maxsize=1)  # both splits are cut from the same expressions
def make_expressions(options: ExpressionsData, count: int, seed: int) -> tuple[Expression, ...]:
    """``count`` different expressions in an order fixed by ``seed``.

    Every result on the way is in 0..max_value, whether one goes by precedence or from left to right.

    Raises:
        DataError: there are fewer.
    """
    rng = random.Random(f"expressions {seed}")
    patterns = [p for p in product("+-*", repeat=options.operands - 1) if _precedence_can_matter(p)]

    def draw() -> Expression | None:
        operators = rng.choice(patterns)
        operands = tuple(1 + int(options.max_operand * rng.random()) for _ in range(options.operands))
        habitual = evaluate(operands, operators, precedence=False)
        if max(habitual) > options.max_value or min(habitual) < 0:
            return None
        right = evaluate(operands, operators, precedence=True)
        if max(right) > options.max_value or min(right) < 0 or right[-1] == habitual[-1]:
            return None
        return operands, operators

    remedy = (
        "lower data.train_prompts or data.heldout_prompts, or raise data.max_operand, data.operands or data.max_value"
    )
    return collect_unique(draw, count, remedy)


def _precedence_can_matter(operators: tuple[str, ...]) -> bool:
    return "*" in operators and any(operator != "*" for operator in operators[: _last_product(operators)])


def _last_product(operators: tuple[str, ...]) -> int:
    return len(operators) - 1 - operators[::-1].index("*")


def evaluate(operands: tuple[int, ...], operators: tuple[str, ...], *, precedence: bool) -> list[int]:
    """The result of each operation, in the order in which they are carried out; the last is the value.

    >>> evaluate((8, 3, 2, 4), ("-", "+", "*"), precedence=True)
    [8, 5, 13]
    >>> evaluate((8, 3, 2, 4), ("-", "+", "*"), precedence=False)
    [5, 7, 28]
    """
    results = []
    while operators:
        place = _next_operation(operators, precedence)
        operands, operators = _carry_out(operands, operators, place)
        results.append(operands[place])
    return results


def _next_operation(operators: tuple[str, ...], precedence: bool) -> int:
    return operators.index("*") if precedence and "*" in operators else 0


def _carry_out(operands: tuple[int, ...], operators: tuple[str, ...], place: int) -> Expression:
    result = calculate(operators[place], operands[place], operands[place + 1])
    assert isinstance(result, int)  # + - * of whole numbers
    return (*operands[:place], result, *operands[place + 2 :]), operators[:place] + operators[place + 1 :]


def _written(operands: tuple[int, ...], operators: tuple[str, ...]) -> str:
    return "".join(f"{operand}{operator}" for operand, operator in zip(operands, (*operators, ""), strict=True))


def _read(text: str) -> Expression:
    """The inverse of `_written`, for expressions of our own making."""
    return tuple(int(number) for number in re.findall(r"\d+", text)), tuple(re.findall(r"[-+*]", text))


def make_reward(options: ExpressionsData, reward: RewardConfig) -> RewardFunction:
    """Judges the answer block: it must hold one whole number, digits with at most a minus sign before them."""

    def judge(sample: Sample) -> RewardResult:
        expected = int(sample.reference)
        answer = answer_of(sample.response)
        if answer is None or not _WHOLE_NUMBER.fullmatch(answer.strip(" \t")):
            return graded(reward, well_formed=False, correct=False)
        return graded(reward, well_formed=True, correct=int(answer) == expected, answer=str(int(answer)))

    return judge


def demonstrate(options: ExpressionsData, table: pa.Table, seed: int) -> list[str]:
    """The steps to each expression's value: ``<think>8-3+8;5+8;13</think><answer>13</answer>``.

    A fraction ``options.precedence`` of the writers multiply first; the others go from left to right, and are wrong.
    """
    rng = random.Random(f"expressions demonstrations {seed}")
    texts = []
    for prompt in table.column("prompt").to_pylist():
        expression = _read(prompt.removeprefix("<expr>"))
        texts.append(_demonstration(expression, precedence=rng.random() < options.precedence))
    return texts


def _demonstration(expression: Expression, *, precedence: bool) -> str:
    operands, operators = expression
    steps = []
    while operators:
        operands, operators = _carry_out(operands, operators, _next_operation(operators, precedence))
        steps.append(_written(operands, operators))
    return f"<think>{';'.join(steps)}</think><answer>{steps[-1]}</answer>"


PROBLEM = Problem(
    name="expressions",
    load=load,
    make_reward=make_reward,
    demonstrate=demonstrate,
    tags=("<expr>", *RESPONSE_TAGS),
    alphabet="0123456789+-*;",
)
