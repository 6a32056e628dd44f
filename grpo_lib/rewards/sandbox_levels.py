"""The command that starts Python behind the walls of a level.

What a program finds behind those of `bubblewrap` and `namespaces`: ``/usr``, ``/bin``, ``/lib*`` and Python's own
folder, read-only; ``/dev`` with null, zero and urandom; ``/tmp``, small and in memory. No ``/proc``, ``/etc`` or home;
no network, not even 127.0.0.1; no other process. It has no capability and can't get one. Sockets of the kinds that no
network namespace holds back (of a virtual machine to its host, AF_VSOCK) it can't make: `socket_filter`.

The root that it sees is a folder in the file system's root, entered by chroot after all else is gone: in a chroot the
kernel makes no user namespaces, in which it would have capabilities again and could mount.
"""

import os
import re
import shlex
import shutil
import struct
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from grpo_lib.errors import ConfigError, MissingPackageError

LEVELS = {
    "bubblewrap": "namespaces made by bwrap",
    "namespaces": "the same made by util-linux, where the kernel lets this user",
    "limits": "weak: limits, a temporary folder and a clean environment, with this user's files and network",
    "remote": "a service of yours, by HTTP",
}
STRONG = ("bubblewrap", "namespaces")
INSIDE = "/r"
"""The program's root, before chroot."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
OPEN_FILES = 64

BOOT = f"""
def start():
    import os, resource, sys
    folder, sockets, (file, cpu, memory, processes, disk) = *sys.argv[1:3], map(int, sys.argv[3:])
    os.chdir(folder)
    if sockets:
        import ctypes, struct
        libc, rules = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(bytes.fromhex(sockets))
        # PR_SET_NO_NEW_PRIVS; PR_SET_SECCOMP to SECCOMP_MODE_FILTER
        head = struct.pack("HP", len(sockets) // 16, ctypes.addressof(rules))
        if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, head):
            raise OSError(ctypes.get_errno(), "this kernel takes no seccomp filter")
    bounds = dict(CPU=cpu, AS=memory, NPROC=processes, FSIZE=disk, NOFILE={OPEN_FILES}, CORE=0, MSGQUEUE=0)
    for name, most in bounds.items():
        number = getattr(resource, "RLIMIT_" + name, None)
        if number is not None and most >= 0:
            hard = resource.getrlimit(number)[1]
            most = most if hard < 0 else min(most, hard)
            later = most + 1 if name == "CPU" and most != hard else most  # a signal that says why, then the end
            resource.setrlimit(number, (most, later))
    with os.fdopen(file, encoding="utf-8") as program:
        text = program.read()
    sys.argv[:] = ["program.py"]
    if os.getpid() == 1:  # signals mean nothing to the first process of a namespace, so a second one is the program
        child = os.fork()
        while child:
            ended, status = os.wait()
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
    del globals()["start"]
    return compile(text, "program.py", "exec")
