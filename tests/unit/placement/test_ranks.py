"""A group of ranks answers commands, and nothing of it is left when anything goes wrong."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lib.errors import ConfigError, NonFiniteError, RankError, RankLostError
from grpo_lib.placement import ranks
from grpo_lib.placement.failures import failure_of
from grpo_lib.placement.rank_main import Line
from grpo_lib.placement.rank_processes import Member, Processes, born, listener
from grpo_lib.placement.ranks import RankGroup
from grpo_lib.training.world import World

ROOT = Path(__file__).parents[3]
START_SECONDS = 180.0
Make = Callable[..., RankGroup]


@pytest.fixture(scope="module", autouse=True)
def _handlers_on_the_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), str(ROOT)]))
        yield


def make_group(**settings: Any) -> RankGroup:
    defaults: dict[str, Any] = {
        "ranks": 2,
        "handler": "rank_handlers:Handler",
        "setup": {"path": "/models/tiny"},
        "device": "cpu",
        "threads": 1,
        "start_seconds": START_SECONDS,
        "command_seconds": 60.0,
    }
    return RankGroup(**(defaults | settings))


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes groups that are closed at the end, whatever happens."""
    groups: list[RankGroup] = []

    def make_and_keep(**settings: Any) -> RankGroup:
        groups.append(make_group(**settings))
        return groups[-1]

    yield make_and_keep
    for group in groups:
        group.close()


def processes(group: RankGroup) -> list[int]:
    """Of the ranks and torchrun."""
    return [*group.pids, group._processes.agent.pid]


