"""The profile of an iteration (tests/benchmarks/profile): which call an instant counts as."""

import pytest

from tests.benchmarks.peers.cases import CASES
from tests.benchmarks.profile.run import WORK, Span, innermost, profile, shown, table, without_publish

FLOW, POOL, WORKER = (1, 1), (1, 2), (2, 1)


def span(label: str, begin: float, end: float, thread: tuple[int, int] = FLOW, cpu: float = 0.0) -> Span:
    return Span(label=label, begin=begin, end=end, thread=thread, cpu=cpu)


def test_of_calls_that_nest_the_innermost_counts() -> None:
    calls = [span("c", 2, 3), span("b", 1, 4), span("a", 0, 10), span("d", 6, 7), span("e", 20, 21)]
    assert innermost(calls) == [
        (0, 1, "a"), (1, 2, "b"), (2, 3, "c"), (3, 4, "b"), (4, 6, "a"), (6, 7, "d"), (7, 10, "a"), (20, 21, "e"),
    ]  # fmt: skip


def test_calls_that_begin_together_are_told_apart_by_their_ends() -> None:
    assert innermost([span("inner", 0, 1), span("outer", 0, 2)]) == [(0, 1, "inner"), (1, 2, "outer")]


def test_publications_do_not_count_but_other_stages_of_their_thread_do() -> None:
    calls = [
        span("look-ups", 0, 5, POOL), span("stage publish", 1, 4, POOL), span("commits", 2, 3, POOL),
        span("look-ups", 6, 9, POOL), span("stage reward", 7, 8, POOL),
    ]  # fmt: skip
    assert [each.label for each in without_publish(calls)] == ["look-ups", "stage reward"]


@pytest.mark.parametrize(
    ("flow", "others", "wanted"),
    [
        ("stage update", [], "update"),
        ("waiting", ["stage reward"], "reward"),
        ("calls of workers", ["stage rollout"], "rollout"),
        ("calls of workers", ["commits"], "commits"),
        ("calls of workers", [], "calls of workers"),
        ("waiting", ["Prefect"], "Prefect"),
        ("waiting", [], "Prefect"),
        ("Prefect", ["stage rollout"], "rollout"),  # ahead, in another thread
        ("stage advantage", [], "other stages"),
        ("commits", ["look-ups"], "commits"),
        ("flow", [], "flow"),
    ],
)
def test_an_instant_counts_as_the_stage_that_works_else_as_what_the_flow_does(
    flow: str, others: list[str], wanted: str
) -> None:
    assert shown(flow, others) == wanted


def test_the_parts_of_an_iteration_add_up_to_it_and_metrics_stand_beside() -> None:
    spans = []
    for k in range(4):
        at = 10.0 * k
        spans += [
            span("Prefect", at, at + 4), span("calls of workers", at + 1, at + 4),
            span("stage rollout", at + 1.5, at + 3.5, WORKER, 1.9),
            span("Prefect", at + 4, at + 9.5), span("stage update", at + 5, at + 9, cpu=3.5),
            span("commits", at + 8, at + 8.5),
            span("look-ups", at + 6, at + 9, POOL), span("stage publish", at + 6, at + 9, POOL, 0.25),
        ]  # fmt: skip
    found = profile(CASES["S-128"], "ray", spans)  # from the end of update 1 to that of update 3
    assert found.seconds == 10
    told = {name: round(seconds, 6) for name, seconds in found.parts.items() if seconds}
    assert told == {
        "rollout": 2.0, "update": 3.5, "commits": 0.5, "calls of workers": 1.0, "Prefect": 2.5, "flow": 0.5,
    }  # fmt: skip
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert found.outside == pytest.approx(0.45)
    assert (found.publish, found.work) == (0.25, 5.4)
    assert f"| not {', '.join(WORK)} | 45.0% |" in table([found])