exec(start())
"""
"""Sets filter and limits, reads the program from the open file it was given, closes that, and becomes the program."""


def check_name(level: str) -> None:
    """
    Raises:
        ConfigError: there is no such level.
    """
    if level not in LEVELS:
        known = "; ".join(f"{name}: {what}" for name, what in LEVELS.items())
        raise ConfigError(f"sandbox level {level!r} is unknown; {known}")


def command(level: str, file: int, cpu_seconds: int, memory: int, processes: int, disk: int) -> list[str]:
    """The command line; it runs in ``/``, or in the temporary folder that `limits` needs.

    Args:
        file: descriptor of the program's text.
        memory, disk: bytes.

    Raises:
        MissingPackageError: bwrap or a tool of util-linux is not installed.
    """
    folder = "/tmp" if level in STRONG else "."
    # RLIMIT_NPROC counts what the user runs elsewhere too, where the program has no user of its own
    bounds = [file, cpu_seconds, memory, processes if level in STRONG else -1, disk]
    sockets = socket_filter(os.uname().machine).hex() if level in STRONG else ""
    python = [own_python(), "-s", "-P", "-B", "-c", BOOT, folder, sockets, *map(str, bounds)]
    if level == "limits":
        setpriv = shutil.which("setpriv")
        return [setpriv, "--pdeathsig", "KILL", "--", *python] if setpriv else python
    root = os.geteuid() == 0
    user = spare_user()
    dies = [_tool("setpriv"), "--pdeathsig", "KILL"]  # with its parent
    drop = [*dies, "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    if root:
        drop += ["--reuid", str(user), "--regid", str(user), "--clear-groups"]
    if level == "bubblewrap":
        return _bubblewrap([*(drop if root else dies), "--", *python], disk, root)
    return _namespaces([*drop, "--", *python], disk, root)


def socket_filter(machine: str) -> bytes:
    """For seccomp: sockets are AF_UNIX, AF_INET or AF_INET6, all of which the network namespace holds.

    Any other kind is refused (EPERM), and so are io_uring, which makes sockets unseen, and system calls of 32 bits,
    which have other numbers. Empty for an architecture that is not known here.
    """
    if machine not in _SYSTEM_CALLS:
        return b""
    architecture, numbers = _SYSTEM_CALLS[machine]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    rules = [  # what, how many rules to skip if so, if not, and the number
        (load, 0, 0, 4), (equal, 0, 9, architecture),
        (load, 0, 0, 0), (at_least, 7, 0, 0x40000000), (equal, 6, 0, 425),
        (equal, 1, 0, numbers[0]), (equal, 0, 5, numbers[1]),
        (load, 0, 0, 16), (equal, 3, 0, 1), (equal, 2, 0, 2), (equal, 1, 0, 10),
        (give, 0, 0, 0x00050001), (give, 0, 0, 0x7FFF0000),  # EPERM; the call itself
    ]  # fmt: skip
    return b"".join(struct.pack("<HBBI", *rule) for rule in rules)


_SYSTEM_CALLS = {"x86_64": (0xC000003E, (41, 53)), "aarch64": (0xC00000B7, (198, 199))}
"""The architecture's number, and those of socket and socketpair."""


