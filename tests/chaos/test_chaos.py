"""Twenty runs of the small Countdown case on two workers, in each of which something is killed or fails.

`make chaos` plays two hundred; `SEED=17 make chaos` plays one again.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.scenario import KINDS, draw
from tests.ray_set import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SEEDS = range(len(KINDS))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[int, dict[str, Any]]:
    """By seed."""
    file = tmp_path_factory.mktemp("chaos") / "outcomes.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--seeds", str(len(SEEDS)), "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3500,
    )
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{done.stdout}")
    assert file.exists(), f"{done.stdout}{done.stderr}"[-5000:]
    return {each["scenario"]["seed"]: each for each in json.loads(Path(file).read_text())}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_ends_as_if_nothing_had_happened(seed: int, outcomes: dict[int, dict[str, Any]]) -> None:
    outcome = outcomes[seed]
    assert outcome["problems"] == [], outcome["happened"]


def test_everything_happened_in_time(outcomes: dict[int, dict[str, Any]]) -> None:
    met = {fault.kind for seed in SEEDS for fault in draw(seed).faults}
    happened = [each for outcome in outcomes.values() for each in outcome["happened"] if "(too late)" not in each]
    assert met == set(KINDS)
    assert {kind for kind in KINDS if not any(each.startswith(kind) for each in happened)} == set()
    assert sum(outcome["in_flight"] for outcome in outcomes.values()) > 0, "rollouts were lost, and made again"


def test_a_scenario_follows_from_its_seed_alone() -> None:
    assert [draw(seed) for seed in range(100)] == [draw(seed) for seed in range(100)]
    assert len({draw(seed).faults for seed in range(100)}) == 100