def left_of(pids: Iterable[int], seconds: float) -> list[int]:
    """Which of the processes still run after at most so many seconds."""
    until = time.monotonic() + seconds
    while (running := [pid for pid in pids if _runs(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    return running


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Intruder(threading.Thread):
    """Connects to the socket of the first group that starts in a folder, and shows a wrong token."""

    def __init__(self, folder: Path, first_line: bytes) -> None:
        super().__init__(daemon=True)
        self._folder, self._first_line = folder, first_line
        self.answer: bytes | None = None
        self.modes: list[int] = []

    def run(self) -> None:
        until = time.monotonic() + START_SECONDS
        while not (found := list(self._folder.glob("*/socket"))) and time.monotonic() < until:
            time.sleep(0.01)
        self.modes = [stat.S_IMODE(found[0].parent.stat().st_mode)]
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(START_SECONDS)
            while time.monotonic() < until:
                try:
                    line.connect(str(found[0]))
                    break
                except ConnectionRefusedError:  # the file is there, nobody listens yet
                    time.sleep(0.01)
            line.sendall(self._first_line)
            try:
                self.answer = line.recv(100)
            except ConnectionError:  # what it sent was not even read
                self.answer = b""


WRONG = [b'{"kind": "hello", "token": "wrong", "rank": 0, "pid": 1}\n', b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n"]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RankGroup, list[Intruder]]]:
    folder, logs = Path(tempfile.mkdtemp(prefix="t-")), tmp_path_factory.mktemp("logs") / "new"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        intruders = [Intruder(folder, line) for line in WRONG]
        for each in intruders:
            each.start()
        group = make_group(setup={"a": [1, None, "ü"]}, folder=logs)
    yield group, intruders
    group.close()
    folder.rmdir()  # nothing is left in it


@pytest.fixture(scope="module")
def group(started: tuple[RankGroup, list[Intruder]]) -> RankGroup:
    return started[0]


@pytest.mark.slow
def test_the_folder_of_the_socket_is_private_and_lines_without_the_token_are_sent_away(
    started: tuple[RankGroup, list[Intruder]],
) -> None:
    for intruder in started[1]:
        intruder.join(START_SECONDS)
        assert intruder.answer == b""
        assert intruder.modes == [0o700]
    assert started[0].alive


def test_arguments_travel_down_and_the_result_of_rank_0_comes_up(group: RankGroup) -> None:
    first = group.call("echo", text="zwei\nZeilen", numbers=[1, 2.5, None], nested={"ü": True})
    assert first == {
        "rank": 0,
        "setup": {"a": [1, None, "ü"]},
        "arguments": {"text": "zwei\nZeilen", "numbers": [1, 2.5, None], "nested": {"ü": True}},
        "calls": 1,
    }
    assert group.call("echo", again="x" * 300_000)["calls"] == 2  # type: ignore[index, call-overload]


def test_all_ranks_run_the_command_and_collectives_work(group: RankGroup) -> None:
    assert group.call("reduced") == [[3.0, 30.0], [2.0, 20.0]]


def test_the_environment_of_a_rank_is_ready_before_the_handler(group: RankGroup) -> None:
    assert group.call("surroundings") == {"accelerator": "cpu", "threads": 1, "deepspeed": False}


def test_progress_of_rank_0_arrives_in_order(group: RankGroup) -> None:
    seen: list[Any] = []
    assert group.call("count", on_progress=seen.append, to=3) == 3
    assert seen == [{"rank": 0, "number": number} for number in range(3)]
    assert group.call("count", to=2) == 2  # nobody listens


def test_commands_of_several_threads_run_one_after_the_other(group: RankGroup) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda number: group.call("echo", number=number), range(20)))
    assert [each["arguments"]["number"] for each in results] == list(range(20))  # type: ignore[index, call-overload]
    assert len({each["calls"] for each in results}) == 20  # type: ignore[index, call-overload]


def test_an_argument_that_is_not_json_is_refused_without_harm(group: RankGroup) -> None:
    with pytest.raises(TypeError, match="Tensor is not JSON"):
        group.call("echo", wrong=torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Tensor is not JSON"):
        make_group(setup={"wrong": torch.ones(1)})
    assert group.call("count", to=1) == 1


@pytest.mark.slow
def test_a_rank_killed_while_the_others_hang_is_named_and_nothing_of_the_group_is_left(make: Make) -> None:
    group = make()
    everything = processes(group)
    victim: list[float] = []

    def kill_rank_1(_: dict[str, Any]) -> None:
        time.sleep(0.3)  # rank 0 is in the collective
        victim.append(time.monotonic())
        os.kill(group.pids[1], signal.SIGKILL)

    with pytest.raises(RankLostError) as caught:
        group.call("collective", on_progress=kill_rank_1, without=1)
    assert time.monotonic() - victim[0] < 10
    message = str(caught.value)
    assert f"rank 1 (pid {everything[1]}) was killed" in message
    assert f"pid {everything[0]}" not in message
    assert "'collective'" in message and "all 2 ranks were killed" in message and "starts a fresh group" in message
    assert left_of(everything, 1) == [] and not group.alive
    assert not group._processes.folder.exists()
    with pytest.raises(RankLostError, match=r"closed or failed before; the next attempt starts a fresh group"):
        group.call("count", to=1)


@pytest.mark.slow
def test_an_exception_in_one_rank_comes_with_its_traceback_and_ends_the_group(make: Make, tmp_path: Path) -> None:
    group = make(folder=tmp_path)
    everything = processes(group)
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        group.call("fail", rank=1)
    assert time.monotonic() - began < 10
    message = str(caught.value)
    assert message.startswith("rank 1 raised ZeroDivisionError: only here in 'fail'")
    assert 'raise ZeroDivisionError("only here")' in message and "rank_handlers.py" in message
    assert left_of(everything, 1) == [] and not group.alive
    assert "a line in the log" in (tmp_path / "ranks.log").read_text()


@pytest.mark.slow
def test_an_error_of_ours_raised_by_all_ranks_surfaces_as_that_class(make: Make) -> None:
    group = make()
    with pytest.raises(NonFiniteError, match=r"^loss is nan in iteration 3 \(rank [01]\)$"):
        group.call("refuse")
    assert not group.alive


@pytest.mark.slow
def test_ranks_that_hang_past_the_deadline_are_named_with_where_they_hang(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "ranks.log"
    log.write_text("of an earlier group\n")
    group = make(command_seconds=3.0, folder=tmp_path)
    everything = processes(group)
    began = time.monotonic()
    with pytest.raises(RankLostError) as caught:
        group.call("collective", without=1)
    assert 3 <= time.monotonic() - began < 10
    message = str(caught.value)
    assert f"rank 0 (pid {everything[0]}), rank 1 (pid {everything[1]}) did not answer" in message
    assert "command_seconds=3," in message and f"The last lines of {log}:\n" in message
    assert "earlier group" not in message and log.read_text().startswith("of an earlier group\n")
    assert "in all_reduce" in message and 'rank_handlers.py", line' in message
    assert left_of(everything, 1) == []


@pytest.mark.slow
def test_a_death_between_two_commands_is_seen_before_and_by_the_next(make: Make) -> None:
    group = make()
    everything = processes(group)
    group.call("die_later", seconds=0.5)
    assert left_of(everything, 30) == []
    assert not group.alive
    with pytest.raises(RankLostError, match=rf"rank 1 \(pid {everything[1]}\) was killed(.|\n)*exitcode *: -9"):
        group.call("count", to=1)


@pytest.mark.slow
def test_ranks_die_with_torchrun(make: Make) -> None:
    group = make(ranks=1)
    os.kill(group._processes.agent.pid, signal.SIGKILL)
    assert left_of(group.pids, 5) == []
    with pytest.raises(RankLostError):
        group.call("count", to=1)


@pytest.mark.slow
def test_closing_from_another_thread_ends_a_running_command(make: Make) -> None:
    group = make()
    everything = processes(group)
    running = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(group.call, "collective", lambda _: running.set(), without=1)
        assert running.wait(30)
        began = time.monotonic()
        group.close()
        assert time.monotonic() - began < 10
        with pytest.raises(RankLostError, match="was killed"):
            result.result()
    assert left_of(everything, 1) == []


@pytest.mark.slow
def test_an_interrupted_command_ends_the_group(make: Make) -> None:
    def interrupt(_: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    group = make(ranks=1)
    everything = processes(group)
    with pytest.raises(KeyboardInterrupt):
        group.call("collective", on_progress=interrupt, without=0)
    assert left_of(everything, 1) == [] and not group.alive


@pytest.mark.slow
def test_after_a_failure_a_new_group_works_and_closing_it_leaves_no_process_and_no_folder(make: Make) -> None:
    with pytest.raises(RankError, match="Tensor is not JSON serializable"):
        make(ranks=1).call("no_json")
    with make_group() as group:
        everything, folder = processes(group), group._processes.folder
        assert group.alive and folder.exists() and _runs(everything[0])
        assert group.call("count", to=1) == 1
    assert left_of(everything, 1) == [] and not folder.exists() and not group.alive
    assert group._processes.agent.returncode == 0  # the ranks ended by themselves
    group.close()  # again does nothing


PARENT = """
from grpo_lib.placement.ranks import RankGroup
group = RankGroup(ranks=2, handler="rank_handlers:Handler", setup={}, device="cpu", threads=1,
                  start_seconds=180, command_seconds=600)
print(*group.pids, group._processes.agent.pid, group._processes.folder, flush=True)
END
"""
HANGS = "group.call('collective', on_progress=lambda _: print('hangs', flush=True), without=1)"


@pytest.mark.slow
def test_no_process_is_left_when_the_parent_is_killed_while_the_ranks_hang() -> None:
    command = [sys.executable, "-c", PARENT.replace("END", HANGS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        *pids, folder = parent.stdout.readline().split()
        assert parent.stdout.readline() == "hangs\n"
        time.sleep(0.3)
        *ranks, agent = map(int, pids)
        assert left_of([*ranks, agent], 0) == [*ranks, agent]
        parent.kill()
    assert left_of(ranks, 2) == []
    assert left_of([agent], 30) == []
    shutil.rmtree(folder)  # nobody was left to remove it


@pytest.mark.slow
def test_a_parent_that_forgets_to_close_leaves_no_process_and_no_folder() -> None:
    command = [sys.executable, "-c", PARENT.replace("END", "")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    *pids, folder = done.stdout.split()
    assert left_of(map(int, pids), 1) == [] and not Path(folder).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"handler": "no_such_module:X", "ranks": 1}, RankError, "No module named 'no_such_module'"),
        ({"handler": "rank_handlers:raising"}, RankError, "ValueError: no model at /models/tiny in 'start'"),
        ({"handler": "rank_handlers:refusing", "ranks": 1}, ConfigError, "^trainer.max_tokens=0 must be at least 1$"),
    ],
)
def test_a_group_that_can_not_start_says_why_at_once(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = time.monotonic()
    with pytest.raises(error, match=message):
        make_group(**settings, start_seconds=600.0)
    assert time.monotonic() - before < 60


def test_a_torchrun_that_ends_at_once_is_noticed_and_the_message_has_the_end_of_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    with pytest.raises(RankLostError, match=r"torchrun ended with code \d+(.|\n)*not kept(.|\n)*No module named"):
        make_group()


def test_ranks_that_do_not_come_up_in_time_are_named() -> None:
    with pytest.raises(RankLostError, match=r"rank 0, rank 1 did not come up within start_seconds=0.2"):
        make_group(start_seconds=0.2)


def failure(rank: int, at: float, error: str | None = None) -> dict[str, Any]:
    return {"rank": rank, "at": at, "error": error, "message": f"of {rank}", "summary": f"E: {rank}", "traceback": "T"}


def test_of_different_errors_the_first_by_time_is_shown_and_the_others_mentioned() -> None:
    failures = [failure(0, 2.0, "NonFiniteError"), failure(1, 1.0), failure(2, 3.0)]
    error = ranks._failed(failures, "update", "rank", "all were killed")
    assert type(error) is RankError
    assert str(error).startswith("rank 1 raised E: 1 in 'update'; rank 0 raised E: 0; rank 2 raised E: 2; all were")


@pytest.mark.parametrize("name", ["GrpoErrors", "__builtins__", "__doc__", "os.system"])
def test_only_errors_of_ours_are_looked_up_by_name(name: str) -> None:
    assert type(ranks._failed([failure(0, 1.0, name)], "update", "rank", "all were killed")) is RankError


def test_a_subclass_defined_elsewhere_travels_as_the_class_of_ours() -> None:
    class Stranger(NonFiniteError):
        pass

    assert failure_of(Stranger("nan"))["error"] == "NonFiniteError"
    assert failure_of(ValueError("no"))["error"] is None


def test_a_message_that_arrives_in_pieces_is_put_together() -> None:
    ours, theirs = socket.socketpair()
    line = Line(ours)
    theirs.sendall(b'{"a": 1}\n{"b"')
    assert line.receive() == [{"a": 1}]
    theirs.sendall(b": 2")
    assert line.receive() == []
    theirs.sendall(b"}\n")
    assert line.receive() == [{"b": 2}]
    theirs.close()
    assert line.receive() is None
    line.close()


def test_a_pid_that_now_belongs_to_another_process_is_not_killed() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other, socket.socket() as unused:
        group = Processes(Path("/nonexistent"), other, {0: Member(Line(unused), other.pid, "1")})
        group.signal(signal.SIGKILL)
        time.sleep(0.1)
        assert other.poll() is None
        group.members[0] = Member(Line(unused), other.pid, born(other.pid))
        group.signal(signal.SIGKILL)
        assert other.wait(5) == -signal.SIGKILL


def test_a_temporary_folder_with_a_long_name_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    folder, listening = listener()
    listening.close()
    assert folder.parent == Path("/tmp")
    (folder / "socket").unlink()
    folder.rmdir()


def test_collectives_of_a_world_of_one_change_nothing() -> None:
    world = World.alone(torch.device("cpu"))
    assert (world.rank, world.size) == (0, 1)
    world.barrier()
    assert [each(torch.tensor([2.0])).item() for each in (world.sum_, world.max_)] == [2.0, 2.0]


def test_a_process_alone_belongs_to_no_group_and_goes_like_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")  # of this process, if a launcher had started it
    alone = {
        "ranks": 1, "handler": "rank_handlers:Alone", "setup": {"a": 1}, "alone": {"GRPO_TESTS_ALONE": "yes"},
        "name": "the helper",
    }  # fmt: skip
    group = make(**alone)
    assert group.call("seen") == {"setup": {"a": 1}, "GRPO_TESTS_ALONE": "yes", "RANK": None, "OMP_NUM_THREADS": "1"}
    assert os.environ.get("GRPO_TESTS_ALONE") is None
    with pytest.raises(ConfigError, match=r"^no such weights$"):
        group.call("refuse")
    with pytest.raises(RankLostError, match=r"found no process of the helper: .* the next attempt starts another"):
        group.call("seen")
    assert left_of(processes(group), 10) == []
    second = make(**alone)
    os.kill(second.pids[0], signal.SIGKILL)
    with pytest.raises(RankLostError, match=r"the helper 0 \(pid \d+\) was killed(.|\n)*starts another"):
        second.call("seen")
    third = make(**alone)
    third.close()
    assert left_of(processes(third), 10) == []
