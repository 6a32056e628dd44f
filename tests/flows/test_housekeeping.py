"""`grpo gc` on the store of a real run, and two flows that want the same run."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_lib.run import Run
from grpo_lib.storage.verify import verify_run
from tests.flows.runs import Tiny, fresh_process, of, train
from tests.flows.tiny import TINY

GRPO = [sys.executable, "-m", "flows.cli.main"]
PATIENCE = 300


def gc(store: Path, *words: str, answer: str | None = None) -> Any:
    result = CliRunner().invoke(app, ["gc", *words, "--store", str(store)], input=answer)
    assert result.exit_code == 0, result.output
    return json.loads(result.output) if "--json" in words else result.output


@pytest.mark.usefixtures("prefect_here")
def test_gc_shows_asks_and_removes_and_the_run_goes_on(tiny: Tiny) -> None:
    config = tiny("pipeline.max_staleness=1", "algorithm.rollout_correction.preset=decoupled_token_is", "iterations=3")
    manifests = train(config)
    root, run = Path(config.store.uri), Run(config)
    update = of(manifests, "update", 0)[0]
    attempt = run.stages.attempt(_Spec, config, update.key, [], 0)
    attempt.write_file("killed.bin", b"half of it")
    weights = of(manifests, "weights")
    assert len(weights) >= 2 and gc(root, "--dry-run") == "nothing to remove\n", "all is young"
    shown = gc(root, "--older-than", "0", "--keep-weights", "1", "--dry-run")
    assert "no manifest refers to it" in shown and "can be made again" in shown
    before = {info.path for info in run.objects.list("")}
    assert "remove all this?" in gc(root, "--older-than", "0", "--keep-weights", "1", answer="n\n")
    assert before == {info.path for info in run.objects.list("")}
    found = gc(root, "tiny", "--older-than", "0", "--keep-weights", "1", "--yes", "--json")
    assert found["left"] == [] and all(each["removed"] for each in found["garbage"])
    kinds = [each["kind"] for each in found["garbage"]]
    assert kinds.count("attempt") == 1 and kinds.count("weights") == len(weights) - 1
    assert verify_run(run.objects, "tiny").damages == []
    fresh_process()
    longer = tiny("pipeline.max_staleness=1", "algorithm.rollout_correction.preset=decoupled_token_is", "iterations=4")
    again = train(longer)
    assert len(of(again, "update")) == 4
    kept = {each.path: each.manifest_sha256 for each in manifests if each.stage not in ("weights", "publish")}
    assert kept.items() <= {each.path: each.manifest_sha256 for each in again}.items()


class _Spec:
    name, version, reads = "update", 1, ()


def test_gc_without_an_answer_removes_nothing(tmp_path: Path) -> None:
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "left").write_bytes(b"probe")
    result = CliRunner().invoke(app, ["gc", "--older-than", "0", "--store", str(tmp_path)], input="n\n")
    assert result.exit_code == 0 and "left by a check" in result.output
    assert (tmp_path / "probe" / "left").exists()
    refused = CliRunner().invoke(app, ["gc", "--json", "--store", str(tmp_path)])
    assert refused.exit_code == 2
    assert "removed 1 files, 5 B" in gc(tmp_path, "--older-than", "0", "--yes")


class Commands:
    """Commands in processes of their own; none outlives the test."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self._environment = folder, os.environ | environment
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        with self.log(len(self.started)).open("wb") as log:
            self.started.append(subprocess.Popen([*GRPO, *words], env=self._environment, stdout=log, stderr=log))
        return self.started[-1]

    def log(self, number: int) -> Path:
        return self.folder / f"{number}.log"

    def output(self, process: subprocess.Popen[bytes]) -> str:
        return self.log(self.started.index(process)).read_text()

    def wait_for(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not path.exists():
            assert process.poll() is None and time.monotonic() < deadline, self.output(process)
            time.sleep(0.05)

    def first_to_end(self, processes: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for each in processes:
                if each.poll() is not None:
                    return each
            time.sleep(0.05)
        raise AssertionError("\n".join(self.output(each) for each in processes))


@pytest.fixture
def commands(tmp_path: Path, prefect_server: dict[str, str]) -> Iterator[Commands]:
    made = Commands(tmp_path, prefect_server)
    yield made
    for each in made.started:
        each.kill()
        each.wait()


@pytest.mark.slow
def test_of_two_resumes_one_works_and_the_other_says_who_holds_the_run(commands: Commands, tmp_path: Path) -> None:
    store = tmp_path / "store"
    config = TINY | {"iterations": 1000, "store": {"uri": str(store)}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    first = commands.start("run", str(tmp_path / "tiny.yaml"))
    commands.wait_for(store / "runs/tiny/iterations/000002", first)
    first.kill()
    first.wait()
    resume = ("resume", "tiny", "--store", str(store))
    both = [commands.start(*resume) for _ in range(2)]
    refused = commands.first_to_end(both)
    (holder,) = (each for each in both if each is not refused)
    message = commands.output(refused)
    assert refused.returncode == 2, message
    assert f"run 'tiny' is held by process {holder.pid} of " in message and "resume tiny --store" in message
    third = commands.start(*resume)
    assert third.wait(PATIENCE) == 2
    assert f"held by process {holder.pid} of " in commands.output(third)
    done = max(int(each.name) for each in (store / "runs/tiny/iterations").iterdir())
    commands.wait_for(store / f"runs/tiny/iterations/{done + 2:06d}", holder)
    holder.terminate()
    holder.wait(PATIENCE)
    fourth = commands.start(*resume, f"iterations={done + 2}")
    assert fourth.wait(PATIENCE) == 0, commands.output(fourth)
