"""What people read of a run that goes on: table, curves, rollouts; whatever a model writes stays text."""

import base64
import xml.etree.ElementTree as ElementTree
from typing import Any

import pyarrow as pa
import pytest

from grpo_lib.data import queries
from grpo_lib.tracking.chart import charts, data_uri, thinned
from grpo_lib.tracking.history import History
from grpo_lib.tracking.pages import code, curves_page, fenced, links_page, plain, rollouts_page

NASTY = "```\n<script>alert(1)</script> ![x](http://evil/x.png) | *b*\n````js\n"


def points(iteration: int, **values: float) -> list[dict[str, Any]]:
    return [{"name": name.replace("__", "/"), "value": value, "iteration": iteration} for name, value in values.items()]


@pytest.fixture
def history() -> History:
    made = History()
    for k in range(3):
        numbers = {"reward__mean": 0.25 * k, "rollout__length_mean": 10.0 + k, "rollout__tokens_per_second": 12345.6}
        made.add(
            points(k, update__policy_version=k + 1.0, update__approx_kl=0.001234567, seconds__update=1.5, **numbers)
        )
    made.add(points(0, seconds__warm_start=90.0, seconds__evaluate=5.0, evaluate__sampled_accuracy=0.125))
    made.add(points(2, seconds__evaluate=6.0, evaluate__sampled_accuracy=0.5))
    return made


def test_the_table_has_the_newest_iterations_first_with_the_accuracy_that_they_led_to(history: History) -> None:
    newest, middle = history.rows(2)
    assert newest == {
        "iteration": 2, "reward": 0.5, "accuracy": None, "KL": 0.001235, "length": 12.0, "tokens/s": 12346.0,
        "update s": 1.5, "evaluate s": None,
    }  # fmt: skip
    assert (middle["iteration"], middle["accuracy"], middle["evaluate s"]) == (1, 0.5, 6.0)
    assert "warm_start s" not in middle and "entropy" not in middle, "no column of which nothing is known"
    assert [row["iteration"] for row in history.rows(99)] == [2, 1, 0] and history.done == 3


def test_a_point_that_is_added_again_takes_the_place_of_the_first(history: History) -> None:
    history.add(points(1, reward__mean=9.0))
    assert history.curve("nothing", "reward/mean") == [(0, 0.0), (1, 9.0), (2, 0.5)]


def test_an_empty_history_has_no_rows_and_no_lines() -> None:
    assert History().rows(10) == [] and History().curve("reward/mean") == []
    assert "<polyline" not in svg_of(curves_page(History(), "new"))


def svg_of(page: str) -> str:
    return base64.b64decode(page.partition("base64,")[2].partition(")")[0]).decode()


def test_a_chart_is_well_formed_and_puts_points_where_they_belong() -> None:
    drawn = charts({"A & <b>": {"x": [(0, 0.0), (10, 1.0)]}, "empty": {"y": []}})
    ElementTree.fromstring(drawn)
    assert "A &amp; &lt;b&gt;" in drawn and "empty" not in drawn
    assert 'points="48.0,192.0 368.0,30.0"' in drawn, "lower left to upper right"


def test_a_chart_of_one_point_or_equal_values_is_drawn_in_the_middle() -> None:
    drawn = charts({"one": {"x": [(5, 2.0)]}})
    ElementTree.fromstring(drawn)
    assert 'cx="208.0" cy="111.0"' in drawn


def test_a_long_curve_costs_no_more_than_a_short_one() -> None:
    long = [(float(k), float(k % 2)) for k in range(100_000)]
    assert len(thinned(long)) == 200 and thinned(long)[0] == (249.5, 0.5)
    assert len(data_uri(charts({"long": {"x": long}}))) < 6000


def test_what_a_model_wrote_stays_in_its_block() -> None:
    block = fenced(NASTY)
    fence = block.splitlines()[0].removesuffix("text")
    assert fence == "`````" and block.splitlines()[-1] == fence
    assert block.count(fence) == 2, "nothing inside ends it"
    assert code("a `b` \n c") == "``a `b` c``"
    assert plain("<img src=x> [a](b)") == r"\<img src=x\> \[a\]\(b\)"


def test_a_page_of_rollouts_shows_reward_and_advantage_and_cuts_what_is_long() -> None:
    row = {
        "rollout_id": "7-0-1", "value": 0.5, "advantage": -1.25, "tokens": 12, "finish_reason": "stop",
        "reference": "42 `x`", "prompt": "How much?", "text": "y" * 5000,
    }  # fmt: skip
    page = rollouts_page({"best": row, "worst": row | {"advantage": None, "text": NASTY}}, 7)
    assert "## best: reward 0.500, advantage -1.250" in page and "## worst: reward 0.500\n" in page
    assert "reference `` 42 `x` ``" in page and "[... 3,800 characters left out ...]" in page
    assert len(page) < 2500


def test_only_web_addresses_become_links() -> None:
    page = links_page({"store": "/data/`x`", "MLflow": "http://host/#/runs/1", "bad": "javascript:alert(1)"})
    assert page.splitlines() == [
        "- store: `` /data/`x` ``", "- [MLflow](http://host/#/runs/1)", "- bad: `javascript:alert(1)`",
    ]  # fmt: skip


def test_the_best_the_median_and_the_worst_rollout_are_found_by_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [0.25, None, 1.0, 0.5, 0.0]
    ids = [f"0-0-{n}" for n in range(5)]
    tables = {
        "prompts": pa.table({"prompt": ["p"], "reference": ["r"], "data_source": ["s"]}),
        "rollout": pa.table({
            "rollout_id": ids, "prompt_row": pa.array([0] * 5, pa.int32()), "text": ids, "finish_reason": ["stop"] * 5,
            "response_ids": [[1, 2]] * 5, "rollout_logprobs": [[-1.0, -1.0]] * 5, "response_mask": [[1, 1]] * 5,
            "policy_version": [0] * 5,
        }),
        "reward": pa.table({
            "rollout_id": ids, "value": pa.array(values, pa.float64()), "reason": [None] * 5,
            "components": pa.array([[]] * 5, pa.map_(pa.string(), pa.float64())),
        }),
        "advantage": None,
    }  # fmt: skip
    monkeypatch.setattr(queries, "_table", lambda stages, iteration, stage: tables[stage])
    found = queries.telling_rollouts(None, 0)  # type: ignore[arg-type]
    assert {name: row["value"] for name, row in found.items()} == {"best": 1.0, "median": 0.5, "worst": 0.0}
    assert found["best"]["advantage"] is None and found["best"]["tokens"] == 2
