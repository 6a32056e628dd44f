"""Transformers, PyTorch and MLflow import what else they find installed, used or not: here they find less of it.

A run from the command line is some 80 MiB smaller for that, and 150 MiB with the files that it maps. What is hidden for
a moment can be imported by anybody afterwards; the three themselves go on as if it were not there: no assisted decoding
by scikit-learn in Transformers, no Polars data sets in MLflow, no compiled kernels by Triton where there is no GPU.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Inside, imports of those of the packages that are not imported yet fail as if they were not installed."""
    absent = [each for each in packages if each not in sys.modules]
    for each in absent:
        sys.modules[each] = None  # type: ignore[assignment]  # Python's way to say that there is none
    try:
        yield
    finally:
        for each in absent:
            sys.modules.pop(each, None)


def import_lean() -> None:
    """Imports the three, before anybody else does; takes seconds."""
    with hidden("polars"):
        import mlflow.tracking  # noqa: F401
    import torch

    with hidden("sklearn", *([] if torch.cuda.is_available() else ["triton"])):
        import torch._dynamo
        import torch.utils.flop_counter
        import transformers.generation.utils
        import transformers.modeling_utils  # noqa: F401
