"""What the ranks of test_ranks.py run; its folder is on their PYTHONPATH. Neither deepspeed nor transformers here."""

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from grpo_lib.errors import ConfigError, NonFiniteError
from grpo_lib.placement.rank_main import report
from grpo_lib.training.world import World


class Handler:
    """Commands that work, and commands that fail in the ways that are tested."""

    def __init__(self, setup: Mapping[str, Any], world: World) -> None:
        self.setup, self.world = setup, world
        self.calls = 0

    def echo(self, **arguments: Any) -> Any:
        self.calls += 1
        return {"rank": self.world.rank, "setup": self.setup, "arguments": arguments, "calls": self.calls}

    def surroundings(self) -> dict[str, Any]:
        loaded = "deepspeed" in sys.modules
        return {"accelerator": os.environ["DS_ACCELERATOR"], "threads": torch.get_num_threads(), "deepspeed": loaded}

    def reduced(self) -> list[list[float]]:
        """Rank r brings [r+1, 10*(r+1)]."""
        own = torch.tensor([1.0, 10.0]) * (self.world.rank + 1)
        self.world.barrier()
        return [each(own.clone()).tolist() for each in (self.world.sum_, self.world.max_)]

    def count(self, to: int) -> int:
        for number in range(to):
            report(rank=self.world.rank, number=number)
        return to

    def collective(self, without: int) -> None:
        """All ranks but one enter a collective, which therefore never ends. The one sleeps."""
        report(entered=True)
        if self.world.rank == without:
            time.sleep(600)
        self.world.sum_(torch.ones(1))

    def die_later(self, seconds: float) -> None:
        if self.world.rank == 1:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def fail(self, rank: int) -> None:
        if self.world.rank == rank:
            print("a line in the log", flush=True)
            raise ZeroDivisionError("only here")
        self.world.sum_(torch.ones(1))

    def refuse(self) -> None:
        raise NonFiniteError(f"loss is nan in iteration 3 (rank {self.world.rank})")

    def no_json(self) -> Any:
        return torch.ones(1)


def raising(setup: Mapping[str, Any], world: World) -> None:
    raise ValueError(f"no model at {setup['path']}")


def refusing(setup: Mapping[str, Any], world: World) -> None:
    raise ConfigError("trainer.max_tokens=0 must be at least 1")


class Alone:
    """A process that is no rank of a group."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._setup = setup

    def seen(self) -> dict[str, Any]:
        names = ("GRPO_TESTS_ALONE", "RANK", "OMP_NUM_THREADS")
        return {"setup": self._setup} | {name: os.environ.get(name) for name in names}

    def refuse(self) -> None:
        raise ConfigError("no such weights")
