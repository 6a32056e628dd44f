"""Programs that mean harm, in the sandbox: none gets what it wants, and nothing of it stays.

Where a level is not installed its tests hold that the message says what to do.
"""

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_lib.errors import ConfigError, MissingPackageError, RewardError
from grpo_lib.rewards.sandbox import Limits, Ran, check_level, run
from grpo_lib.rewards.sandbox_levels import STRONG, socket_filter

ROOT = Path(__file__).parents[3]
strong = pytest.mark.parametrize("level", STRONG)
local = pytest.mark.parametrize("level", [*STRONG, "limits"])


@cache
def refusal(level: str) -> str | None:
    """Why a level does not work on this machine."""
    try:
        check_level(level)
    except (ConfigError, MissingPackageError) as error:
        return str(error)
    return None


def ran_in(level: str, program: str, stdin: str = "", **limits: Any) -> Ran:
    """Runs it, or ends the test when it has held the message of a level that there is not."""
    why = refusal(level)
    if why is None:
        return run(program, stdin, level=level, limits=Limits(**{"wall_seconds": 30.0, "cpu_seconds": 20.0} | limits))
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        with pytest.raises(MissingPackageError, match=r"apt-get install bubblewrap; .* namespaces .* limits .* remote"):
            run(program, level=level)
    else:
        assert "does not work here" in why and "limits (weak)" in why
        with pytest.raises(RewardError, match="does not work here"):
            run(program, level=level)
    raise NotHereError


class NotHereError(Exception):
    """The level's message was held."""


def held(test: Any) -> Any:
    """A test that ends well where its level is not installed and says so rightly."""

    @wraps(test)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            test(*args, **kwargs)
        except NotHereError:
            return

    return wrapped


def marked(mark: str) -> list[int]:
    """Processes with a word in their command line."""
    found = []
    for each in psutil.process_iter(["cmdline"]):
        if any(mark in word for word in each.info["cmdline"] or ()) and each.pid != os.getpid():
            found.append(each.pid)
    return found


