"""The reward `code`: what the model programmed, against test cases, in a sandbox.

The reference is JSON, one of

    {"stdin_stdout": [{"stdin": "1 2\\n", "stdout": "3\\n"}]}
    {"function": "add", "calls": [{"args": [1, 2], "result": 3}]}        or "Solution().add"
    {"asserts": ["assert add(1, 2) == 3", "assert not is_even(3)"]}

What is expected stays outside and is compared here; that holds for asserts of the form ``expression == literal`` too.
Any other assert runs beside the program, in its process: it has passed when a word comes back that was read only after
the program's own code had run. So printing or ending early passes nothing; but a program that takes Python apart from
inside (looks for open files, replaces what asserts call, gives objects that equal everything) can pass these. Prefer
the other forms where the policy has a reason to find out.

Of stdout, white space at the ends of lines and empty lines at the end do not count. Results of ``calls`` are compared
as JSON, floats to a millionth; those of asserts as Python does.
"""

import ast
import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from grpo_lib.algorithms.registry import Option
from grpo_lib.config_base import UrlWithoutSecrets
from grpo_lib.rewards import code_harness
from grpo_lib.rewards.registry import REWARDS
from grpo_lib.rewards.sandbox import Limits, Ran, check_level, run
from grpo_lib.types import RewardResult, Sample

Level = Literal["bubblewrap", "namespaces", "limits", "remote"]
KINDS = ("stdin_stdout", "calls", "asserts")
_BLOCK = re.compile(r"```(?:python3?|py)[ \t]*\r?\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How one test case went."""

    end: Literal["passed", "wrong", "crashed"]
    """Crashed: an exception, or the program was ended, so that there was no answer."""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Box:
    """Where programs run."""

    level: str
    limits: Limits
    endpoint: str | None

    def run(self, program: str, stdin: str) -> Ran:
        return run(program, stdin, level=self.level, limits=self.limits, endpoint=self.endpoint)


def check_sandbox(*, level: str, endpoint: str | None, **others: object) -> None:
    """Runs a small program in the sandbox that the options name.

    Raises:
        ConfigError, MissingPackageError: it does not work here; with the reason and the other levels.
    """
    check_level(level, endpoint)


@REWARDS.register(
    "code",
    use="Python programs, tested in a sandbox",
    isolated=True,
    check=check_sandbox,
    modules=[f"grpo_lib.rewards.{each}" for each in ("code_harness", "sandbox", "sandbox_levels", "sandbox_process")],
)
def code(
    sample: Sample,
    *,
    level: Annotated[Level, Option(description="Of the sandbox; `limits` is weak.")] = "bubblewrap",
    endpoint: Annotated[
        UrlWithoutSecrets | None, Option(description="Address of the sandbox, for level remote.")
    ] = None,
    timeout: Annotated[
        float, Option(gt=0, description="Seconds for a start: one case of stdin_stdout, else all.")
    ] = 5.0,
    cpu_seconds: Annotated[float, Option(gt=0, description="Of each process.")] = 5.0,
    memory_mib: Annotated[int, Option(ge=64, description="Of each process, and of all.")] = 512,
    processes: Annotated[int, Option(ge=1, description="With their threads.")] = 16,
    disk_mib: Annotated[int, Option(ge=1, description="In /tmp.")] = 16,
    output_kib: Annotated[int, Option(ge=1, description="Of stdout, and of stderr.")] = 256,
    partial_credit: Annotated[bool, Option(description="The fraction of passed cases; else all or nothing.")] = False,
    execution_error_penalty: Annotated[
        float | None, Option(description="The value when a case crashed or was ended, whatever others did; null: none.")
    ] = None,
) -> RewardResult:
    """Runs the last ```python block of the response, or all of it. Components: ``correct``, ``passed_fraction``."""
    limits = Limits(
        wall_seconds=timeout, cpu_seconds=cpu_seconds, memory_mib=memory_mib, processes=processes, disk_mib=disk_mib,
        output_kib=output_kib,
    )  # fmt: skip
    cases = judge(
        program_of(sample.response), cases_of(sample.reference), Box(level=level, limits=limits, endpoint=endpoint)
    )
    passed = sum(case.end == "passed" for case in cases)
    fraction, correct = passed / len(cases), float(passed == len(cases))
    value = fraction if partial_credit else correct
    if execution_error_penalty is not None and any(case.end == "crashed" for case in cases):
        value = execution_error_penalty
    failed = next(((place, case) for place, case in enumerate(cases, start=1) if case.end != "passed"), None)
    text = None if failed is None else f"case {failed[0]} of {len(cases)} {failed[1].end}: {failed[1].why}"
    return RewardResult(value=value, components={"correct": correct, "passed_fraction": fraction}, text=text)


def program_of(response: str) -> str:
    """
    >>> program_of("First: ```python\\nx = 1\\n``` no: ```python\\nx = 2\\n```")
    'x = 2\\n'
    """
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks else response


def cases_of(reference: str) -> dict[str, Any]:
    """
    Raises:
        ValueError: the reference is not one of the three forms.
    """
    try:
        tests = json.loads(reference)
        kinds = [kind for kind in KINDS if kind in tests]
        filled = len(kinds) == 1 and isinstance(tests[kinds[0]], list) and len(tests[kinds[0]]) > 0
        for case in tests[kinds[0]] if filled else ():
            if kinds == ["asserts"]:
                if not _checks(ast.parse(case).body):
                    raise ValueError(f"{case[:80]!r} checks nothing: it has no assert and calls nothing")
            else:
                for name in ("stdin", "stdout") if kinds == ["stdin_stdout"] else ("args", "result"):
                    case[name]
        if filled and (kinds != ["calls"] or isinstance(tests["function"], str)):
            return tests
    except (ValueError, TypeError, KeyError, SyntaxError) as error:
        raise ValueError(
            f"the reference {reference[:80]!r} holds no test cases: {type(error).__name__}: {error}"
        ) from None
    raise ValueError(
        f"the reference {reference[:80]!r} holds no test cases: give one of {', '.join(KINDS)}, a full list"
    )


def _checks(statements: Sequence[ast.stmt]) -> bool:
    """Whether one that runs is an assert or a call; what only stands in a function does not run."""
    for each in statements:
        if isinstance(each, ast.Assert) or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)):
            return True
        inside = [child for child in ast.iter_child_nodes(each) if isinstance(child, ast.stmt)]
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and _checks(inside):
            return True
    return False


