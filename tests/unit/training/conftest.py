"""Tiny models and sequences as fixtures."""

from collections.abc import Callable
from typing import Any

import pytest

from grpo_lib.training.microbatches import Sequences
from tests.tiny_models import random_sequences, tiny_model


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """Makes a model by the name of its architecture; the same weights each time."""
    return tiny_model


@pytest.fixture(scope="session")
def make_sequences() -> Callable[[int, int], Sequences]:
    """Random prompts (1 to 6 tokens) and responses (1 to 12) by seed; the first response has one token."""
    return random_sequences
