"""Two rewards of the same rollouts in numbers: distributions, agreement, and what groups would teach."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

BINS = 20


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Of one reward over some rollouts."""

    scored: int
    """Rollouts with a value."""
    null: int
    mean: float | None
    """None: no rollout has a value."""
    std: float | None
    """Of the population."""
    min: float | None
    max: float | None
    right_fraction: float | None
    groups_with_signal: int
    """Groups whose values are not all equal: the others have advantage 0."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """The old and the new reward of some rollouts."""

    rollouts: int
    groups: int
    old: Distribution
    new: Distribution
    compared: int
    """Rollouts with both values; what follows is of those."""
    equal_fraction: float | None
    mean_change: float | None
    correlation: float | None
    """Pearson's; None: one of the two is constant."""
    both_right: int
    only_old_right: int
    only_new_right: int
    neither_right: int


def change(rows: pa.Table) -> Change:
    """Of rows as `rescore` gives them."""
    old, new = (rows.column(name).to_numpy() for name in ("old_value", "new_value"))  # null: NaN
    groups = _groups(rows)
    both = ~np.isnan(old) & ~np.isnan(new)
    was, now = (_flags(rows, name)[both] for name in ("old_right", "new_right"))
    a, b = old[both], new[both]
    varies = len(a) > 1 and a.std() > 0 and b.std() > 0
    return Change(
        rollouts=rows.num_rows,
        groups=int(groups.max()) + 1 if len(groups) else 0,
        old=_distribution(old, _flags(rows, "old_right"), groups),
        new=_distribution(new, _flags(rows, "new_right"), groups),
        compared=len(a),
        equal_fraction=float((a == b).mean()) if len(a) else None,
        mean_change=float((b - a).mean()) if len(a) else None,
        correlation=float(np.corrcoef(a, b)[0, 1]) if varies else None,
        both_right=int((was & now).sum()),
        only_old_right=int((was & ~now).sum()),
        only_new_right=int((~was & now).sum()),
        neither_right=int((~was & ~now).sum()),
    )


def reasons(rows: pa.Table, which: str) -> dict[str, int]:
    """Why values are null, the commonest first. ``which``: old or new."""
    if which == "old":
        rows = rows.filter(rows.column("judged"))
    found = Counter(each for each in rows.column(f"{which}_reason").to_pylist() if each is not None)
    return dict(found.most_common())


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Counts of both rewards in the same bins."""

    labels: list[str]
    """A value, or a range with its upper edge left out but for the last."""
    old: list[int]
    new: list[int]


def histogram(rows: pa.Table, bins: int = BINS) -> Histogram:
    """Of all values; a bin of its own for each value where there are few different ones."""
    old, new = (rows.column(name).drop_null().to_numpy() for name in ("old_value", "new_value"))
    values = np.unique(np.concatenate([old, new]))
    if len(values) <= bins:
        labels = [f"{value:g}" for value in values]
        counts = [np.searchsorted(values, each) for each in (old, new)]
        return Histogram(labels=labels, **_named([np.bincount(each, minlength=len(values)) for each in counts]))
    edges = np.linspace(values[0], values[-1], bins + 1)
    labels = [f"{low:.3g} to {high:.3g}" for low, high in pairwise(edges)]
    return Histogram(labels=labels, **_named([np.histogram(each, edges)[0] for each in (old, new)]))


def _named(counts: list[np.ndarray]) -> dict[str, list[int]]:
    return {"old": counts[0].tolist(), "new": counts[1].tolist()}


def _distribution(values: np.ndarray, right: np.ndarray, groups: np.ndarray) -> Distribution:
    known = ~np.isnan(values)
    found = values[known]
    some = len(found) > 0
    lowest = np.full(int(groups.max()) + 1 if len(groups) else 0, np.inf)
    highest = -lowest
    np.minimum.at(lowest, groups[known], found)
    np.maximum.at(highest, groups[known], found)
    return Distribution(
        scored=len(found),
        null=len(values) - len(found),
        mean=float(found.mean()) if some else None,
        std=float(found.std()) if some else None,
        min=float(found.min()) if some else None,
        max=float(found.max()) if some else None,
        right_fraction=float(right[known].mean()) if some else None,
        groups_with_signal=int((highest > lowest).sum()),
    )


def _groups(rows: pa.Table) -> np.ndarray:
    """Group of each row, counted from 0; groups of two iterations are two."""
    keys = np.stack([rows.column(name).to_numpy().astype(np.int64) for name in ("iteration", "group_id")], axis=1)
    return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)


def _flags(rows: pa.Table, name: str) -> np.ndarray:
    return pc.fill_null(rows.column(name), False).to_numpy().astype(bool)