def gone(mark: str, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while marked(mark):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@local
@held
def test_a_program_gets_its_input_and_gives_output_and_status(level: str) -> None:
    ran = ran_in(level, "import sys\nprint(input()[::-1])\nprint('é', file=sys.stderr)\nsys.exit(3)", "abc\n")
    assert (ran.stdout, ran.stderr, ran.code, ran.why) == ("cba\n", "é\n", 3, None)


@local
@held
def test_an_exception_ends_with_status_1_and_a_traceback_and_a_signal_with_its_number(level: str) -> None:
    ran = ran_in(level, "x = 1\nx / 0")
    assert ran.code == 1 and ran.why is None and 'File "program.py", line 3' in ran.stderr
    assert ran_in(level, "import ctypes; ctypes.string_at(0)").code == -signal.SIGSEGV


@local
@held
def test_long_input_that_nobody_reads_and_input_longer_than_a_pipe(level: str) -> None:
    assert ran_in(level, "print(1)", "x" * 10**6).stdout == "1\n"
    assert ran_in(level, "import sys; print(len(sys.stdin.read()))", "x" * 10**6).stdout == "1000000\n"
    assert ran_in(level, "").code == 0


@strong
@held
def test_no_network_not_even_this_machine(level: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"\0grpo-test-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        ran = ran_in(
            level,
            f"""
import socket
for kind, place in [(socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})), (socket.AF_INET, ("1.1.1.1", 53)),
                    (socket.AF_INET6, ("::1", {server.getsockname()[1]})), (socket.AF_UNIX, {name!r})]:
    try:
        with socket.socket(kind) as one:
            one.settimeout(2)
            one.connect(place)
        print("connected", place)
    except OSError as error:
        print("no")
""",
        )
    assert ran.stdout == "no\n" * 4


@strong
@held
def test_no_socket_of_a_kind_that_no_network_namespace_holds(level: str) -> None:
    """Of a virtual machine to its host (40), to the kernel (16, 38), nor by calls with other numbers."""
    ran = ran_in(
        level,
        """
import ctypes, os, socket
for kind in (1, 2, 10, 16, 17, 38, 40):
    try:
        socket.socket(kind, socket.SOCK_STREAM).close()
        print(kind, "made")
    except OSError as error:
        print(kind, error.errno)
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(425, 4, None), ctypes.get_errno())
print(socket.socketpair()[0].family)
if os.fork() == 0:
    os.execv("/usr/bin/env", ["env", os.sys.executable, "-c", "import socket; socket.socket(40, 1)"])
print(os.waitstatus_to_exitcode(os.wait()[1]))
""",
    )
    lines = ["1 made", "2 made", "10 made", "16 1", "17 1", "38 1", "40 1", "-1 1", "1", "1"]
    assert ran.stdout.splitlines() == lines
    assert "PermissionError: [Errno 1] Operation not permitted" in ran.stderr


@pytest.mark.parametrize(
    ("machine", "architecture", "socket_call", "pair_call"),
    [("x86_64", 0xC000003E, 41, 53), ("aarch64", 0xC00000B7, 198, 199)],
)
def test_the_rules_for_sockets_are_right_for_each_architecture(
    machine: str, architecture: int, socket_call: int, pair_call: int
) -> None:
    rules = [*struct.iter_unpack("<HBBI", socket_filter(machine))]

    def given(call: int, first: int = 0, on: int = architecture) -> str:
        """What the kernel would do with a system call and its first argument."""
        seen, place, value = struct.pack("<IIQQ", call, on, 0, first), 0, 0
        while True:
            code, if_so, if_not, number = rules[place]
            if code == 0x06:
                return {0x7FFF0000: "allowed", 0x00050001: "EPERM"}[number]
            if code == 0x20:
                (value,) = struct.unpack_from("<I", seen, number)
                place += 1
            else:
                so = {0x15: value == number, 0x35: value >= number}[code]
                place += 1 + (if_so if so else if_not)

    for call in (socket_call, pair_call):
        assert [kind for kind in range(50) if given(call, kind) == "allowed"] == [1, 2, 10]
        assert given(call, 2**32 + 40) == "EPERM"  # the kernel looks at the lower half
    assert {given(call, 40) for call in range(500) if call not in (socket_call, pair_call, 425)} == {"allowed"}
    assert given(425) == "EPERM" and given(0x40000000 + 41, 40) == "EPERM"
    assert {given(call, on=0x40000003) for call in (1, 102, 359)} == {"EPERM"}
    assert {given(call, on=0x40000028) for call in (1, 281)} == {"EPERM"}
    assert socket_filter("riscv64") == b""


@strong
@held
def test_without_the_rules_for_sockets_no_program_runs(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran_in(level, "")
    monkeypatch.setattr("grpo_lib.rewards.sandbox_levels.socket_filter", lambda _: b"no rule.")
    with pytest.raises(RewardError, match=r"does not work here: .*\[Errno 22\] this kernel takes no seccomp filter"):
        run("print(1)", level=level)


@strong
@held
def test_no_file_of_this_machine_beyond_python_and_the_system(level: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    secret.chmod(0o666)
    places = [str(secret), str(ROOT), __file__, os.getcwd(), "/etc/shadow", "/etc/passwd", "/proc", "/sys", "/var"]
    places += ["/proc/1/environ", "/proc/self/root", "/dev/sda", "/dev/vda", "/dev/mem", "/dev/tty", "/old", "/r"]
    home = [str(each) for each in Path.home().iterdir() if not sys.base_prefix.startswith(str(each))]
    ran = ran_in(level, f"import os\nprint([each for each in {places + home!r} if os.path.lexists(each)])")
    assert ran.stdout == "[]\n"
    listed = ran_in(level, "import os\nprint(sorted(os.listdir('/')), os.listdir('/tmp'), os.getcwd())").stdout
    top = {sys.base_prefix.split("/")[1]}
    known = {"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "tmp", "dev"} | top
    names = listed[: listed.index("]") + 1]
    assert set(json.loads(names.replace("'", '"'))) <= known
    assert listed[len(names) :].split() == ["[]", "/tmp"]


@strong
@held
def test_no_way_out_by_links_or_parents(level: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    ran = ran_in(
        level,
        f"""
import os
def attempt(action):
    try:
        print("GOT", action())
    except OSError:
        print("no")
def link():
    os.symlink({str(secret)!r}, "/tmp/link")
    return open("/tmp/link").read()
def up():
    return open("/tmp" + "/.." * 20 + {str(secret)!r}).read()
def chroot():
    os.mkdir("/tmp/jail")
    top = os.open("/", os.O_RDONLY)
    os.chroot("/tmp/jail")
    os.fchdir(top)
    return os.listdir("../../../..")
def hard():
    os.link("/usr/bin/env", "/tmp/hard")
for action in (link, up, chroot, hard):
    attempt(action)
""",
    )
    assert ran.stdout == "no\n" * 4


@local
@held
def test_the_environment_is_clean(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    ran = ran_in(level, "import os, sys\nprint(sorted(os.environ), sys.argv, sys.path)")
    assert "the-secret" not in ran.stdout and "AWS" not in ran.stdout and "nowhere" not in ran.stdout
    assert "'PATH'" in ran.stdout


@strong
@held
def test_only_tmp_can_be_written(level: str) -> None:
    ran = ran_in(
        level,
        """
import os
written = []
for folder, names, _ in os.walk("/"):
    try:
        with open(os.path.join(folder, "new"), "w") as file:
            file.write("x")
        written.append(folder)
    except OSError:
        pass
print(written)
for name in ("/usr/bin/env", os.__file__, "/dev/shm/x"):
    try:
        open(name, "a")
        print("opened", name)
    except OSError:
        pass
""",
        wall_seconds=300.0,  # every folder of the machine's programs is tried
        cpu_seconds=200.0,
    )
    assert ran.stdout == "['/tmp']\nopened /dev/shm/x\n"  # /dev/shm is a name of /tmp


@strong
@held
def test_a_full_tmp_is_bounded_in_bytes_and_in_files(level: str) -> None:
    ran = ran_in(
        level,
        """
import os
total = 0
try:
    for number in range(10**6):
        with open(f"/tmp/{number}", "wb") as file:
            total += file.write(bytes(2**20))
            file.flush()
except OSError as error:
    print(error.strerror, total // 2**20)
for number in range(100):
    if os.path.exists(f"/tmp/{number}"):
        os.unlink(f"/tmp/{number}")
try:
    with open("/tmp/large", "wb") as file:
        for _ in range(100):
            file.write(bytes(2**20))
except OSError as error:
    print(error.strerror)
""",
        disk_mib=4,
    )
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("No space left on device") and int(lines[0].split()[-1]) <= 4
    assert lines[1] in ("No space left on device", "File too large")


@strong
@held
def test_a_fork_bomb_gets_no_further_than_the_limit(level: str) -> None:
    ran = ran_in(
        level,
        """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            while True:
                try:
                    os.fork()
                except OSError:
                    time.sleep(0.01)
        made += 1
except OSError as error:
    print(made, error.strerror, flush=True)
""",
        processes=12,
    )
    made, _, said = ran.stdout.strip().partition(" ")
    assert int(made) <= 12 and said == "Resource temporarily unavailable"


@strong
@held
def test_a_memory_bomb_fails_in_one_process_and_is_ended_over_several(level: str) -> None:
    ran = ran_in(level, "x = bytearray(2**30)", memory_mib=200)
    assert ran.code == 1 and "MemoryError" in ran.stderr
    ran = ran_in(
        level,
        """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(b"x") * (100 * 2**20)
        time.sleep(60)
time.sleep(60)
""",
        memory_mib=200,
    )
    assert ran.why == "memory" and ran.code == -signal.SIGKILL


@strong
@held
def test_signals_reach_nobody_outside(level: str) -> None:
    victim = subprocess.Popen(["sleep", "60"])
    try:
        ran = ran_in(
            level,
            f"""
import os, signal
for pid in [os.getppid(), {os.getpid()}, {victim.pid}, *range(1, 5000)]:
    if pid != os.getpid():
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
print("alive", flush=True)
os.kill(-1, signal.SIGKILL)
""",
        )
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
    assert ran.stdout in ("alive\n", "")


@strong
@held
def test_there_is_no_way_to_more_rights(level: str) -> None:
    ran = ran_in(
        level,
        """
import ctypes, os
libc = ctypes.CDLL(None)
user, mount, net = 0x10000000, 0x00020000, 0x40000000
print([libc.unshare(each) for each in (user, mount, net, user | mount)])
print(libc.mount(b"x", b"/tmp", b"tmpfs", 0, None), libc.umount2(b"/tmp", 2), libc.chroot(b"/tmp"))
print(libc.mknod(b"/tmp/disk", 0o60666, 0xfe00), libc.setgroups(0, None), libc.sethostname(b"x", 1))
print(libc.mount(None, b"/usr", None, 4096 | 32, None))
""",
    )
    first, second, third, fourth = ran.stdout.splitlines()
    assert first == "[-1, -1, -1, -1]" and second == "-1 -1 -1" and third == "-1 -1 -1" and fourth == "-1"


@local
@held
def test_giant_output_is_cut_and_ends_the_program(level: str) -> None:
    for stream in ("stdout", "stderr"):
        ran = ran_in(level, f"import sys\nwhile True: sys.{stream}.write('x' * 10**6)", output_kib=100)
        assert ran.seconds < 25 and ran.why == "output" and 100 * 1024 < len(getattr(ran, stream)) < 200 * 1024


@local
@held
def test_sleep_ends_by_the_clock_and_a_loop_by_its_processor_time(level: str) -> None:
    ran = ran_in(level, "import sys, time\nprint(1, flush=True)\nsys.stdout.close()\ntime.sleep(60)", wall_seconds=2.0)
    assert (ran.why, ran.code, ran.stdout) == ("wall time", -signal.SIGKILL, "1\n") and 2 <= ran.seconds < 25
    ran = ran_in(level, "while True: pass", cpu_seconds=1.0)
    assert (ran.why, ran.code) == ("cpu time", -signal.SIGKILL) and ran.seconds < 25
    ran = ran_in(level, "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: 0)\nwhile True: pass", cpu_seconds=1.0)
    assert (ran.why, ran.code) == ("killed", -signal.SIGKILL)


@strong
@held
def test_processes_in_the_background_end_with_the_program(level: str) -> None:
    mark = f"9{os.getpid()}.{time.time_ns()}"
    ran = ran_in(
        level,
        f"""
import os, subprocess
for _ in range(3):
    subprocess.Popen(["sleep", "{mark}"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execlp("sleep", "sleep", "{mark}")
else:
    print("done")
""",
    )
    assert ran.stdout == "done\n" and ran.why is None and ran.seconds < 25
    assert not marked(mark)


@local
@held
def test_an_exception_in_this_process_ends_the_program(level: str) -> None:
    mark = f"9{os.getpid()}.{time.time_ns()}"
    ran_in(level, "")

    def ring(number: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 1.5)
    try:
        with pytest.raises(TimeoutError):
            ran_in(level, f"import subprocess\nsubprocess.run(['sleep', '{mark}'])")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert gone(mark)


@local
@held
def test_the_death_of_this_process_ends_the_program(level: str, tmp_path: Path) -> None:
    mark = f"9{os.getpid()}.{time.time_ns()}"
    ran_in(level, "")
    program = f"import os\\nos.execlp('sleep', 'sleep', '{mark}')"
    caller = (
        f'from grpo_lib.rewards.sandbox import *\nrun("{program}", level="{level}", limits=Limits(wall_seconds=60.0))'
    )
    env = os.environ | {"TMPDIR": str(tmp_path)}  # the weak level's folder stays there
    with subprocess.Popen([sys.executable, "-c", caller], cwd=ROOT, env=env) as process:
        until = time.monotonic() + 30
        while not (found := [pid for pid in marked(mark) if psutil.Process(pid).name() == "sleep"]):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.1)
        process.kill()
    assert found and gone(mark)


@local
@held
def test_nothing_is_left_of_a_hundred_programs(level: str) -> None:
    ran_in(level, "")

    def strangers() -> set[int]:
        return {each.pid for each in psutil.process_iter(["uids"]) if each.info["uids"].real >= 2**30}

    def left() -> tuple[Any, ...]:
        files = {each.name for each in Path(tempfile.gettempdir()).iterdir() if each.name.startswith("sandbox-")}
        children = {each.pid for each in psutil.Process().children(recursive=True)}
        return Path("/proc/self/mountinfo").read_text(), files, children, len(os.listdir("/proc/self/fd"))

    others, before = strangers(), left()
    programs = ["print(1)", "1 / 0", "import os; os.fork()", "open('file', 'w').write('x')"]
    for number in range(100):
        ran_in(level, programs[number % 4])
    assert left() == before and not strangers() - others


def test_an_unknown_level_and_a_limit_out_of_bounds_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'docker' is unknown; bubblewrap: .*namespaces: .*limits: weak.*remote: "):
        run("", level="docker")
    with pytest.raises(ConfigError, match="memory_mib=1: must be at least 64"):
        Limits(memory_mib=1)
    with pytest.raises(ConfigError, match="wall_seconds=-1"):
        Limits(wall_seconds=-1.0)


def test_a_level_that_does_not_work_says_why_and_names_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [sys.executable, "-c", "import sys; sys.exit('mount: permission denied')"]
    monkeypatch.setattr("grpo_lib.rewards.sandbox.command", lambda *_: broken)
    with pytest.raises(RewardError, match="'namespaces' does not work here: mount: permission denied"):
        run("print(1)", level="namespaces")
    with pytest.raises(
        ConfigError, match=r"permission denied; levels: bubblewrap .*namespaces, limits \(weak\), remote"
    ):
        check_level("namespaces")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingPackageError, match="needs bwrap"):
        check_level("bubblewrap")


@pytest.mark.parametrize(
    ("does", "options", "why"),
    [
        ("time.sleep(60)", {"wall_seconds": 0.5}, r"did not start: ended for wall time after 0\.5 s: slow mount"),
        ("[print('x' * 10**6) for _ in range(100)]", {"wall_seconds": 60.0}, "did not start: ended for output after"),
        ("x = bytearray(b'x') * 2**28; time.sleep(60)", {"wall_seconds": 60.0}, "did not start: ended for memory"),
        ("os.kill(os.getpid(), 9)", {}, "does not work here: slow mount"),
    ],
)
@pytest.mark.parametrize("level", ["namespaces", "limits"])
def test_a_sandbox_that_has_not_started_says_nothing_about_the_program(
    level: str, does: str, options: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"import os, sys, time\nprint('slow mount', file=sys.stderr, flush=True)\n{does}"
    monkeypatch.setattr("grpo_lib.rewards.sandbox.command", lambda *_: [sys.executable, "-c", script])
    with pytest.raises(RewardError, match=f"sandbox level '{level}' {why}"):
        run("print(1)", level=level, limits=Limits(memory_mib=128, **options))


def test_the_weak_level_has_a_folder_that_is_gone_afterwards() -> None:
    folder = run("import os\nopen('x', 'w')\nprint(os.getcwd())", level="limits").stdout.strip()
    assert Path(folder).name.startswith("sandbox-") and not os.path.exists(folder)


@contextmanager
def service(answer: Any = None, status: int = 200) -> Iterator[str]:
    """A remote sandbox that runs what it gets at the weak level, or says always the same."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = answer
            if said is None:
                ran = run(asked["program"], asked["stdin"], level="limits", limits=Limits(**asked["limits"]))
                said = {"stdout": ran.stdout, "stderr": ran.stderr, "code": ran.code, "reason": ran.why}
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/run"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_remote_sandbox_gets_program_input_and_limits() -> None:
    with service() as address:
        check_level("remote", address)
        ran = run("print(input())\nraise SystemExit(4)", "hi", level="remote", endpoint=address)
        assert (ran.stdout, ran.stderr, ran.code, ran.why) == ("hi\n", "", 4, None)
        slow = Limits(wall_seconds=1.0)
        ran = run("import time; time.sleep(60)", level="remote", endpoint=address, limits=slow)
        assert ran.why == "wall time"


def test_a_remote_sandbox_that_fails_says_nothing_about_the_program() -> None:
    with pytest.raises(ConfigError, match="needs the endpoint"):
        run("", level="remote")
    with service({"error": "no"}, status=500) as address, pytest.raises(RewardError, match=r"/run failed: .*500"):
        run("", level="remote", endpoint=address)
    with service({"stdout": "x"}) as address, pytest.raises(RewardError, match="failed: KeyError: 'stderr'"):
        run("", level="remote", endpoint=address)
    with pytest.raises(RewardError, match="failed: ConnectError"):
        run("", level="remote", endpoint=address)


SAID: dict[str, Any] = {"stdout": "4\n", "stderr": "", "code": 0, "reason": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reason": ""}, "reason '' is neither null nor one of cpu time, wall time, memory, output, killed"),
        ({"reason": "none"}, "reason 'none' is neither null nor one of"),
        ({"reason": False}, "reason 'False' is neither null"),
        ({"reason": ["memory"]}, "is neither null"),
        ({"code": None}, "stdout and stderr must be texts, and code a whole number"),
        ({"code": 0.5}, "code a whole number"),
        ({"code": True}, "code a whole number"),
        ({"stdout": None}, "stdout and stderr must be texts"),
        ({"stderr": 1}, "stdout and stderr must be texts"),
    ],
)
def test_an_answer_of_a_remote_sandbox_that_is_none_is_its_error(change: dict[str, Any], message: str) -> None:
    with service(SAID | change) as address, pytest.raises(RewardError, match=f"/run failed: .*{message}"):
        run("", level="remote", endpoint=address)


def test_every_known_reason_of_a_remote_sandbox_is_taken() -> None:
    for reason in (None, "cpu time", "wall time", "memory", "output", "killed"):
        with service(SAID | {"reason": reason}) as address:
            ran = run("", level="remote", endpoint=address)
        assert (ran.stdout, ran.code, ran.why) == ("4\n", 0, reason)
