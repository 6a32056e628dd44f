"""Countdown: reach a target from given numbers, each used exactly once.

A prompt reads ``<nums>30,12,7<target>25`` (numbers in descending order), a response
``<think>...</think><answer>30-12+7</answer>``. Puzzles are made on the spot from a seed, and all can be solved: with
only + and - they come from a chain over the listed numbers that starts with the largest, with * or / from a random
expression. Answers are judged in exact fractions.
"""

import json
import random
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from itertools import product

import pyarrow as pa

from grpo_lib.config_data import CountdownOptions
from grpo_lib.config_reward import RewardConfig
from grpo_lib.problems.arithmetic import calculate, parse_arithmetic
from grpo_lib.problems.common import PROMPT_SCHEMA, RESPONSE_TAGS, answer_of, collect_unique, graded, split_rows
from grpo_lib.types import Problem, RewardFunction, RewardResult, Sample

Puzzle = tuple[tuple[int, ...], int]


# Puzzles


def load(options: CountdownOptions, split: str, seed: int) -> pa.Table:
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


@lru_cache(maxsize=1)  # both splits are cut from the same puzzles
def make_puzzles(options: CountdownOptions, count: int, seed: int) -> tuple[Puzzle, ...]:
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


def _draw_numbers(options: CountdownOptions, rng: random.Random) -> list[int]:
    """Numbers in descending order, every multiset equally likely, so that early and late draws look alike.

    Different places in a range that is longer by the count of numbers, less one, stand for the multisets.
    """
    last = options.numbers - 1
    places = sorted(rng.sample(range(1, options.max_number + last + 1), options.numbers), reverse=True)
    return [place - (last - index) for index, place in enumerate(places)]


def _draw_chain(options: CountdownOptions, rng: random.Random) -> Puzzle | None:
    """Only + and -: left to right over the listed numbers, so that the demonstrations' search finds it."""
    numbers = _draw_numbers(options, rng)
    target = numbers[0]
    for number, operator in zip(numbers[1:], rng.choices(options.operators, k=options.numbers - 1), strict=True):
        target += number if operator == "+" else -number
    return (tuple(numbers), target) if 0 <= target <= options.max_target else None


def _draw_expression(options: CountdownOptions, rng: random.Random) -> Puzzle | None:
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


def make_reward(options: CountdownOptions, reward: RewardConfig) -> RewardFunction:
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
        return graded(reward, well_formed=True, correct=correct, answer="".join(answer.split()) if answer else None)

    return judge


# Demonstrations


def demonstrate(options: CountdownOptions, table: pa.Table, seed: int) -> list[str]:
    """A search for each puzzle: ``30+12=42,42-7=35x;30-12=18,18+7=25v``, then the last try as the answer.

    A try goes through the listed numbers from left to right and ends in the writer's own check, v or x. Tries follow
    a fixed cycle of operator patterns from a random start. A fraction ``options.persistence`` of the writers go on
    until a try passes (or the cycle is through); the others hand in their first try whatever its check says.
    """
    return write_searches(options, table, random.Random(f"countdown demonstrations {seed}"), _demonstration)


def write_searches(
    options: CountdownOptions,
    table: pa.Table,
    rng: random.Random,
    write: Callable[[list[int], int, list[tuple[str, ...]], bool], str],
) -> list[str]:
    """What ``write`` makes of each puzzle: of its numbers, target, a cycle of patterns, and whether to go on."""
    patterns = list(product(options.operators, repeat=options.numbers - 1))
    texts = []
    for reference in table.column("reference").to_pylist():
        puzzle = json.loads(reference)
        start = rng.randrange(len(patterns))
        persistent = rng.random() < options.persistence
        cycle = patterns[start:] + patterns[:start]
        texts.append(write(puzzle["numbers"], puzzle["target"], cycle, persistent))
    return texts


def _demonstration(numbers: list[int], target: int, cycle: list[tuple[str, ...]], persistent: bool) -> str:
    tries: list[str] = []
    answer = written(numbers, cycle[0])
    for pattern in cycle:
        tried = _try(numbers, pattern)
        if tried is None:  # it divides unevenly
            continue
        steps, value = tried
        tries.append(steps + ("v" if value == target else "x"))
        answer = written(numbers, pattern)
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


def written(numbers: list[int], pattern: tuple[str, ...]) -> str:
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
