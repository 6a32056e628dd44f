"""Responses to learn from in the warm start."""

from typing import Any

import pyarrow as pa

from grpo_lib.errors import ConfigError
from grpo_lib.types import Problem


def demonstrations(problem: Problem, options: Any, train: pa.Table, seed: int) -> list[str]:
    """One response for each row of ``train``: from the problem's generator.

    Raises:
        ConfigError: the problem has none.
    """
    if problem.demonstrate is None:
        raise ConfigError(
            f"the problem {problem.name!r} has no demonstrations for a warm start; set model.path to a pretrained model"
        )
    return problem.demonstrate(options, train, seed)
