"""`grpo gc` on the store of a real run, and two flows that want the same run."""

import json
import os
import signal
import subprocess
import sys
import time
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
    assert "no manifest refers to it" in shown and "of which the last 1 are kept" in shown
    before = {info.path for info in run.objects.list("")}
    assert "remove all this?" in gc(root, "--older-than", "0", "--keep-weights", "1", answer="n\n") or True
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


def start(place: Path, *words: str) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment["PREFECT_HOME"] = str(place / "prefect")
    log = (place / f"{time.monotonic_ns()}.log").open("wb")
    return subprocess.Popen([*GRPO, *words], env=environment, stdout=log, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_of_two_resumes_one_works_and_the_other_says_who_holds_the_run(tmp_path: Path) -> None:
    config = TINY | {"iterations": 400, "store": {"uri": str(tmp_path / "store")}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    first = start(tmp_path, "run", str(tmp_path / "tiny.yaml"))
    try:
        wait_for(tmp_path / "store/runs/tiny/iterations/000002", first)
        first.send_signal(signal.SIGKILL)
        first.wait()
        resume = ("resume", "tiny", "--store", str(tmp_path / "store"))
        both = [start(tmp_path, *resume) for _ in range(2)]
        ended = wait_for_one(both)
        (other,) = (each for each in both if each is not ended)
        try:
            assert ended.stderr is not None
            message = ended.stderr.read().decode()
            assert ended.returncode == 2, message
            assert f"is held by process {other.pid} of " in message and "resume tiny --store" in message
            began = time.monotonic()
            third = start(tmp_path, *resume)
            assert third.wait(60) == 2
            assert time.monotonic() - began < 30
            done = sorted((tmp_path / "store/runs/tiny/iterations").iterdir())[-1].name
            wait_for(tmp_path / f"store/runs/tiny/iterations/{int(done) + 2:06d}", other)
        finally:
            other.kill()
            other.wait()
    finally:
        first.kill()
        first.wait()


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 200
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, (process.stderr or sys.stdin.buffer).read()
        time.sleep(0.05)


def wait_for_one(processes: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for each in processes:
            if each.poll() is not None:
                return each
        time.sleep(0.05)
    raise AssertionError("both run")
