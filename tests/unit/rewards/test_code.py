"""The reward `code`: literal values, and programs that would like to pass without solving anything."""

import json
import os
import shutil
import sys
from typing import Any

import pytest

from grpo_lib.errors import ConfigError, MissingPackageError, RewardError
from grpo_lib.rewards.code import cases_of, code, equality_of, program_of, same
from grpo_lib.rewards.code_harness import plain
from grpo_lib.rewards.registry import REWARDS
from grpo_lib.rewards.sandbox import check_level
from grpo_lib.types import RewardResult, Sample


def _level() -> str:
    for level in ("namespaces", "bubblewrap"):
        try:
            check_level(level)
            return level
        except (ConfigError, MissingPackageError):
            continue
    return "limits"


LEVEL = _level()
EVEN = {"function": "double", "calls": [{"args": [n], "result": 2 * n} for n in range(4)]}
OUTPUT = {"stdin_stdout": [{"stdin": f"{n}\n", "stdout": f"{2 * n}\n"} for n in range(4)]}
ASSERTS = {
    "asserts": ["assert double(1) == 2", "assert double(2) > 3", "assert 6 == double(3)", "assert double(4) == 8"]
}
EVERY_FORM = pytest.mark.parametrize("tests", [EVEN, OUTPUT, ASSERTS], ids=["calls", "stdin_stdout", "asserts"])


def judged(program: str, tests: Any, **options: Any) -> RewardResult:
    sample = Sample(
        prompt="", response=f"Here:\n```python\n{program}\n```\n", reference=json.dumps(tests), data_source="d",
        response_tokens=9, finish_reason="stop",
    )  # fmt: skip
    return code(sample, **{"level": LEVEL, "timeout": 30.0, "cpu_seconds": 20.0} | options)


def test_every_form_of_test_case_passes_a_right_program() -> None:
    right = "def double(n): return 2 * n\nif __name__ == '__main__': print(double(int(input())))"
    for tests in (EVEN, OUTPUT, ASSERTS):
        expected = RewardResult(value=1.0, components={"correct": 1.0, "passed_fraction": 1.0})
        assert judged(right, tests) == expected, tests


def test_partial_credit_is_the_fraction_of_passed_cases() -> None:
    half = "def double(n): return 2 * n if n > 1 else -1\nif __name__ == '__main__': print(double(int(input())))"
    for tests in (EVEN, OUTPUT):
        made = judged(half, tests)
        assert (made.value, dict(made.components)) == (0.0, {"correct": 0.0, "passed_fraction": 0.5})
        assert judged(half, tests, partial_credit=True).value == 0.5
    made = judged(half, ASSERTS, partial_credit=True)
    assert made.value == 0.75 and made.text == 'case 1 of 4 wrong: answered {"value": -1}, expected 2'


def test_the_first_failed_case_is_explained() -> None:
    assert judged("print(2 * int(input()) % 4)", OUTPUT).text == "case 3 of 4 wrong: said '0\\n', expected '4\\n'"
    crash = judged("def double(n): return 2 * n if n < 3 else [][n]", EVEN)
    assert crash.text == "case 4 of 4 crashed: IndexError: list index out of range"
    assert "NameError" in str(judged("x = y", EVEN).text)
    assert "SyntaxError" in str(judged("def double(n) return", OUTPUT).text)
    assert "NameError: name 'double'" in str(judged("", ASSERTS).text)


def test_the_penalty_is_for_programs_that_crash_or_are_ended_and_not_for_wrong_ones() -> None:
    options: dict[str, Any] = {"partial_credit": True, "execution_error_penalty": -0.5}
    assert judged("def double(n): return 2 * n if n < 3 else n", EVEN, **options).value == 0.75
    assert judged("def double(n): return 2 * n if n < 3 else 1 / 0", EVEN, **options).value == -0.5
    assert judged("def double(n): return 2 * n", EVEN, **options).value == 1.0
    assert judged("n = int(input())\nprint(2 * n)\nif n == 3: raise ValueError", OUTPUT, **options).value == -0.5
    assert judged("n = int(input())\nprint(n)", OUTPUT, **options).value == 0.25
    assert judged("def double(n): return n", ASSERTS, **options).value == 0.0
    assert judged("raise SystemExit", ASSERTS, **options).value == -0.5


