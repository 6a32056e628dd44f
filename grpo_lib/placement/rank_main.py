"""What each rank of a ``RankGroup`` runs: ``python -m grpo_lib.placement.rank_main``, started by torchrun or alone.

The rank connects to its parent before it does anything else. Messages are lines of JSON:

    up    {"kind": "hello", "token", "rank", "pid"}
    down  {"command": "start", "arguments": {handler, setup, device, threads, command_seconds}}
    down  {"command": NAME, "arguments": {...}}     until {"command": null}
    up    {"kind": "progress", "values"}            from rank 0, any number of times
    up    {"kind": "done", "result"} or {"kind": "failed", "error", "message", "summary", "traceback", "at"}

The line is the rank's lifeline too: when it closes, whatever the rank is doing, the process ends.
"""

import faulthandler
import importlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from grpo_lib import errors
from grpo_lib.parent import end_with_parent
from grpo_lib.placement.failures import failure_of

if TYPE_CHECKING:
    from grpo_lib.training.world import World

SOCKET = "GRPO_RANKS_SOCKET"
"""Environment: the path of the parent's socket."""
TOKEN = "GRPO_RANKS_TOKEN"
"""Environment: what a rank shows to be let in."""
SHOW_STACK = signal.SIGUSR1
"""A rank that gets it writes where its main thread is to `stack_file`."""
COLLECTIVE_SLACK_SECONDS = 30

_progress_line: "Line | None" = None


def stack_file(socket_path: str | Path, rank: int) -> Path:
    """Where a rank writes its stack: a file of its own, or two ranks' lines would run into each other."""
    return Path(socket_path).with_name(f"stack-{rank}")


def report(**values: JsonValue) -> None:
    """Progress of the running command, for ``RankGroup.call(..., on_progress=)``. Silent in all ranks but rank 0."""
    if _progress_line is not None:
        _progress_line.send({"kind": "progress", "values": values})


class Line:
    """Messages, one line of JSON each, over a connected socket. One thread receives, any may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._rest = b""
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """
        Raises:
            TypeError: something in it is not JSON; nothing was sent.
            OSError: the other side is gone, or does not read.
        """
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            self._socket.sendall(data)

    def receive(self) -> list[Any] | None:
        """Messages that became complete with the next bytes, possibly none yet; ``None`` when the line is closed."""
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._socket.close()


def main() -> None:
    """Serves commands until the parent says that it was the last one."""
    global _progress_line
    rank = int(os.environ.get("RANK", 0))
    if "RANK" in os.environ:  # when the torchrun agent dies; a parent without one may end the thread that started this
        end_with_parent(signal.SIGKILL)
    address = os.environ.pop(SOCKET)
    stack = stack_file(address, rank).open("wb")
    faulthandler.register(SHOW_STACK, stack, all_threads=False)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    line = Line(connection)
    line.send({"kind": "hello", "token": os.environ.pop(TOKEN), "rank": rank, "pid": os.getpid()})
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(line, commands), name="lifeline", daemon=True).start()
    if rank == 0:
        _progress_line = line
    _serve(line, commands, answers=rank == 0)
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # there is nothing to save, and the interpreter takes seconds to take itself apart


def _listen(line: Line, commands: "queue.SimpleQueue[dict[str, Any]]") -> None:
    while (messages := line.receive()) is not None:
        for message in messages:
            commands.put(message)
    # The parent closed the group or is dead. The main thread may hang in a collective: no cleaning up.
    if os.getpgrp() == os.getpid():  # as torchrun starts it: what this rank started goes with it
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _serve(line: Line, commands: "queue.SimpleQueue[dict[str, Any]]", *, answers: bool) -> None:
    handler: Any = None
    while (message := commands.get())["command"] is not None:
        try:
            if handler is None:
                handler, result = _start(**message["arguments"]), None
            else:
                assert not message["command"].startswith("_"), f"{message['command']} is no command"
                result = getattr(handler, message["command"])(**message["arguments"])
            json.dumps(result)  # that it is JSON is asked of every rank
            line.send({"kind": "done", "result": result if answers else None})
        except BaseException as error:
            traceback.print_exc()
            line.send({"kind": "failed"} | failure_of(error))
            # Ending now would give the other ranks errors of their own; the parent ends all at once.
            threading.Event().wait()


def _start(
    *, handler: str, setup: Mapping[str, JsonValue], device: str, threads: int | None, command_seconds: float
) -> Any:
    """Joins the process group, if there is one, and makes the object whose public methods are the commands."""
    world = [_join(device, threads, command_seconds)] if "RANK" in os.environ else []
    module, _, name = handler.partition(":")
    return getattr(importlib.import_module(module), name)(setup, *world)


def _join(kind: str, threads: int | None, command_seconds: float) -> "World":
    import torch
    import torch.distributed as dist

    from grpo_lib.training.world import World

    size, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if threads is not None:
        torch.set_num_threads(threads)
    if kind == "cuda":
        if torch.cuda.device_count() < size:
            raise errors.ConfigError(
                f"{size} ranks on cuda need {size} devices, this machine shows {torch.cuda.device_count()}; "
                "use fewer ranks or the device cpu"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        device_id=device if kind == "cuda" else None,
        # Longer than the parent waits: its message says more than that of a collective.
        timeout=timedelta(seconds=command_seconds + COLLECTIVE_SLACK_SECONDS),
    )
    return World(rank=dist.get_rank(), size=size, device=device)


if __name__ == "__main__":
    # Not this copy, which is called __main__: handlers import `report` from the module.
    from grpo_lib.placement import rank_main

    rank_main.main()
