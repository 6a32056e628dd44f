"""A run's metric points by iteration, as they are published: what tables and curves for people are made of."""

from collections.abc import Iterable, Mapping
from typing import Any

from grpo_lib.config_branch import ORDER
from grpo_lib.storage.manifests import FIRST_POLICIES

COLUMNS = {
    "reward": ("reward/mean",),
    "correct": ("reward/correct_mean",),
    "accuracy": ("evaluate/sampled_accuracy", "evaluate/greedy_accuracy"),
    "entropy": ("old_logprobs/entropy", "update/entropy", "rollout/surprise"),
    "KL": ("update/kl", "advantage/kl_in_reward", "update/approx_kl"),
    "length": ("rollout/length_mean",),
    "cut": ("rollout/truncated_fraction",),
    "tokens/s": ("rollout/tokens_per_second",),
}
"""Of the table of iterations: each shows the first of these metrics that there is."""
AFTER = ("accuracy", "evaluate")
"""Columns and stages that are about the policy that the iteration made, and stand with the next iteration."""
UNTOLD = ("dataset", *FIRST_POLICIES, "reference_model", "publish")
"""Stages without a column of seconds: before the first iteration, or beside them all."""


class History:
    """Values by metric and iteration. What is added again takes the place of what was there."""

    def __init__(self) -> None:
        self._values: dict[str, dict[int, float]] = {}

    def add(self, points: Iterable[Mapping[str, Any]]) -> None:
        """Metric points: name, value, iteration."""
        for each in points:
            self._values.setdefault(each["name"], {})[each["iteration"]] = each["value"]

    def curve(self, *names: str) -> list[tuple[int, float]]:
        """Iterations and values of the first of these metrics that there is."""
        for name in names:
            if name in self._values:
                return sorted(self._values[name].items())
        return []

    @property
    def done(self) -> int:
        """Iterations whose update is there."""
        return len(self._values.get("update/policy_version", {}))

    def rows(self, count: int) -> list[dict[str, float | int | None]]:
        """The last ``count`` iterations, newest first, with the seconds of their stages; no column is empty.

        The accuracy is that of the policy that the iteration made.
        """
        iterations = sorted(self._values.get("update/policy_version", {}), reverse=True)[:count]
        stages = [stage for stage in ORDER if stage not in UNTOLD]
        rows = [self._row(k, stages) for k in iterations]
        empty = {name for name in (rows[0] if rows else ()) if all(row[name] is None for row in rows)}
        return [{name: value for name, value in row.items() if name not in empty} for row in rows]

    def _row(self, k: int, stages: list[str]) -> dict[str, float | int | None]:
        row: dict[str, float | int | None] = {"iteration": k}
        for column, names in COLUMNS.items():
            found = next((name for name in names if name in self._values), "")
            row[column] = _short(self._at(found, column, k))
        seconds = {stage: self._at(f"seconds/{stage}", stage, k) for stage in stages}
        return row | {f"{stage} s": None if each is None else round(each, 3) for stage, each in seconds.items()}

    def _at(self, name: str, column: str, k: int) -> float | None:
        return self._values.get(name, {}).get(k + 1 if column in AFTER else k)


def _short(value: float | None) -> float | None:
    """To four digits, and no finer than a millionth.

    >>> [_short(0.123456), _short(12345.6), _short(-1.247e-8), _short(None)]
    [0.1235, 12346.0, 0.0, None]
    """
    if value is None:
        return None
    return round(value) + 0.0 if abs(value) >= 1000 else round(float(f"{value:.4g}"), 6) + 0.0
