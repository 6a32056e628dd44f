"""What the puzzles made on the spot share: a pool of unique ones in two splits, and responses in one format.

A response is one think block and one answer block: ``<think>...</think><answer>30-12+7</answer>``.
"""

import re
from collections.abc import Callable, Hashable
from typing import TypeVar

import pyarrow as pa

from grpo_lib.config_reward import RewardConfig
from grpo_lib.errors import DataError
from grpo_lib.types import RewardResult

RESPONSE_TAGS = ("<think>", "</think>", "<answer>", "</answer>")

PROMPT_SCHEMA = pa.schema([(name, pa.string()) for name in ("prompt_id", "prompt", "reference", "data_source")])

Item = TypeVar("Item", bound=Hashable)

_RESPONSE = re.compile(r"\s*<think>.*</think>\s*<answer>(?P<answer>.*)</answer>\s*", re.DOTALL)


def collect_unique(draw: Callable[[], Item | None], count: int, remedy: str) -> tuple[Item, ...]:
    """Draws until ``count`` different puzzles are found; ``None`` from ``draw`` is a miss.

    Raises:
        DataError: nothing new came for 10,000 draws and ten more for each puzzle found.
    """
    found: dict[Item, None] = {}
    misses = 0
    while len(found) < count:
        puzzle = draw()
        if puzzle is not None and puzzle not in found:
            found[puzzle] = None
            misses = 0
        else:
            misses += 1
            if misses > 10_000 + 10 * len(found):
                raise DataError(
                    f"{count} unique puzzles are asked for, and only {len(found)} could be found "
                    f"(then {misses} draws gave no new one): {remedy}"
                )
    return tuple(found)


def split_rows(split: str, heldout: int) -> slice:
    """Where a split stands in a list whose first ``heldout`` entries are held out."""
    if split == "heldout":
        return slice(None, heldout)
    if split == "train":
        return slice(heldout, None)
    raise DataError(f"there is no split {split!r}: use train or heldout")


def answer_of(response: str) -> str | None:
    """What stands in the answer block; ``None`` unless the response is one think and one answer block.

    >>> answer_of("<think>...</think><answer>30-12+7</answer>")
    '30-12+7'
    >>> answer_of("<answer>30-12+7</answer>") is None
    True
    """
    if any(response.count(tag) != 1 for tag in RESPONSE_TAGS):
        return None
    match = _RESPONSE.fullmatch(response)
    return match["answer"] if match else None


def graded(reward: RewardConfig, *, well_formed: bool, correct: bool, answer: str | None = None) -> RewardResult:
    """The reward of an answer: right, wrong in the right format, or neither."""
    value = reward.correct if correct else reward.format_only if well_formed else 0.0
    return RewardResult(
        value=value, components={"correct": float(correct), "format": float(well_formed)}, answer=answer
    )
