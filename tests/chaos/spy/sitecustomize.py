"""On the PYTHONPATH of a cluster's node: writes down what its workers generate, and has them meet with accidents.

Python imports a module of this name at its start. What is watched is wrapped when it is imported, in workers alone.
Everything is in the folder that ``GRPO_TEST_SPY`` names:

    generated             a JSON line for each shard that a worker begins to generate
    NAME.pid              process of the worker NAME
    accident              JSON: what (kill, hold, hang) happens when (begin, write, parts, done) to which stage
    happened, over        that it did, and how a hold ended
    code                  what workers that start now take for the digest of their code
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.import_watch import watch_imports

FOLDER = Path(os.environ.get("GRPO_TEST_SPY", "/nonexistent"))


def watch_generation(module: Any) -> None:
    generate = module.generate_rollouts

    def generate_rollouts(engine: Any, prompts: Any, tokenizer: Any, **settings: Any) -> Any:
        rows = prompts.num_rows * settings["samples"]
        place = {"iteration": settings["iteration"], "first": settings["first_prompt"]}
        with (FOLDER / "generated").open("a") as file:
            file.write(json.dumps({"at": time.time(), "pid": os.getpid(), "rows": rows} | place) + "\n")
        return generate(engine, prompts, tokenizer, **settings)

    module.generate_rollouts = generate_rollouts


def watch_workers(module: Any) -> None:
    init = module.StageWorker.__init__

    def __init__(self: Any, name: str, role: str, gpus: float) -> None:
        init(self, name, role, gpus)
        temporary = FOLDER / f"{name}.{os.getpid()}"
        temporary.write_text(str(os.getpid()))
        temporary.rename(FOLDER / f"{name}.pid")

    module.StageWorker.__init__ = __init__


def watch_attempts(module: Any) -> None:
    attempt = module.Attempt
    enter, write_file, commit = attempt.__enter__, attempt.write_file, attempt.commit

    def entering(self: Any) -> Any:
        happen("begin", self)
        return enter(self)

    def writing(self: Any, name: str, source: Any) -> None:
        write_file(self, name, source)
        happen("write", self)

    def committing(self: Any, **settings: Any) -> Any:
        happen("parts", self)
        ref = commit(self, **settings)
        happen("done", self)
        return ref

    attempt.__enter__, attempt.write_file, attempt.commit = entering, writing, committing


def happen(when: str, attempt: Any) -> None:
    """The accident that waits for this stage, if one does: a kill, or no progress until the file is gone."""
    file = FOLDER / "accident"
    if not file.exists():
        return
    accident = json.loads(file.read_text())
    place = (accident["when"], accident["stage"], accident["iteration"])
    if place != (when, attempt._spec.name, attempt._iteration):
        return
    (FOLDER / "happened").write_text(json.dumps(accident | {"pid": os.getpid()}))
    if accident["what"] == "kill":
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    from grpo_lib.progress import progress

    logging.getLogger("grpo_lib.spy").info("held at %s", when)
    try:
        for step in range(10**6):
            if not file.exists():
                return
            if accident["what"] == "hold":  # and not "hang", which gives no sign of life
                progress().stage_advanced(attempt._spec.name, attempt._iteration, step, 10**6, 0)
            time.sleep(0.02)
    finally:
        (FOLDER / "over").write_text(repr(sys.exc_info()[1]))


def easy_reward(module: Any) -> None:
    from tests.flows.tiny import use_easy_reward

    module.get_problem = use_easy_reward


def other_code(module: Any) -> None:
    if (FOLDER / "code").exists():
        code = (FOLDER / "code").read_text()
        module.code_digest = lambda: code


WATCHED: dict[str, Callable[[Any], None]] = {
    "grpo_lib.generation.rollouts": watch_generation,
    "grpo_lib.placement.ray_worker": watch_workers,
    "grpo_lib.storage.attempts": watch_attempts,
    "grpo_lib.placement.code_version": other_code,
    "tasks.reward": easy_reward,
}


if FOLDER.is_dir() and any("default_worker.py" in argument for argument in getattr(sys, "orig_argv", [])):
    watch_imports(WATCHED)
