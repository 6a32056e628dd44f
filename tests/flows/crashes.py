"""Runs a tiny training many times, kills it (SIGKILL) at given points, resumes it, and prints what came out as JSON.

Imports once and forks a child for every run, so that a point costs seconds. Used by test_crashes.py:

    python -m tests.flows.crashes FOLDER POINT...

A point is WHEN:STAGE:ITERATION with WHEN one of begin (the stage is about to run), parts (its parts are written, its
manifest is not), done (its manifest is there, nothing has been told to Prefect), and ITERATION "setup" or a number.
The point "none" is the undisturbed run.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import matplotlib.pyplot  # noqa: F401  imported once for all children
import mlflow  # noqa: F401

import tasks.reward
from flows.train import train
from grpo_lib.config import RunConfig
from grpo_lib.config_files import make_config
from grpo_lib.run import Run
from grpo_lib.storage.attempts import Attempt
from grpo_lib.storage.objects import open_store
from tests.flows.tiny import TINY, use_easy_reward

LIMIT_SECONDS = 120


def tiny(store: Path) -> RunConfig:
    settings = ["iterations=4", "algorithm.entropy_coef=0.01", "trainer.mini_batch_prompts=2", "rollout.prompts=4"]
    return make_config(TINY | {"store": {"uri": str(store)}}, settings)


def kill_at(point: str) -> None:
    """Makes this process kill itself at ``point``."""
    when, stage, iteration = point.split(":")
    place = None if iteration == "setup" else int(iteration)
    enter, commit = Attempt.__enter__, Attempt.commit

    def here(attempt: Attempt) -> bool:
        return (attempt._spec.name, attempt._iteration) == (stage, place)

    def entering(attempt: Attempt) -> Attempt:
        if when == "begin" and here(attempt):
            os.kill(os.getpid(), signal.SIGKILL)
        return enter(attempt)

    def committing(attempt: Attempt, **kwargs: object) -> object:
        if when == "parts" and here(attempt):
            os.kill(os.getpid(), signal.SIGKILL)
        ref = commit(attempt, **kwargs)  # type: ignore[arg-type]
        if when == "done" and here(attempt):
            os.kill(os.getpid(), signal.SIGKILL)
        return ref

    Attempt.__enter__, Attempt.commit = entering, committing  # type: ignore[method-assign, assignment]


def in_child(store: Path, point: str) -> int:
    """Trains in a child process; returns its wait status."""
    child = os.fork()
    if child == 0:
        log = os.open(store.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            if point != "none":
                kill_at(point)
            tasks.reward.get_problem = use_easy_reward  # type: ignore[assignment]
            train(tiny(store))
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError(f"{point}: no end after {LIMIT_SECONDS} s; see {store.with_suffix('.log')}")


def committed(store: Path) -> dict[str, tuple[str, str]]:
    """Path of every manifest -> its own sha256 and its content digest."""
    config = tiny(store)
    manifests = Run(config).stages.manifests() if open_store(config.store).exists("runs/tiny/run.json") else []
    return {each.path: (each.manifest_sha256, each.digest) for each in manifests}


def attempts(store: Path) -> dict[str, list[str]]:
    """Path of every manifest -> names of the attempts at its stage, those that did not commit included."""
    folders = {path: (store / path).parent for path in committed(store)}
    return {path: sorted(each.name for each in folder.iterdir() if each.is_dir()) for path, folder in folders.items()}


def crash_and_resume(folder: Path, point: str) -> dict[str, object]:
    store = folder / point.replace(":", "-")
    killed = in_child(store, point)
    before, started = committed(store), attempts(store)
    resumed = None
    if point != "none":
        resumed = in_child(store, "none")
    after = committed(store)
    return {
        "point": point,
        "store": str(store),
        "killed_by": os.WTERMSIG(killed) if os.WIFSIGNALED(killed) else 0,
        "first_exit": os.WEXITSTATUS(killed) if os.WIFEXITED(killed) else None,
        "resumed_exit": None if resumed is None else os.waitstatus_to_exitcode(resumed),
        "before": before,
        "after": after,
        "attempts_before": started,
        "attempts_after": attempts(store),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(json.dumps([crash_and_resume(folder, point) for point in sys.argv[2:]]))