def test_a_program_without_end_keeps_the_cases_before_it() -> None:
    slow = "def double(n):\n    while n == 2: pass\n    return 2 * n"
    made = judged(slow, EVEN, partial_credit=True, timeout=3.0)
    assert made.value == 0.5 and str(made.text).startswith("case 3 of 4 crashed: ended for wall time after 3")
    made = judged("n = int(input())\nprint(2 * n)\nwhile n: pass", OUTPUT, partial_credit=True, timeout=3.0)
    assert made.value == 0.25  # two sandboxes were started, not four
    assert "ended for output" in str(judged("while True: print('x' * 10**6)", OUTPUT, output_kib=10).text)


TRICKS = {
    "_exit": "import os\nos._exit(0)",
    "exit": "raise SystemExit(0)",
    "print": """print('2'); print('passed'); print('{"value": true}')""",
    "every file": """
import os
for number in range(64):
    try:
        os.write(number, b'{"value": 2}\\n' * 9)
    except OSError:
        pass
os._exit(0)
""",
    "equal": """
class Equal:
    def __eq__(self, other): return True
    def __str__(self): return "2"
def double(n): return Equal()
""",
    "json": """import json\njson.dumps = lambda *_: '{"value": "passed"}'\ndef double(n): return n""",
    "exit in call": "def double(n):\n    import os\n    os._exit(0)",
    "modules": "import sys\nsys.exit = print\ndouble = lambda n: sys.modules",
    "builtins": "import builtins\nbuiltins.AssertionError = None\ndef double(n): raise AssertionError",
    "thread": "import threading, os, time\nthreading.Timer(0, os._exit, [0]).start()\ntime.sleep(1)",
}


@EVERY_FORM
@pytest.mark.parametrize("trick", TRICKS)
def test_cheap_tricks_pass_no_test(trick: str, tests: Any) -> None:
    made = judged(TRICKS[trick], tests, partial_credit=True)
    assert made.components["correct"] == 0.0
    assert made.value == (0.25 if trick == "every file" and tests in (EVEN, ASSERTS) else 0.0)  # one answer is 2


def test_what_is_expected_is_nowhere_in_the_sandbox() -> None:
    """The secret number would have to be found in memory, files, arguments or environment."""
    spy = """
import gc, os, sys
def double(*_):
    number = "".join(["86420", "97531"])
    seen = [repr(each) for each in gc.get_objects() if isinstance(each, (list, dict, tuple, str))]
    seen += sys.argv + list(os.environ.values())
    return any(number in each for each in seen)
if __name__ == "__main__":
    print(double())
"""
    for tests in (
        {"function": "double", "calls": [{"args": [1], "result": 8642097531}]},
        {"asserts": ["assert double(1) == 8642097531"]},
        {"stdin_stdout": [{"stdin": "", "stdout": "8642097531"}]},
    ):
        text = str(judged(spy, tests).text)
        assert "false" in text or "False" in text or '"value": 0' in text, text


def test_calls_compare_as_json_and_asserts_as_python() -> None:
    pairs = "def pairs(n): return {n: (n, 0.1 + 0.2)}"
    calls = {"function": "pairs", "calls": [{"args": [1], "result": {"1": [1, 0.3]}}]}
    assert judged(pairs, calls).value == 1.0
    assert judged(pairs, {"asserts": ["assert pairs(1) == {1: (1, 0.3)}"]}).value == 0.0
    assert judged(pairs, {"asserts": ["assert pairs(1) == {1: (1, 0.30000000000000004)}"]}).value == 1.0
    assert judged("def f(): return (1, 2)", {"asserts": ["assert f() == [1, 2]"]}).value == 0.0
    assert judged("def f(): return {3, 1}, 10**5000", {"asserts": ["assert f()[0] == {1, 3}"]}).value == 1.0
    method = {"function": "Solution().add", "calls": [{"args": [1, 2], "result": 3}]}
    assert judged("class Solution:\n    def add(self, a, b): return a + b", method).value == 1.0


def test_prints_and_data_classes_do_not_disturb_calls() -> None:
    program = """
from dataclasses import dataclass
@dataclass
class P:
    x: int
print("hello")
def double(n):
    print(n)
    return P(2 * n).x
"""
    assert judged(program, EVEN).value == 1.0


def test_values_that_are_equal_in_python_are_equal_when_plain() -> None:
    equal = [(1, 1.0), (True, 1), ({1, 2}, frozenset([2, 1])), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (10**30, 10**30)]
    assert all(same(plain(a), plain(b), 0.0) for a, b in equal)
    other = [(1, "1"), ([1], (1,)), ([1], [1, 1]), (10**30, 10**30 + 1), (None, 0), ({1: 2}, {"1": 2}), (b"a", "a")]
    assert not any(same(plain(a), plain(b), 0.0) for a, b in other)
    assert same(1.0, 1.0000001, 1e-6) and not same(1.0, 1.0000001, 0.0) and not same(1.0, 1.1, 1e-6)
    assert not same(plain(float("nan")), plain(float("nan")), 1e-6)


