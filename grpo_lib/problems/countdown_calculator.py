"""Countdown with a calculator: the policy writes what is to be computed and reads the result.

Puzzles, prompts and rewards are those of ``countdown``. A response reads
``<think><calc>30+12+7-25</calc><result>24</result>x;<calc>30-12+7-25</calc><result>0</result>v</think>`` and
``<answer>30-12+7</answer>``: each try is computed less the target, and 0 is what the writer looks for. What stands
between ``<result>`` and ``</result>`` comes from the tool ``calculator`` (``rollout.agent``).
"""

import random

import pyarrow as pa
import pyarrow.compute as pc

from grpo_lib.config_data import CountdownCalculatorData
from grpo_lib.problems import countdown
from grpo_lib.problems.arithmetic import parse_arithmetic
from grpo_lib.problems.common import RESPONSE_TAGS
from grpo_lib.types import Problem

CALL_TAGS = ("<calc>", "</calc>")
RESULT_TAGS = ("<result>", "</result>")


def load(options: CountdownCalculatorData, split: str, seed: int) -> pa.Table:
    """The puzzles of ``countdown``, as a data source of their own."""
    table = countdown.load(options, split, seed)
    source = table.schema.get_field_index("data_source")
    return table.set_column(source, "data_source", pc.replace_substring(table["data_source"], "countdown", NAME))


def demonstrate(options: CountdownCalculatorData, table: pa.Table, seed: int) -> list[str]:
    """A search for each puzzle, as in ``countdown``, in which the calculator says how far off each try is.

    A fraction ``options.persistence`` of the writers go on until a try reaches the target; the others hand in their
    first.
    """
    rng = random.Random(f"countdown calculator demonstrations {seed}")
    return countdown.write_searches(options, table, rng, _demonstration)


def _demonstration(numbers: list[int], target: int, cycle: list[tuple[str, ...]], persistent: bool) -> str:
    tries: list[str] = []
    answer = ""
    for pattern in cycle:
        answer = countdown.written(numbers, pattern)
        read = parse_arithmetic(f"{answer}-{target}")
        assert read is not None, f"{answer!r} is arithmetic"
        result = "error: division by zero" if read.value is None else str(read.value)
        reached = read.value == 0
        tries.append(f"<calc>{answer}-{target}</calc><result>{result}</result>{'v' if reached else 'x'}")
        if reached or not persistent:
            break
    return f"<think>{';'.join(tries)}</think><answer>{answer}</answer>"


NAME = "countdown_calculator"
PROBLEM = Problem(
    name=NAME,
    load=load,
    make_reward=countdown.make_reward,
    demonstrate=demonstrate,
    tags=("<nums>", "<target>", *RESPONSE_TAGS, *CALL_TAGS, *RESULT_TAGS),
    observed=RESULT_TAGS,
    alphabet=None,  # a tool may say anything
)
