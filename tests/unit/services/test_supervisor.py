"""Services that are started, killed, started again and ended: cheap ones, by the supervisor of the real ones."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from grpo_lib.errors import ServiceError
from grpo_lib.services.processes import runs, session_of
from grpo_lib.services.supervisor import Backoff, Member, Service, Supervisor

SAY_AND_SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
QUICK = Backoff(first=0.05, longest=0.4, quick=5.0, deaths=5)


class Watched:
    """A supervisor and all that it has said; whatever happens in a test, it is stopped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.lines: list[str] = []
        self.supervisor = Supervisor([], self._changed)

    def start(self, *services: Service, backoff: Backoff = QUICK) -> Supervisor:
        self.supervisor = Supervisor(services, self._changed, backoff)
        return self.supervisor

    def until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.lines
            self.supervisor.step()
            time.sleep(0.01)

    def service(self, name: str, program: str = SAY_AND_SLEEP, **options: object) -> Service:
        settings = {
            "name": name,
            "address": "here",
            "command": [sys.executable, "-c", program],
            "env": os.environ,
            "log": self._folder / f"{name}.log",
            "ready": lambda said: "ready" in said,
            "stop_seconds": 5.0,
        }
        return Service(**(settings | options))

    def process(self, number: int = 0) -> psutil.Process:
        started = self.supervisor.members[number].process
        assert started is not None
        return psutil.Process(started.pid)

    def _changed(self, member: Member, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.supervisor.stop(lambda: True)


def test_services_start_one_after_another(watched: Watched) -> None:
    slow = "import time; time.sleep(0.5); print('ready', flush=True); time.sleep(600)"
    supervisor = watched.start(watched.service("first", slow), watched.service("second"))
    watched.until(lambda: supervisor.all_up)
    assert [line.split(" at ")[0] for line in watched.lines] == [
        "first starts", "first is up", "second starts", "second is up",
    ]  # fmt: skip


def test_a_killed_service_starts_again_and_says_so(watched: Watched) -> None:
    supervisor = watched.start(watched.service("one"), watched.service("other"))
    watched.until(lambda: supervisor.all_up)
    first, other = watched.process(), watched.process(1)
    first.kill()
    watched.until(lambda: supervisor.members[0].restarts == 1 and supervisor.all_up)
    assert watched.process().pid != first.pid and watched.process(1) == other and other.is_running()
    assert "one was killed by signal 9; it starts again in 0.05 s" in watched.lines
    assert watched.lines[-1].startswith("one is up again")


def test_a_service_starts_again_only_when_the_one_that_it_needs_is_up(watched: Watched, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    gate.touch()
    waits = (
        f"import pathlib, time\nwhile not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.02)\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    supervisor = watched.start(watched.service("head", waits), watched.service("node", after="head"))
    watched.until(lambda: supervisor.all_up)
    gate.unlink()
    watched.process(0).kill()
    watched.process(1).kill()
    watched.until(lambda: supervisor.members[0].phase == "starting")
    for _ in range(20):
        supervisor.step()
        time.sleep(0.02)
    assert supervisor.members[1].phase == "waiting"
    gate.touch()
    watched.until(lambda: supervisor.all_up)


def test_what_a_killed_service_leaves_behind_ends_before_it_starts_again(watched: Watched) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # As MLflow does: the server is a child, and the port is the child's. It does not heed SIGTERM.
    child = (
        "import signal, socket, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"server = socket.socket(); server.bind(('127.0.0.1', {port})); server.listen()\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    supervisor = watched.start(watched.service("server", parent))
    watched.until(lambda: supervisor.all_up)
    (server,) = watched.process().children()
    watched.process().kill()
    watched.until(lambda: supervisor.members[0].restarts == 1 and supervisor.all_up)
    assert not runs(server) and len(watched.process().children()) == 1


def test_a_service_that_dies_again_and_again_is_given_up_with_the_end_of_its_log(
    watched: Watched, tmp_path: Path
) -> None:
    flag = tmp_path / "works"
    flag.touch()
    program = (
        f"import pathlib, sys, time\nif not pathlib.Path({str(flag)!r}).exists(): sys.exit('no more: disk full')\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    supervisor = watched.start(watched.service("one", program))
    watched.until(lambda: supervisor.all_up)
    flag.unlink()
    watched.process().kill()
    with pytest.raises(ServiceError, match=r"ended with code 1, the last 5 times .*no further try(?s:.*)disk full"):
        watched.until(lambda: False)
    delays = [line.rpartition(" in ")[2] for line in watched.lines if "starts again" in line]
    assert delays == ["0.05 s", "0.1 s", "0.2 s", "0.4 s"]
    assert supervisor.members[0].restarts == 4


def test_deaths_of_a_service_that_lived_long_between_them_do_not_count(watched: Watched) -> None:
    supervisor = watched.start(watched.service("one"), backoff=Backoff(first=0.01, quick=0.05, deaths=2))
    for count in range(4):
        watched.until(lambda: supervisor.all_up)
        time.sleep(0.1)
        watched.process().kill()
        watched.until(lambda count=count: supervisor.members[0].restarts == count + 1)
    assert supervisor.members[0].quick_deaths == 0


def test_a_service_that_does_not_start_is_no_second_try(watched: Watched) -> None:
    watched.start(watched.service("one", "raise SystemExit('wrong option')"))
    with pytest.raises(ServiceError, match=r"one ended with code 1 at its start; its log ends with\nwrong option"):
        watched.until(lambda: False)
    assert watched.supervisor.members[0].restarts == 0


def test_a_service_may_have_a_second_try_at_its_first_start(watched: Watched, tmp_path: Path) -> None:
    flag = tmp_path / "tried"
    program = f"""
import pathlib, time
flag = pathlib.Path({str(flag)!r})
if not flag.exists():
    flag.touch()
    raise SystemExit('too slow')
print('ready', flush=True)
time.sleep(600)
"""
    supervisor = watched.start(watched.service("slow", program, tries=2))
    watched.until(lambda: supervisor.all_up)
    assert "slow ended with code 1; it starts again in 0.05 s" in watched.lines
    watched.supervisor.stop(lambda: True)
    watched.start(watched.service("broken", "raise SystemExit('wrong option')", tries=2))
    with pytest.raises(ServiceError, match="broken ended with code 1 at its start"):
        watched.until(lambda: False)
    assert watched.supervisor.members[0].restarts == 1


def test_a_service_that_never_answers_is_ended_and_named(watched: Watched) -> None:
    supervisor = watched.start(watched.service("one", "import time; time.sleep(600)", start_seconds=0.3))
    watched.until(lambda: supervisor.members[0].phase == "starting")
    process = watched.process()
    with pytest.raises(ServiceError, match=r"one did not answer within 0.3 s at its start; it wrote nothing"):
        watched.until(lambda: False)
    assert not runs(process)


def test_what_was_said_before_a_death_does_not_make_the_next_start_ready(watched: Watched, tmp_path: Path) -> None:
    flag = tmp_path / "silent"
    say = f"if not pathlib.Path({str(flag)!r}).exists(): print('ready', flush=True)"
    program = f"import pathlib, time\n{say}\ntime.sleep(600)"
    supervisor = watched.start(watched.service("one", program))
    watched.until(lambda: supervisor.all_up)
    flag.touch()
    watched.process().kill()
    watched.until(lambda: supervisor.members[0].restarts == 1 and supervisor.members[0].phase == "starting")
    for _ in range(20):
        supervisor.step()
        time.sleep(0.02)
    assert supervisor.members[0].phase == "starting"


@pytest.mark.parametrize("hurry", [False, True])
def test_the_end_leaves_no_process_not_even_a_stubborn_one_nor_its_children(watched: Watched, hurry: bool) -> None:
    deaf = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    child = f"{deaf}print('ready', flush=True); time.sleep(600)"
    stubborn = f"{deaf}for _ in range(2): subprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(600)"
    supervisor = watched.start(
        watched.service("soft"), watched.service("hard", stubborn, stop_seconds=100.0 if hurry else 0.5)
    )
    watched.until(lambda: supervisor.all_up)
    watched.until(lambda: len(watched.process(1).children()) == 2)
    mine = [watched.process(), watched.process(1), *watched.process(1).children()]
    sessions = [watched.process().pid, watched.process(1).pid]
    began = time.monotonic()
    supervisor.stop(lambda: hurry)
    assert time.monotonic() - began < 50
    assert [each for each in mine if runs(each)] == []
    assert [session_of(each) for each in sessions] == [[], []]
    assert watched.lines[-2:] == ["hard ended", "soft ended"]


def test_a_service_ends_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    program = f"""
import os, sys, time
from pathlib import Path
from grpo_lib.services.supervisor import Service, Supervisor
program = "import time; print('ready', flush=True); time.sleep(600)"
one = Service(name="one", address="", command=[sys.executable, "-c", program], env=os.environ,
              log=Path({str(tmp_path)!r}, "log"), ready=lambda said: "ready" in said)
supervisor = Supervisor([one], lambda member, line: None)
while not supervisor.all_up:
    supervisor.step()
print(supervisor.members[0].process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        service = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while runs(service):
        assert time.monotonic() < deadline
        time.sleep(0.02)