def judge(program: str, tests: Mapping[str, Any], box: Box) -> list[Case]:
    """How each case went.

    Raises:
        RewardError: the sandbox failed.
    """
    if "stdin_stdout" in tests:
        return _by_output(program, tests["stdin_stdout"], box)
    if "calls" in tests:
        asked = [{"function": tests["function"], "args": case["args"]} for case in tests["calls"]]
        expected = [code_harness.plain(case["result"], as_json=True) for case in tests["calls"]]
        return _by_answers(program, asked, expected, box, tolerance=1e-6)
    nonce = secrets.token_hex(16)
    asked, expected = [], []
    for text in tests["asserts"]:
        split = equality_of(text)
        asked.append({"check": text} if split is None else {"value": split[0]})
        expected.append(nonce if split is None else code_harness.plain(split[1]))
    return _by_answers(program, asked, expected, box, tolerance=0.0, nonce=nonce)


def equality_of(text: str) -> tuple[str, Any] | None:
    """Both sides of an assert whose one side is a literal, that last.

    >>> equality_of("assert f(2) == (1, 'a')"), equality_of("assert f(2)")
    (('f(2)', (1, 'a')), None)
    """
    match ast.parse(text).body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            for expression, literal in ((left, right), (right, left)):
                try:
                    return ast.unparse(expression), ast.literal_eval(literal)
                except (ValueError, TypeError):
                    continue
    return None


def _by_output(program: str, tests: Sequence[Mapping[str, str]], box: Box) -> list[Case]:
    cases: list[Case] = []
    for test in tests:
        ran = box.run(program, test["stdin"])
        if ran.why is not None or ran.code != 0:
            cases.append(Case(end="crashed", why=_end_of(ran)))
        elif _lines(ran.stdout) == _lines(test["stdout"]):
            cases.append(Case(end="passed"))
        else:
            cases.append(Case(end="wrong", why=f"said {ran.stdout[:200]!r}, expected {test['stdout'][:200]!r}"))
        if ran.why in ("wall time", "cpu time"):  # it would take all the time there is, case by case
            cases += [Case(end="crashed", why="not run, after one that took too long")] * (len(tests) - len(cases))
            break
    return cases


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _by_answers(
    program: str,
    asked: Sequence[Mapping[str, Any]],
    expected: Sequence[Any],
    box: Box,
    tolerance: float,
    nonce: str = "",
) -> list[Case]:
    harness = Path(code_harness.__file__).read_text(encoding="utf-8")
    ran = box.run(f"{harness}\nrun_cases({program!a})\n", json.dumps({"nonce": nonce, "cases": asked}))
    lines = ran.stdout.splitlines()
    return [
        _case(lines[place] if place < len(lines) else None, each, ran, tolerance) for place, each in enumerate(expected)
    ]


def _case(line: str | None, expected: Any, ran: Ran, tolerance: float) -> Case:
    if line is None:
        return Case(end="crashed", why=_end_of(ran))
    try:
        answer = json.loads(line)
        if "error" in answer:
            return Case(
                end="wrong" if answer["kind"] == "AssertionError" else "crashed", why=str(answer["error"])[:300]
            )
        if same(answer["value"], expected, tolerance):
            return Case(end="passed")
    except (ValueError, TypeError, KeyError, RecursionError):
        pass  # the program wrote there itself
    return Case(end="wrong", why=f"answered {line[:200]}, expected {str(expected)[:200]}")


def same(found: Any, expected: Any, tolerance: float) -> bool:
    """Whether two values that `plain` made are equal."""
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(same(a, b, tolerance) for a, b in zip(found, expected, strict=True))
    numbers = isinstance(found, float | int) and isinstance(expected, float | int)
    if tolerance and numbers and float in (type(found), type(expected)):
        return math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
    return bool(found == expected)


def _end_of(ran: Ran) -> str:
    if ran.why is not None:
        return f"ended for {ran.why} after {ran.seconds:.1f} s"
    said = ran.stderr.strip().splitlines()
    return (
        said[-1][:300] if said and ran.code else ""
    ) or f"the program ended with exit status {ran.code}, without an answer"
