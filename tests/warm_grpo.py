"""`grpo` for shell scripts of tests, without the seconds of imports: it is forked from a process that has done them.

`warm_grpo(environment)` starts that process and gives a folder for PATH with a `grpo` in it. What runs is the real
entry point, in a process of its own with the caller's arguments, folder, environment and terminal; it dies with its
caller.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_lib.parent import end_with_parent

HEAVY = ("flows.cli.main", "flows.cli.console", "flows.train", "flows.rerun", "flows.evaluate", "flows.export",
         "flows.debug", "grpo_lib.rewards.rescore", "mlflow.store.tracking.sqlalchemy_store", "matplotlib.pyplot",
         "duckdb")  # fmt: skip
CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    call = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(call).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(call)
    sys.exit(int(server.recv(16)))
"""
READY = b"ready\n"


@contextmanager
def warm_grpo(environment: dict[str, str]) -> Iterator[str]:
    """The folder, while the block runs."""
    with tempfile.TemporaryDirectory(prefix="grpo-", dir="/tmp") as folder:  # short: paths of sockets are limited
        address = f"{folder}/socket"
        client = Path(folder, "grpo")
        client.write_text(CLIENT.format(python=sys.executable, address=address))
        client.chmod(0o755)
        server = subprocess.Popen([sys.executable, "-m", __name__, address], env=environment, stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == READY, "the process that has imported everything did not start"
            yield folder
        finally:
            server.kill()
            server.wait()


def serve(address: str) -> None:
    end_with_parent(signal.SIGKILL)
    for module in HEAVY:
        __import__(module)
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who answer
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    while True:
        caller, _ = server.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            server.close()
            end_with_parent(signal.SIGKILL)
            answer(caller)
        caller.close()


def answer(caller: socket.socket) -> None:
    """Runs what the caller asks for, and tells the exit code; ends it when the caller is gone."""
    size, files, _, _ = socket.recv_fds(caller, 4, 3)
    call = b""
    while len(call) < int.from_bytes(size, "big"):
        call += caller.recv(65536)
    words, folder, environment = json.loads(call)
    child = os.fork()
    if child == 0:
        caller.close()
        end_with_parent(signal.SIGKILL)
        run(words, folder, environment, files)
    watch = os.pidfd_open(child)
    if caller in select.select([caller, watch], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        caller.sendall(str(code if code >= 0 else 128 - code).encode())
    finally:
        os._exit(0)


def run(words: list[str], folder: str, environment: dict[str, str], files: list[int]) -> None:
    """Ends without Python's own clean-up, as forked processes should: what other threads hold was never theirs."""
    from flows.cli.main import main

    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = ["grpo", *words], folder
    code: object = 1
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    serve(sys.argv[1])
