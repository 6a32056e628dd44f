"""A run that is killed anywhere and resumed ends like one that was not, to the bit, and repeats no paid work."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

POINTS = [
    "begin:dataset:setup",
    "parts:warm_start:setup",
    "begin:evaluate:0",
    "begin:prompts:1",
    "parts:rollout:1",
    "done:rollout:1",
    "begin:reward:1",
    "parts:old_logprobs:1",
    "begin:ref_logprobs:1",
    "begin:advantage:1",
    "parts:update:1",
    "done:update:1",
    "begin:publish:1",
    "parts:publish:1",
    "parts:checkpoint:1",
    "parts:evaluate:2",
    "parts:update:3",
]
PAID = ("rollout", "reward", "old_logprobs", "ref_logprobs", "update", "warm_start", "checkpoint")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, prefect_server: dict[str, str]) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("crashes")
    done = subprocess.run(
        [sys.executable, "-m", "tests.flows.crashes", str(folder), "none", *POINTS],
        cwd=Path(__file__).parents[2],
        env=os.environ | prefect_server,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {each["point"]: each for each in json.loads(done.stdout.splitlines()[-1])}


def published(outcome: dict[str, Any]) -> list[str]:
    return sorted(path.split("/publish/")[0] for path in outcome["after"] if "/publish/" in path)


def by_place(outcome: dict[str, Any]) -> dict[str, str]:
    """Content digests; but for `publish`, whose metrics are seconds as well, and which so differs in every run."""
    return {path: digest for path, (_, digest) in outcome["after"].items() if "/publish/" not in path}


def test_the_undisturbed_run_commits_every_stage(outcomes: dict[str, Any]) -> None:
    paths = outcomes["none"]["after"]
    assert outcomes["none"]["first_exit"] == 0
    stages = {path.split("/")[-3] for path in paths}
    assert stages == {
        "dataset", "warm_start", "prompts", "rollout", "reward", "old_logprobs", "ref_logprobs", "advantage", "update",
        "checkpoint", "evaluate", "publish",
    }  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_here_and_resumed_ends_like_an_undisturbed_one(point: str, outcomes: dict[str, Any]) -> None:
    outcome, undisturbed = outcomes[point], outcomes["none"]
    assert outcome["killed_by"] == 9, "the run was not killed: the point was never reached"
    assert outcome["resumed_exit"] == 0, Path(outcome["store"] + ".log").read_text()[-3000:]

    assert published(outcome) == published(undisturbed)

    # The same artifacts with the same content, bit for bit: weights included, by their digest and checkpoint files.
    assert by_place(outcome) == by_place(undisturbed)

    # What was committed before the kill is still there, untouched: nothing was computed twice.
    assert outcome["before"].items() <= outcome["after"].items()

    # Nothing that was committed is tried again, and of the rest at most what was in flight has an attempt that is lost.
    for path, started in outcome["attempts_before"].items():
        assert outcome["attempts_after"][path] == started, f"{path} was tried again after it was committed"
    paid = [path for path in outcome["after"] if path.split("/")[-3] in PAID]
    lost = [path for path in paid if len(outcome["attempts_after"][path]) > 1]
    log = Path(outcome["store"] + ".log").read_text()[-3000:]
    assert len(lost) <= (2 if "logprobs" in point or "reward" in point else 1), f"{lost}\n{log}"


@pytest.mark.parametrize("point", ["none", *POINTS])
def test_every_metric_point_is_in_mlflow_once(point: str, outcomes: dict[str, Any]) -> None:
    with sqlite3.connect(Path(outcomes[point]["store"]) / "mlflow.db") as database:
        doubled = database.execute(
            "select key, step, count(*) from metrics group by run_uuid, key, step having count(*) > 1"
        ).fetchall()
        points = database.execute("select count(distinct key || ':' || step) from metrics").fetchone()[0]
        runs = database.execute("select count(*) from runs").fetchone()[0]
    with sqlite3.connect(Path(outcomes["none"]["store"]) / "mlflow.db") as database:
        expected = database.execute("select count(distinct key || ':' || step) from metrics").fetchone()[0]
    assert doubled == []
    assert points == expected > 100
    assert runs == 1
