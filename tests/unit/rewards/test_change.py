"""The change from one reward to another, compared with numbers worked out by hand."""

from typing import Any

import pyarrow as pa
import pytest

from grpo_lib.rewards.change import change, histogram, reasons
from grpo_lib.rewards.rescore import RESCORED, parts


def rows(*values: tuple[Any, ...]) -> pa.Table:
    """Of (iteration, group, old value, new value, old right, new right), and the data source if it is not 'd'."""
    names = ("iteration", "group_id", "old_value", "new_value", "old_right", "new_right")
    made = []
    for number, each in enumerate(values):
        row = dict(zip(names, each, strict=False)) | {"rollout_id": str(number), "policy_version": 0, "judged": True}
        row |= {"data_source": each[6] if len(each) > 6 else "d", "components": []}
        row |= {f"{name}_reason": "ValueError: no" if row[f"{name}_value"] is None else None for name in ("old", "new")}
        made.append(row)
    return pa.Table.from_pylist(made, schema=RESCORED)


FOUR = rows(
    (0, 0, 0.0, 1.0, False, True),
    (0, 0, 1.0, 1.0, True, True),
    (0, 1, 1.0, 0.0, True, False),
    (0, 1, 0.0, 0.0, False, False),
)


def test_means_deviations_and_agreement() -> None:
    found = change(FOUR)
    assert (found.rollouts, found.groups, found.compared) == (4, 2, 4)
    assert (found.old.mean, found.old.std, found.old.min, found.old.max) == (0.5, 0.5, 0.0, 1.0)
    assert (found.new.mean, found.new.std) == (0.5, 0.5)
    assert (found.equal_fraction, found.mean_change, found.correlation) == (0.5, 0.0, 0.0)
    assert (found.both_right, found.only_old_right, found.only_new_right, found.neither_right) == (1, 1, 1, 1)
    assert found.old.right_fraction == found.new.right_fraction == 0.5


def test_groups_that_teach_something_are_those_whose_values_differ() -> None:
    assert (change(FOUR).old.groups_with_signal, change(FOUR).new.groups_with_signal) == (2, 0)


def test_groups_of_two_iterations_are_two() -> None:
    found = change(rows((0, 0, 0.0, 1.0, False, True), (1, 0, 1.0, 1.0, True, True)))
    assert (found.groups, found.old.groups_with_signal) == (2, 0)


def test_the_correlation_is_pearson_s() -> None:
    found = change(rows(*((0, k, old, new, False, False) for k, (old, new) in enumerate([(1, 2), (2, 1), (3, 6)]))))
    # covariance (1*1 + 0 + 1*3) / 3 = 4/3 about the means 2 and 3; deviations sqrt(2/3) and sqrt(14/3)
    assert found.correlation == pytest.approx((4 / 3) / ((2 / 3) ** 0.5 * (14 / 3) ** 0.5))
    assert found.mean_change == pytest.approx(1.0)


def test_a_constant_reward_has_no_correlation() -> None:
    assert change(rows((0, 0, 1.0, 0.0, True, False), (0, 1, 1.0, 1.0, True, True))).correlation is None


def test_what_has_no_value_is_in_no_mean_and_counted_with_its_reason() -> None:
    table = rows((0, 0, None, 1.0, None, True), (0, 0, 0.5, None, False, None), (0, 0, 0.5, 0.5, False, False))
    found = change(table)
    assert (found.old.scored, found.old.null, found.new.scored, found.new.null) == (2, 1, 2, 1)
    assert (found.old.mean, found.new.mean, found.compared, found.equal_fraction) == (0.5, 0.75, 1, 1.0)
    assert (found.neither_right, found.only_new_right) == (1, 0), "of the row with both values"
    assert reasons(table, "old") == reasons(table, "new") == {"ValueError: no": 1}


def test_nothing_scored_is_no_number_and_no_error() -> None:
    found = change(rows((0, 0, None, None, None, None)))
    assert (found.new.mean, found.new.std, found.equal_fraction, found.correlation) == (None, None, None, None)
    bins = histogram(rows((0, 0, None, None, None, None)))
    assert (bins.labels, bins.old, bins.new) == ([], [], [])


def test_few_different_values_have_a_bin_each() -> None:
    found = histogram(FOUR)
    assert (found.labels, found.old, found.new) == (["0", "1"], [2, 2], [2, 2])


def test_many_different_values_are_counted_in_even_bins_with_the_last_one_in() -> None:
    table = rows(*((0, k, float(k), float(k) / 2, False, False) for k in range(11)))
    found = histogram(table, bins=5)
    assert found.labels[0] == "0 to 2" and len(found.labels) == 5
    assert found.old == [2, 2, 2, 2, 3]  # 0 1 | 2 3 | 4 5 | 6 7 | 8 9 10
    assert found.new == [4, 4, 3, 0, 0]  # 0 0.5 1 1.5 | 2 2.5 3 3.5 | 4 4.5 5


def test_reports_are_of_all_of_each_iteration_and_of_each_source() -> None:
    table = rows(
        (2, 0, 0.0, 1.0, False, True, "b"), (10, 0, 0.0, 1.0, False, True, "a"), (10, 1, 1.0, 1.0, True, True, "b")
    )  # fmt: skip
    found = [(kind, name, each.num_rows) for kind, name, each in parts(table)]
    assert found == [
        ("all", "all", 3), ("iteration", "2", 1), ("iteration", "10", 2), ("data_source", "a", 1),
        ("data_source", "b", 2),
    ]  # fmt: skip
