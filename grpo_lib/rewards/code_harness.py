"""What runs in the sandbox around a program whose functions are called: the text of this file, before the program's.

Standard library only: it knows nothing of this package there.
"""

import json
import os
import sys
from numbers import Integral, Real
from types import ModuleType
from typing import Any


def run_cases(code: str) -> None:
    """Runs the program, only then reads what to ask it, and answers with a line of JSON for each case.

    What the program prints goes to stderr, and its input is empty.
    """
    answers, questions = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    program = ModuleType("program")
    sys.modules["program"] = program
    space = program.__dict__
    exec(compile(code, "program.py", "exec"), space)
    asked = json.loads(questions.read())
    for case in asked["cases"]:
        answer: dict[str, Any]
        try:
            if "function" in case:
                answer = {"value": plain(eval(case["function"], space)(*case["args"]), as_json=True)}
            elif "value" in case:
                answer = {"value": plain(eval(case["value"], space))}
            else:
                exec(compile(case["check"], "test.py", "exec"), space)
                answer = {"value": asked["nonce"]}
            line = json.dumps(answer)
        except BaseException as error:
            line = json.dumps({"error": f"{type(error).__name__}: {error}"[:300], "kind": type(error).__name__})
        answers.write(line + "\n")
        answers.flush()


def plain(value: Any, as_json: bool = False) -> Any:
    """A value as JSON that says of which type it is: what is equal in Python comes out equal.

    Args:
        as_json: as JSON would have it: tuples are lists, keys of dicts are strings.

    >>> plain((1, [2.5, {"a": None}]))
    ['tuple', 1, ['list', 2.5, ['dict', ['a', None]]]]
    """
    if value is None or isinstance(value, str):
        return value if value is None else str(value)
    if isinstance(value, Integral):
        return int(value) if abs(int(value)) < 2**63 else ["int", hex(int(value))]
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, list | tuple):
        name = "list" if as_json or isinstance(value, list) else "tuple"
        return [name, *(plain(each, as_json) for each in value)]
    if isinstance(value, set | frozenset):
        return ["set", *sorted((plain(each, as_json) for each in value), key=json.dumps)]
    if isinstance(value, dict):
        keys = [next(iter(json.loads(json.dumps({key: 0})))) if as_json else plain(key) for key in value]
        return ["dict", *sorted(([k, plain(v, as_json)] for k, v in zip(keys, value.values())), key=json.dumps)]  # noqa: B905
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    return ["other", type(value).__name__]
