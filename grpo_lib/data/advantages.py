"""Rewards of a whole iteration to the per-token advantages that the update reads."""

import pyarrow as pa
import torch

from grpo_lib.algorithms.advantages import AdvantageEstimator
from grpo_lib.data.columns import flat_column, list_array, ragged_column, same_rows
from grpo_lib.data.ragged import group_statistics, repeat_rows
from grpo_lib.data.schemas import ADVANTAGES, FLOATS, MASK
from grpo_lib.errors import RewardError


def advantage_table(
    rollouts: pa.Table, rewards: pa.Table, estimator: AdvantageEstimator
) -> tuple[pa.Table, dict[str, float]]:
    """Every token of a response gets the response's advantage where its mask is 1, else 0.

    A row whose reward is null belongs to no statistic and its mask is cleared.

    Raises:
        RewardError: no row has a reward.
    """
    same_rows(rollouts, rewards, "reward")
    values, group_ids = flat_column(rewards, "value"), flat_column(rollouts, "group_id")
    scored = ~torch.isnan(values)
    if not bool(scored.any()):
        raise RewardError(f"none of the {len(values)} rewards of the iteration could be computed; see their reasons")
    known = estimator(values[scored], group_ids[scored])
    rows = torch.zeros(len(values), dtype=torch.float64)
    rows[scored] = known
    mask = ragged_column(rollouts, "response_mask")
    kept = mask.values * repeat_rows(scored.to(torch.uint8), mask.offsets)
    tokens = repeat_rows(rows, mask.offsets) * kept
    columns = {
        "rollout_id": rollouts.column("rollout_id"),
        "advantages": list_array(mask.with_values(tokens.float()), FLOATS),
        "response_mask": list_array(mask.with_values(kept), MASK),
    }
    groups = group_statistics(values[scored], group_ids[scored])
    summary = {
        "abs_mean": float(known.abs().mean()),
        "min": float(known.min()),
        "max": float(known.max()),
        "rows_without_signal_fraction": float((groups.constant & (known == 0)).double().mean()),
        "rows_without_reward": float((~scored).sum()),
    }
    return pa.table(columns, schema=ADVANTAGES), summary
