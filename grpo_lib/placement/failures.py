"""Errors on their way from one process to another, as JSON."""

import time
import traceback
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from grpo_lib import errors
from grpo_lib.errors import GrpoError


def failure_of(error: BaseException) -> dict[str, JsonValue]:
    """What the other side needs to raise the error anew. ``error`` is the name of the class if it is one of ours."""
    ours = (each for each in type(error).__mro__ if vars(errors).get(each.__name__) is each)
    return {
        "error": next((each.__name__ for each in ours), None),
        "message": str(error),
        "summary": traceback.format_exception_only(error)[-1].strip(),
        "traceback": "".join(traceback.format_exception(error)),
        "at": time.monotonic(),  # one clock for all processes of the machine
    }


def error_class(failure: Mapping[str, Any]) -> type[GrpoError] | None:
    """Of an error of ours; None: it was another."""
    kind = vars(errors).get(failure["error"] or "")
    return kind if isinstance(kind, type) and issubclass(kind, GrpoError) else None
