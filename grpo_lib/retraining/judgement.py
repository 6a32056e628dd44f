"""Champion against challenger on the same held-out prompts, and the rule that says which is to be in use."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from grpo_lib.algorithms.paired import paired_test
from grpo_lib.config_retrain import PromotionConfig
from grpo_lib.errors import DataError, RewardError
from grpo_lib.retraining.records import Comparison, Row
from grpo_lib.storage.manifests import Manifest


@dataclass(frozen=True, kw_only=True)
class Accuracies:
    """Of both on the prompts that could be judged, in the same order."""

    sources: NDArray[np.str_]
    champion: NDArray[np.float64]
    challenger: NDArray[np.float64]
    left_out: int


def compare(
    champion: tuple[Manifest, pa.Table],
    challenger: tuple[Manifest, pa.Table],
    rule: PromotionConfig,
    *,
    max_failed: float,
    seed: int,
) -> Comparison:
    """Both evaluations prompt by prompt, overall and by source.

    Args:
        max_failed: fraction of the prompts that may be left out because no sample of one of them could be judged.

    Raises:
        RewardError: more are.
        DataError: the prompts differ.
    """
    found = accuracies(champion[1], challenger[1], rule.mode)
    count = len(found.sources) + found.left_out
    if not len(found.sources) or found.left_out > max_failed * count:
        raise RewardError(
            f"{found.left_out} of {count} held-out prompts could not be judged, reward.max_failed={max_failed:g} "
            f"allows {max_failed:.1%}; mend the reward function and retrain again"
        )
    names = sorted(set(found.sources.tolist()))
    return Comparison(
        mode=rule.mode,
        left_out=found.left_out,
        all=_row(found, np.ones(len(found.sources), dtype=bool), rule, seed),
        sources={name: _row(found, found.sources == name, rule, seed) for name in names},
        champion=champion[0].path,
        challenger=challenger[0].path,
        digests=[champion[0].digest, challenger[0].digest],
    )


def accuracies(champion: pa.Table, challenger: pa.Table, mode: str) -> Accuracies:
    """Fractions of right samples by prompt.

    Raises:
        DataError: the two were not asked the same prompts.
    """
    before, after = _by_prompt(champion, mode), _by_prompt(challenger, mode)
    if before.keys() != after.keys():
        raise DataError(
            f"champion and challenger were evaluated on different prompts ({len(before.keys() ^ after.keys())} of them "
            "on one side only); retrain again"
        )
    both = [name for name in sorted(before) if before[name][1] is not None and after[name][1] is not None]
    return Accuracies(
        sources=np.array([before[name][0] for name in both]),
        champion=np.array([before[name][1] for name in both], dtype=np.float64),
        challenger=np.array([after[name][1] for name in both], dtype=np.float64),
        left_out=len(before) - len(both),
    )


def _by_prompt(table: pa.Table, mode: str) -> dict[str, tuple[str, float | None]]:
    """Source and accuracy; None: no sample could be judged."""
    rows = table.filter(pc.equal(table.column("mode"), mode))
    rows = rows.append_column("right", rows.column("correct").cast(pa.float64()))
    means = rows.group_by(["prompt_id", "data_source"], use_threads=False).aggregate([("right", "mean")])
    return {each["prompt_id"]: (each["data_source"], each["right_mean"]) for each in means.to_pylist()}


def _row(found: Accuracies, chosen: NDArray[np.bool_], rule: PromotionConfig, seed: int) -> Row:
    before, after = found.champion[chosen], found.challenger[chosen]
    test = paired_test(after - before, confidence=rule.confidence, seed=seed)
    return Row(
        prompts=test.count,
        champion=float(before.mean()),
        challenger=float(after.mean()),
        gain=test.mean,
        low=test.low,
        high=test.high,
        p_better=test.p_greater,
        p_worse=test.p_less,
    )


def objections(comparison: Comparison, rule: PromotionConfig) -> list[str]:
    """What speaks against a promotion; nothing: the rule holds.

    A source's loss counts when it is larger than the tolerance, whatever the test says, and when the test says that it
    is real, whatever its size: to refuse costs a round, to promote a regression costs those who use the model.
    """
    row = comparison.all
    found = []
    if row.gain < rule.min_gain or row.gain <= 0:
        found.append(f"gain {row.gain:+.4f} is below promotion.min_gain={rule.min_gain:g}")
    if row.p_better > rule.level:
        found.append(f"p={row.p_better:.4f} of the gain is above promotion.level={rule.level:g}")
    for name, each in comparison.sources.items():
        if -each.gain > rule.max_regression:
            found.append(f"source {name} loses {-each.gain:.4f}, more than promotion.max_regression="
                         f"{rule.max_regression:g}")  # fmt: skip
        elif each.gain < 0 and each.p_worse <= rule.level:
            found.append(f"source {name} loses {-each.gain:.4f}, which is significant (p={each.p_worse:.4f})")
    return found


def as_markdown(comparison: Comparison) -> str:
    """The comparison as a table."""
    lines = [
        f"| {comparison.mode} accuracy | prompts | champion | challenger | gain | interval | p better | p worse |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in {"all": comparison.all, **comparison.sources}.items():
        lines.append(
            f"| {name.replace('|', '/')} | {row.prompts} | {row.champion:.3f} | {row.challenger:.3f} | {row.gain:+.3f} "
            f"| {row.low:+.3f} .. {row.high:+.3f} | {row.p_better:.4f} | {row.p_worse:.4f} |"
        )
    return "\n".join(lines)
