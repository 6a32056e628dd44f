"""What is found and ended after its supervisor was killed, and what is never touched."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from grpo_lib.errors import ConfigError
from grpo_lib.services.processes import MARK, ProcessId, owned_session, runs, session_of
from grpo_lib.services.state import (
    ServiceState,
    SetState,
    end_leftovers,
    held,
    leftovers,
    read_state,
    write_state,
)

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
SLEEP = f"{DEAF}print('up', flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_lib.services.state.LEFTOVER_SECONDS", 0.2)


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[str]"]]:
    """Leaders of sessions, to be ended with all their processes."""
    made: list[subprocess.Popen[str]] = []
    yield made
    for each in made:
        for process in session_of(each.pid):
            process.kill()
        each.kill()
        each.wait()


def leader(started: list["subprocess.Popen[str]"], program: str, folder: Path | None) -> "subprocess.Popen[str]":
    """A process with a session of its own that has said that it is up."""
    env = {key: value for key, value in os.environ.items() if key != MARK} | ({MARK: str(folder)} if folder else {})
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    started.append(process)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def state_of(process: ProcessId, supervisor: ProcessId) -> SetState:
    service = ServiceState(name="one", address="", phase="up", process=process, since=0, restarts=0, log="")
    return SetState(supervisor=supervisor, ready=True, ray_address="127.0.0.1:6379", services=[service])


def gone() -> ProcessId:
    """A process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        return ProcessId.of(process.pid)


def test_a_leftover_is_ended_even_if_it_is_deaf(started: list["subprocess.Popen[str]"], tmp_path: Path) -> None:
    process = leader(started, SLEEP, tmp_path)
    state = state_of(ProcessId.of(process.pid), gone())
    assert not state.running() and set(leftovers(tmp_path, state)) == {process.pid}
    assert end_leftovers(tmp_path, state) == 1
    assert not runs(psutil.Process(process.pid)) and leftovers(tmp_path, state) == {}


def test_children_of_a_leader_that_has_ended_are_found_by_their_mark(
    started: list["subprocess.Popen[str]"], tmp_path: Path
) -> None:
    program = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {SLEEP!r}])\nsys.stdin.read()"
    process = leader(started, program, tmp_path)
    first = ProcessId.of(process.pid)
    process.kill()
    process.wait()
    assert len(owned_session(first, str(tmp_path))) == 1
    assert owned_session(first, "/another/folder") == []
    assert end_leftovers(tmp_path, state_of(first, gone())) == 1
    assert session_of(process.pid) == []


def test_a_process_that_got_the_number_of_a_service_is_never_touched(
    started: list["subprocess.Popen[str]"], tmp_path: Path
) -> None:
    process = leader(started, SLEEP, tmp_path)  # of the same folder even, by its mark
    earlier = ProcessId(pid=process.pid, birth="of an earlier process")
    assert owned_session(earlier, str(tmp_path)) == []
    assert end_leftovers(tmp_path, state_of(earlier, gone())) == 0
    assert runs(psutil.Process(process.pid))


def test_a_folder_is_held_by_one_process_until_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom grpo_lib.services.state import held\n"
        f"with held(Path({str(tmp_path)!r})): print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "up\n"
        write_state(tmp_path, state_of(gone(), ProcessId.of(holder.pid)))
        said = rf"already runs in .* \(process {holder.pid}\); end it with `grpo down"
        with pytest.raises(ConfigError, match=said), held(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
    with held(tmp_path):
        pass


def test_a_state_is_read_as_it_was_written_and_a_foreign_file_is_refused(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    state = state_of(gone(), ProcessId.of(os.getpid()))
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state and state.running()
    (tmp_path / "up.json").write_text(json.dumps({"version": 7}))
    with pytest.raises(ConfigError, match="is not what this version of `grpo up` writes"):
        read_state(tmp_path)


def test_a_process_that_has_ended_is_not_alive_though_nobody_has_asked_for_its_status() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = ProcessId.of(process.pid)
    assert known.alive()
    assert process.stdin is not None
    process.stdin.close()
    deadline = time.monotonic() + 10
    while known.alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.wait() != 0 and not known.alive()
