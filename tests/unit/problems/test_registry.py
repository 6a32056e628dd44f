import subprocess
import sys

import pytest

from grpo_lib.errors import ConfigError
from grpo_lib.problems import PROBLEMS, get_problem


def test_every_problem_is_found_under_its_own_name() -> None:
    assert list(PROBLEMS) == ["countdown", "countdown_calculator", "expressions", "gsm8k", "files"]
    for name, problem in PROBLEMS.items():
        assert problem.name == name
        assert get_problem(name) is problem


def test_an_unknown_name_gets_the_nearest_ones() -> None:
    with pytest.raises(ConfigError, match=r"data\.problem='countdwn': no such problem; did you mean countdown"):
        get_problem("countdwn")
    with pytest.raises(ConfigError, match="there are countdown, countdown_calculator, expressions, gsm8k, files"):
        get_problem("zzz")


def test_problems_and_rewards_need_no_torch() -> None:
    code = "import sys, grpo_lib.problems, grpo_lib.rewards.runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