def test_the_program_is_the_last_block_or_all() -> None:
    assert program_of("x = 1") == "x = 1"
    assert program_of("```python\na\n```\n```json\nb\n```\n```py\nc\n```\nend") == "c\n"
    assert program_of("```Python\ncut off") == "cut off"
    assert program_of("```python\nprint('```')\n```") == "print('```')\n"


def test_an_assert_is_split_where_one_side_is_a_literal() -> None:
    assert equality_of("assert f([1, 2]) == [2, 1], 'message'") == ("f([1, 2])", [2, 1])
    assert equality_of("assert -1 == f()") == ("f()", -1)
    for text in ("assert f() == g()", "assert f() is None", "assert 1 < f() == 2", "x = f()\nassert x == 1"):
        assert equality_of(text) is None


@pytest.mark.parametrize(
    "reference",
    ["", "[]", "7", "{}", '{"asserts": []}', '{"asserts": ["assert ("]}', '{"calls": [{"args": [], "result": 1}]}',
     '{"stdin_stdout": [{"stdin": ""}]}', '{"asserts": ["assert 1"], "stdin_stdout": []}'],
)  # fmt: skip
def test_a_reference_without_test_cases_is_an_error_and_no_zero(reference: str) -> None:
    with pytest.raises(ValueError, match="holds no test cases"):
        cases_of(reference)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "ValueError: '' checks nothing: it has no assert and calls nothing"),
        ("# double(1) == 2", "checks nothing"),
        ("x = 5", "ValueError: 'x = 5' checks nothing"),
        ("x = double(1)", "checks nothing"),
        ("double(1) == 2", "checks nothing"),
        ("double", "checks nothing"),
        ("def check(f):\n    assert f(1) == 2", "checks nothing"),
        ("class Test:\n    def test(self):\n        assert double(1) == 2", "checks nothing"),
        ("def check(f):\n    check(f)\nasync def other():\n    assert 0", "checks nothing"),
        ("lambda: double(1)", "checks nothing"),
        ("assert (", "SyntaxError"),
        ("assert double(1) ==", "SyntaxError"),
        (7, "TypeError"),
    ],
)
def test_an_assert_that_checks_nothing_is_an_error_and_no_one(text: Any, reason: str) -> None:
    given = {"asserts": ["assert double(1) == 2", text]}
    with pytest.raises(ValueError, match="holds no test cases") as raised:
        judged("def double(n): return 2 * n", given)
    assert reason in str(raised.value)


def test_asserts_may_be_calls_and_stand_in_loops() -> None:
    given = {
        "asserts": [
            "def check(f):\n    assert f(1) > 1\ncheck(double)",
            "for n in range(3):\n    assert double(n) == 2 * n",
            "try:\n    double(None)\nexcept TypeError:\n    pass",
        ]
    }
    assert judged("def double(n): return 2 * n", given).value == 1.0
    made = judged("def double(n): return n", given, partial_credit=True)
    assert made.value == pytest.approx(1 / 3) and made.text == "case 1 of 3 wrong: AssertionError: "


def test_a_sandbox_that_has_not_started_is_an_error_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr("grpo_lib.rewards.sandbox.command", lambda *_: slow)
    for tests in (EVEN, OUTPUT, ASSERTS):
        with pytest.raises(RewardError, match=r"did not start: ended for wall time after 0\.5 s"):
            judged("", tests, timeout=0.5, execution_error_penalty=-1.0)


def test_it_is_registered_to_run_apart_and_has_bounds() -> None:
    entry = REWARDS["code"]
    assert entry.traits["isolated"] is True
    with pytest.raises(ConfigError, match=r"kwargs\.timeout=0"):
        entry.bind({"timeout": 0}, "kwargs")
    with pytest.raises(ConfigError, match=r"kwargs\.level='docker'"):
        entry.bind({"level": "docker"}, "kwargs")


@pytest.mark.skipif(shutil.which("bwrap") is not None, reason="bwrap is installed")
def test_a_sandbox_that_is_not_installed_is_an_error_and_no_zero() -> None:
    with pytest.raises(MissingPackageError, match="apt-get install bubblewrap"):
        judged("", EVEN, level="bubblewrap")
    assert os.path.exists("/usr")
