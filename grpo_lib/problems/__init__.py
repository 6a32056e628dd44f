"""The problems that a run can train on.

To add one:

1. Write its options as a ``Section`` in ``grpo_lib/config.py``, with ``problem: Literal["yours"]``, and add it to
   ``DataConfig`` and ``DATA_SECTIONS``.
2. Write ``grpo_lib/problems/yours.py``: ``load`` (prompts and references), ``make_reward`` (judges a response) and,
   for a warm start, ``demonstrate``; end it with ``PROBLEM = Problem(...)``. `grpo_lib.types.Problem` says what each
   must do.
3. Add it to ``PROBLEMS`` below.
"""

from difflib import get_close_matches

from grpo_lib.errors import ConfigError
from grpo_lib.problems import countdown, countdown_calculator, expressions, files, gsm8k
from grpo_lib.types import Problem

PROBLEMS: dict[str, Problem] = {
    "countdown": countdown.PROBLEM,
    "countdown_calculator": countdown_calculator.PROBLEM,
    "expressions": expressions.PROBLEM,
    "gsm8k": gsm8k.PROBLEM,
    "files": files.PROBLEM,
}


def get_problem(name: str) -> Problem:
    """The problem of that name.

    Raises:
        ConfigError: there is none; the message holds the nearest names.
    """
    if name in PROBLEMS:
        return PROBLEMS[name]
    close = get_close_matches(name, PROBLEMS, n=2)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(PROBLEMS)}"
    raise ConfigError(f"data.problem={name!r}: no such problem; {hint}")
