"""Which tokenizer a run uses."""

from typing import Any

from grpo_lib.models import load_tokenizer, make_tokenizer
from grpo_lib.types import Problem


def run_tokenizer(model_path: str | None, problem: Problem) -> Any:
    """The pretrained model's, or the small one made for the problem."""
    if model_path is not None:
        return load_tokenizer(model_path)
    return make_tokenizer(problem.tags, problem.alphabet)
