"""A policy loss by which ranks of a training meet with accidents; a plugin of the runs in test_ranks.py."""

import os
import signal
import time
from pathlib import Path

from torch import Tensor

from grpo_lib.algorithms.losses import LOSSES, PolicyLoss, ppo_clip
from tests.flows.accidents import ACCIDENT

_calls = 0


@LOSSES.register("accident", formula="that of ppo_clip", paper="ours", use="tests")
def accident(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> PolicyLoss:
    global _calls
    _calls += 1
    if ACCIDENT in os.environ:
        what, call, folder = os.environ[ACCIDENT].split(":")
        if _calls == int(call):
            _happen(what, Path(folder))
    return ppo_clip(logprobs, old_logprobs, advantages)


def _happen(what: str, folder: Path) -> None:
    """Once; the folder then holds the processes' ids and the time."""
    if (folder / "time").exists():
        return
    rank = os.environ["RANK"]
    (folder / f"pid-{rank}").write_text(f"{os.getpid()} {os.getppid()}")
    while len(list(folder.glob("pid-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if what == "hang":
        time.sleep(600)
    if rank == "1":
        (folder / "time").write_text(str(time.time()))
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("only in one rank")
