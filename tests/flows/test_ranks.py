"""Runs whose trainer is two processes: they resume, and survive the death of a rank; none outlives the run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tasks.reward
from grpo_lib.algorithms.losses import LOSSES
from grpo_lib.errors import MissingPackageError, RankError, RankLostError
from grpo_lib.placement.train_ranks import TrainRanks
from grpo_lib.storage.manifests import Manifest
from tests.flows.accidents import ACCIDENT
from tests.flows.rank_runs import on_ranks
from tests.flows.runs import fresh_process, of, train
from tests.flows.tiny import use_easy_reward

pytestmark = [pytest.mark.usefixtures("prefect_here"), pytest.mark.slow]
ROOT = Path(__file__).parents[2]
SECONDS = 30


@pytest.fixture(scope="module", autouse=True)
def _easy_reward() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.reward, "get_problem", use_easy_reward)
        yield
    fresh_process()
    LOSSES._entries.pop("accident", None)  # as if the plugin had not been loaded here
    sys.modules.pop("tests.flows.rank_losses", None)


@pytest.fixture(scope="module")
def undisturbed(prefect_here: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Manifest]]:
    """The store and what is in it after two iterations."""
    store = tmp_path_factory.mktemp("undisturbed")
    return store, train(on_ranks(store))


@pytest.fixture(scope="module")
def battered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a run that resumes from each accident, and meets with the next."""
    return tmp_path_factory.mktemp("battered")


def contents(manifests: list[Manifest]) -> dict[str, str]:
    """Digests by place; but for `publish`, whose metrics are seconds as well."""
    return {each.path: each.digest for each in manifests if each.stage != "publish"}


def policies(manifests: list[Manifest]) -> list[Any]:
    return [each.summary["policy_digest"] for each in of(manifests, "update")]


def running(folder: Path, wait_seconds: float) -> list[int]:
    """Which of the ranks, and of what started them, still run."""
    pids = {int(pid) for path in folder.glob("pid-*") for pid in path.read_text().split()}
    assert len(pids) == 3, "two ranks and torchrun"
    until = time.monotonic() + wait_seconds
    while (alive := [pid for pid in pids if _runs(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    return alive


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_run_on_two_ranks_commits_every_stage_and_goes_on_from_its_checkpoint_with_one(
    undisturbed: tuple[Path, list[Manifest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, manifests = undisturbed
    stages = {each.stage for each in manifests}
    assert stages == {
        "dataset", "warm_start", "prompts", "rollout", "reward", "old_logprobs", "ref_logprobs", "advantage", "update",
        "checkpoint", "evaluate", "publish",
    }  # fmt: skip
    assert len(set(policies(manifests))) == 2
    assert all(float(str(each.summary["trained_rows"])) > 0 for each in of(manifests, "update"))

    restored: list[Path] = []
    restore = TrainRanks.restore

    def watched(self: TrainRanks, folder: Path) -> None:
        restored.append(folder)
        restore(self, folder)

    monkeypatch.setattr(TrainRanks, "restore", watched)
    fresh_process()
    longer = train(on_ranks(store, "iterations=3", "placement.ranks=1"))
    assert len(restored) == 1  # and it had the digest that was recorded: `Workers` would have refused it
    assert contents(manifests).items() <= contents(longer).items()
    assert len(of(longer, "update")) == 3


def test_an_exception_in_one_rank_fails_the_run_with_its_traceback(
    battered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ACCIDENT, f"raise:1:{tmp_path}")
    fresh_process()
    with pytest.raises(RankError, match=r"rank 1 raised ZeroDivisionError: only in one rank in 'update'") as caught:
        train(on_ranks(battered))
    assert 'rank_losses.py", line' in str(caught.value) and "_happen" in str(caught.value)
    assert running(tmp_path, 0) == []


def test_ranks_end_when_the_run_is_killed(prefect_server: dict[str, str], battered: Path, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "tests.flows.rank_runs", str(battered)],
            cwd=ROOT,
            env=os.environ | prefect_server | {ACCIDENT: f"hang:1:{tmp_path}"},
            stdout=log,
            stderr=log,
        )
    until = time.monotonic() + 300
    while len(list(tmp_path.glob("pid-*"))) < 2:
        assert run.poll() is None and time.monotonic() < until, (tmp_path / "log").read_text()[-3000:]
        time.sleep(0.1)
    assert len(running(tmp_path, 0)) == 3
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert running(tmp_path, SECONDS) == []


def test_a_rank_that_is_killed_in_an_update_costs_nothing_but_time(
    undisturbed: tuple[Path, list[Manifest]], battered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ACCIDENT, f"kill:4:{tmp_path}")  # in the second step of the second iteration
    lost: list[tuple[float, str]] = []
    update = TrainRanks.update

    def watched(self: TrainRanks, *args: Any, **kwargs: Any) -> Any:
        try:
            return update(self, *args, **kwargs)
        except RankLostError as error:
            lost.append((time.time(), str(error)))
            raise

    monkeypatch.setattr(TrainRanks, "update", watched)
    fresh_process()
    manifests = train(on_ranks(battered))
    ((noticed, message),) = lost
    assert noticed - float((tmp_path / "time").read_text()) < SECONDS
    assert "rank 1 (pid " in message and "was killed or ended by itself" in message
    assert running(tmp_path, 0) == []
    assert contents(manifests) == contents(undisturbed[1])
    assert policies(manifests) == policies(undisturbed[1])


def test_a_missing_deepspeed_is_told_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    store = tmp_path / "store"
    with pytest.raises(MissingPackageError, match=r"pip install 'grpo-pipeline\[deepspeed\]'"):
        train(on_ranks(store, "trainer.backend=deepspeed"))
    assert not list(store.glob("runs/*"))