def spare_user() -> int:
    """A user that runs nothing else, so that processes can be counted by user; nobody where numbers are few."""
    first, size = 2**30, 2**24
    ranges = [[int(each) for each in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    if any(start <= first and first + size <= start + count for start, _, count in ranges):
        return first + int.from_bytes(os.urandom(3))
    return 65534


def _namespaces(inside: Sequence[str], disk: int, root: bool) -> list[str]:
    unshare, setpriv = _tool("unshare"), _tool("setpriv")
    for each in ("mount", "umount", "pivot_root", "chroot", "sh"):
        _tool(each)
    here = [setpriv, "--pdeathsig", "KILL", "--", unshare, "-mpinu", "--fork", "--kill-child"]
    if not root:  # a new user namespace forgets --pdeathsig, so that comes first
        here = [unshare, "-U", "--map-root-user", "--", *here]
    return [*here, "--", "/bin/sh", "-ec", _script(disk), "sh", *inside]


@cache
def _script(disk: int) -> str:
    prefix = _prefix()
    place = next(
        each
        for each in ("/mnt", "/media", "/srv", "/opt", "/run", "/sys")
        if os.path.isdir(each) and not any(_within(source, each) for source in (prefix, "/usr"))
    )
    new = place + INSIDE
    lines = [
        "umask 022",
        "{ echo 0 > /proc/sys/kernel/shmmni; echo sandbox > /proc/sys/kernel/hostname; } 2>/dev/null || :",
        f"mount -t tmpfs -o mode=755,nosuid,nodev,size=1m sandbox {place}",
        f"mkdir -p {place}/old {place}/proc {new}/tmp {new}/dev \\",
        f"  {' '.join(shlex.quote(new + each) for each in _folders())}",
        f"touch {' '.join(new + each for each in DEVICES)}",
        *(f"mount --rbind {each} {new}{each}" for each in DEVICES),
        # until chroot the tools are found here; with a folder as its end, ln keeps the names
        f"ln -s {' '.join(INSIDE.strip('/') + each for each in ('/usr', *_system()))} {place}/",
    ]
    links = _links() | {"/dev/shm": "../tmp"}
    kept = [target for link, target in links.items() if f"/{os.path.basename(target)}" == link]
    lines += [f"ln -s {' '.join(kept)} {new}/"] if kept else []
    lines += [f"ln -s {target} {new}{link}" for link, target in links.items() if target not in kept]
    for folder in _folders():
        lines.append(f"mount -o rbind,ro,nosuid,nodev {shlex.quote(folder)} {shlex.quote(new + folder)}")
        for below in _mounts_below(folder):
            lines.append(f"mount -o remount,bind,ro,nosuid,nodev {shlex.quote(new + below)}")
    lines += [
        f"mount -t tmpfs -o mode=1777,nosuid,nodev,size={disk},nr_inodes=4096 tmp {new}/tmp",
        f"mount --rbind /proc {place}/proc",  # umount reads there what is mounted
        f"mount -o remount,bind,ro,nosuid,nodev {place}",
        f"cd {place}",
        "pivot_root . old",
        "cd /",
        "umount -l /old",
        "umount -l /proc",
        "unset PWD OLDPWD",
        f'exec chroot {INSIDE} "$@"',
    ]
    return "\n".join(lines)


def _bubblewrap(inside: Sequence[str], disk: int, root: bool) -> list[str]:
    new = INSIDE if root else ""
    made = [_bwrap(), "--die-with-parent", "--new-session", "--hostname", "sandbox", "--unshare-uts", "--unshare-ipc"]
    made += ["--unshare-net", "--unshare-cgroup-try", "--cap-drop", "ALL"]
    if root:  # bwrap gives up its rights, then can't end what runs as another user; so that is for unshare to do
        made = [_tool("setpriv"), "--pdeathsig", "KILL", "--", _tool("unshare"), "-p", "--fork", "--kill-child", *made]
        for capability in ("SETUID", "SETGID", "SETPCAP", "SYS_CHROOT"):
            made += ["--cap-add", f"CAP_{capability}"]
    else:
        made += ["--unshare-user", "--disable-userns", "--unshare-pid", "--as-pid-1"]
    for folder in _folders():
        for parent in [*reversed(Path(new + folder).parents)][1:]:
            made += ["--perms", "0755", "--dir", str(parent)]
        made += ["--ro-bind", folder, new + folder]
    for link, target in _links().items():
        made += ["--symlink", target, new + link]
    if root:
        for name in ("usr", *(each.strip("/") for each in _system())):
            made += ["--symlink", f"{INSIDE.strip('/')}/{name}", f"/{name}"]
    made += ["--perms", "0755", "--dir", f"{new}/dev"]
    for device in DEVICES:
        made += ["--dev-bind", device, new + device]
    made += ["--symlink", "../tmp", f"{new}/dev/shm", "--perms", "1777", "--size", str(disk), "--tmpfs", f"{new}/tmp"]
    made += ["--remount-ro", "/", "--chdir", "/", "--"]
    return [*made, *([_tool("chroot"), INSIDE] if root else []), *inside]


def _folders() -> list[str]:
    prefix = _prefix()
    system = [each for each in _system() if not os.path.islink(each)]
    return ["/usr", *system, *([] if any(_within(prefix, each) for each in ("/usr", *system)) else [prefix])]


def _system() -> list[str]:
    return [each for each in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32") if os.path.isdir(each)]


def _links() -> dict[str, str]:
    return {each: os.readlink(each).lstrip("/") for each in _system() if os.path.islink(each)}


def _prefix() -> str:
    return os.path.realpath(sys.base_prefix)


def own_python() -> str:
    """The interpreter that programs run in: this one, without its environment's packages."""
    return f"{_prefix()}/bin/python{sys.version_info.major}.{sys.version_info.minor}"


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _mounts_below(folder: str) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    places = [re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[4]) for line in lines]
    return [each for each in places if each != folder and _within(each, folder)]


def _bwrap() -> str:
    path = shutil.which("bwrap")
    if path is None:
        raise MissingPackageError(
            "sandbox level 'bubblewrap' needs bwrap 0.8 or later, which is not installed: apt-get install bubblewrap; "
            "or ask for another level: namespaces (as strong; root or user namespaces), limits (weak), remote"
        )
    return path


def _tool(name: str) -> str:
    path = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
    if path is None:
        raise MissingPackageError(
            f"the sandbox needs {name}, which is not installed: apt-get install util-linux coreutils"
        )
    return path
