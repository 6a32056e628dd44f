"""The commands as people type them, with the embedded Prefect server: run, kill -9, resume, look."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli.main import app
from tests.flows.tiny import TINY

GRPO = [sys.executable, "-m", "flows.cli.main"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    config = TINY | {"iterations": 30, "store": {"uri": str(folder / "store")}, "checkpoint": {"every": 7}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(scope="module")
def resumed(place: Path) -> dict[str, object]:
    """A run that was killed half-way and resumed, by the real command."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment["PREFECT_HOME"] = str(place / "prefect")
    log = (place / "run.log").open("wb")
    run = subprocess.Popen([*GRPO, "run", str(place / "tiny.yaml")], env=environment, stdout=log, stderr=log)
    reached = place / "store" / "runs" / "tiny" / "iterations" / "000010" / "reward"
    deadline = time.monotonic() + 200
    while not reached.exists() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    servers = children(run.pid)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert reached.exists(), (place / "run.log").read_text()[-3000:]
    done = subprocess.run(
        [*GRPO, "resume", "tiny", "--store", str(place / "store"), "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout) | {"servers": servers}


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


def grpo(place: Path, *words: str) -> str:
    result = CliRunner().invoke(app, [*words, "--store", str(place / "store")])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_killed_run_is_resumed_to_its_end(resumed: dict[str, object], place: Path) -> None:
    assert resumed["iterations"] == 30
    shown = json.loads(grpo(place, "show", "tiny", "--json"))
    assert shown["iterations_done"] == 30
    counts = {each["stage"]: each["artifacts"] for each in shown["stages"]}
    assert counts["rollout"] == counts["reward"] == 60 and counts["update"] == 30


def test_the_embedded_prefect_server_ends_with_a_killed_run(resumed: dict[str, object]) -> None:
    servers = resumed["servers"]
    assert isinstance(servers, list) and servers, "the run had a server"
    alive = [pid for pid in servers if Path(f"/proc/{pid}").exists()]
    assert alive == []


@pytest.mark.usefixtures("resumed")
def test_show_lists_runs_stages_and_an_iteration(place: Path) -> None:
    assert grpo(place, "show").split() == ["tiny"]
    assert "outside stage bodies" in grpo(place, "show", "tiny")
    stages = json.loads(grpo(place, "show", "tiny", "-k", "3", "--json"))
    assert {each["stage"] for each in stages} >= {"prompts", "rollout", "reward", "advantage", "update"}
    assert all(Path(each["folder"]).is_dir() for each in stages)


@pytest.mark.usefixtures("resumed")
def test_rollouts_are_found_by_sql(place: Path) -> None:
    everything = json.loads(grpo(place, "rollouts", "tiny", "-k", "7", "--limit", "100", "--json"))
    assert len(everything) == 8
    assert all(each["value"] is not None and each["advantage"] is not None for each in everything)
    long = json.loads(
        grpo(place, "rollouts", "tiny", "-k", "7", "--where", "tokens = 12 and finish_reason = 'length'", "--json")
    )
    assert len(long) > 0 and {each["tokens"] for each in long} == {12}
    assert "reward" in grpo(place, "rollouts", "tiny", "-k", "7")


def test_evaluate_with_other_settings_judges_the_same_policy(resumed: dict[str, object], place: Path) -> None:
    environment = os.environ | {"PREFECT_HOME": str(place / "prefect")}
    command = [*GRPO, "evaluate", "tiny", "evaluation.samples=3", "evaluation.pass_k=[1,3]", "-k", "16", "--json"]
    done = subprocess.run(
        [*command, "--store", str(place / "store")], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["policy_version"] == 16
    assert {"pass_at_1", "pass_at_3", "greedy_accuracy", "sampled_accuracy_se"} <= summary.keys()


@pytest.mark.slow
def test_a_branch_is_made_trained_and_resumed_by_the_commands(resumed: dict[str, object], place: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment["PREFECT_HOME"] = str(place / "prefect")

    def command(*words: str) -> dict[str, object]:
        done = subprocess.run(
            [*GRPO, *words, "--store", str(place / "store"), "--json"],
            env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    made = command("rerun", "tiny", "-k", "27", "--from", "update", "trainer.optimizer.lr=2e-3", "--name", "faster")
    assert (made["branch"], made["iterations"]) == ("faster", 30)
    assert command("resume", "faster")["accuracy"] == made["accuracy"]
    shown = json.loads(grpo(place, "show", "tiny", "--branch", "--json"))
    assert [each["run"] for each in shown["runs"]] == ["tiny", "faster"]
    planned = command("rerun", "tiny", "-k", "27", "--stage", "advantage", "--dry-run", "algorithm.advantage=rloo")
    assert [each["verdict"] for each in planned["stages"]][:2] == ["runs", "depends"]
    unknown = subprocess.run(
        [*GRPO, "rerun", "tiny", "-k", "99", "--from", "update", "--store", str(place / "store")],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert unknown.returncode == 2 and "iteration 99: run 'tiny' has iterations 0 to 29" in unknown.stderr


def test_show_algorithms_lists_formula_paper_and_options_of_everything_that_is_registered() -> None:
    shown = json.loads(CliRunner().invoke(app, ["show", "algorithms", "--json"]).output)
    from grpo_lib.catalogue import choices

    expected = {(setting, each.name) for setting, registry in choices().items() for each in registry}
    assert {("reward.functions", "judge"), ("rollout.sampler", "pass_rate"), ("algorithm.loss", "cispo")} <= expected
    assert {(each["setting"], each["name"]) for each in shown} == expected
    assert len([each for each in shown if each["setting"] == "algorithm.advantage"]) == 13
    (ppo,) = (each for each in shown if each["name"] == "ppo_clip")
    assert "-A clip(rho" in ppo["formula"] and "arXiv:1707.06347" in ppo["paper"]
    options = {each["name"]: each for each in ppo["options"]}
    assert options["clip_low"]["default"] == "0.2" and options["clip_low"]["type"] == "float, > 0, < 1"
    assert "null: off" in options["dual_clip"]["meaning"]


def test_show_algorithms_narrows_to_a_kind_or_a_name_and_names_the_nearest() -> None:
    one = CliRunner().invoke(app, ["show", "algorithms", "gmpo"]).output
    assert "geo_mean (also gmpo)" in one and "clip_high = 0.4" in one and "rloo" not in one
    kinds = {
        each["setting"] for each in json.loads(CliRunner().invoke(app, ["show", "algorithms", "kl", "--json"]).output)
    }
    assert kinds == {"algorithm.kl.estimator"}
    unknown = CliRunner().invoke(app, ["show", "algorithms", "rlo"])
    assert unknown.exit_code == 1 and "did you mean rloo" in str(unknown.exception)


def test_show_algorithms_lists_a_module_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "shown_module.py").write_text(
        "from grpo_lib.algorithms.metrics import METRICS\n"
        "@METRICS.register('shown', formula='B', paper='ours', use='counting')\n"
        "def shown(rewards):\n    return len(rewards)\n"
    )
    done = subprocess.run(
        [*GRPO, "show", "algorithms", "shown", "--plugin", "shown_module", "--json"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.getcwd()}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (listed,) = json.loads(done.stdout)
    assert (listed["function"], listed["columns"]) == ("shown_module.shown", ["rewards"])
