"""The process that runs programs: forks one of itself for each, in namespaces of their own, with limits.

A script, started by `sandbox.py` with nothing of the run: no environment, no open files, no module of ours. It imports
once what programs import, and whatever it holds a program can read: asserts, but no output that is compared.

Source: namespaces(7), pid_namespaces(7), user_namespaces(7), seccomp(2), setrlimit(2), pivot_root(2).
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import json
import math
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from typing import Any

for _name in [
    "bisect",
    "collections",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "re",
    "string",
    "typing",
]:
    __import__(_name)  # for programs, to which an import of theirs is a look-up then

_NEW_NS, _NEW_IPC, _NEW_USER, _NEW_PID = 0x20000, 0x8000000, 0x10000000, 0x20000000
_ALL_NEW = 0x2000000 | 0x4000000 | _NEW_IPC | 0x40000000 | _NEW_NS | _NEW_USER | _NEW_PID
"cgroup, uts and net, too"
_BIND, _REC, _PRIVATE, _NO_SUID, _NO_DEV, _DETACH = 4096, 16384, 1 << 18, 2, 4, 2
_MOUNT_SETATTR, _RECURSIVE, _READ_ONLY = 442, 0x8000, 1
_NO_NEW_PRIVILEGES, _DROP_BOUND, _SECCOMP, _SUBREAPER = 38, 24, 22, 36
_DENIED = (
    "pivot_root clone3 clone socket socketpair ptrace process_vm_readv process_vm_writev pidfd_getfd shmget semget "
    "msgget mq_open add_key request_key keyctl bpf perf_event_open userfaultfd unshare setns mount open_by_handle_at "
    "memfd_create memfd_secret io_uring_setup open_tree fsopen"
)
"""What reaches into other processes, around limits (memory of no process, sockets by io_uring, sockets to the machine's
host, which no namespace holds) or far into the kernel; the first five partly or not at all."""
_NUMBERS = {
    "x86_64": "155 435 56 41 53 101 310 311 438 29 64 68 240 "
    "248 249 250 321 298 323 272 308 165 304 319 447 425 428 430",
    "aarch64": "41 435 220 198 199 117 270 271 438 194 190 186 180 "
    "217 218 219 280 241 282 97 268 40 265 279 447 425 428 430",
}
_ABI = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"linux/audit.h"
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Set up what there is, say what it is, then run a program an order until the other side hangs up."""
    asked = json.loads(sys.argv[1])
    control = socket.socket(fileno=asked["control"])
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory ends, a program is killed and not the run
    box = _Box(asked)
    box.missing = _enter(box, control, asked["binds"]) if asked["namespaces"] else "they are switched off"
    box.filter = _filter(without_sockets=bool(box.missing))
    sys.path += asked["path"]
    for capability in range(64) if os.geteuid() == 0 else ():
        _libc.prctl(_DROP_BOUND, capability, 0, 0, 0)  # those that there are
    for option in (_NO_NEW_PRIVILEGES, _SUBREAPER):
        _call("prctl", option, 1, 0, 0, 0)
    compile("0", "", "exec")  # the first makes hundreds of types
    gc.freeze()
    said: dict[str, Any] = {
        "missing": box.missing,
        "own_user": box.uid is not None,
        "filter": bool(box.filter[0]),
    }
    said["closed"] = _closed(os.path.dirname(os.__file__)) if box.missing and box.uid is not None else ""
    said["unlimited"] = box.is_root and box.uid is None
    while True:
        text = json.dumps(said).encode()
        control.sendall(struct.pack("!I", len(text)) + text)
        said = box.run(json.loads(_exactly(control, *struct.unpack("!I", _exactly(control, 4)))), control)


def _closed(path: str) -> str:
    """The first folder on the way to a path that other users may not enter; empty: there is none."""
    parts = path.split("/")
    folders = ["/".join(parts[:count]) or "/" for count in range(1, len(parts) + 1)]
    return next((folder for folder in folders if not os.stat(folder).st_mode & 1), "")


def _exactly(control: socket.socket, count: int) -> bytes:
    """So many bytes; the end of this process where there are no more."""
    text = control.recv(count, socket.MSG_WAITALL) if count else b""
    if len(text) < count:
        os._exit(0)
    return text


def _call(name: str, *arguments: Any) -> int:
    """A function of the C library. Raises OSError."""
    if (got := getattr(_libc, name)(*arguments)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return got


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    _call("mount", *texts, ctypes.c_ulong(flags), data.encode())


def _enter(box: _Box, control: socket.socket, binds: list[str]) -> str:
    """Return in a process that is inside the box, or where there can be none, saying why.

    Three processes: this one, which has the rights to map two users, one that makes the namespaces, and the first of
    the new pid namespace: whoever ends that, ends every program.
    """
    if os.uname().machine not in _NUMBERS:
        return f"{os.uname().machine} is neither x86_64 nor aarch64"
    made, makes = os.pipe()
    mapped, maps = os.pipe()
    failed, fails = os.pipe()
    is_root = box.uid is not None
    if (maker := os.fork()) == 0:
        try:
            user, group = os.geteuid(), os.getegid()
            _call("unshare", _ALL_NEW)
            if not is_root:
                _map("self", f"0 {user} 1", f"0 {group} 1")
            os.write(makes, b".")
            os.read(mapped, 1)
            if os.fork():
                control.close()
                os.closerange(3, 256)
                os.waitpid(-1, 0)
                os._exit(0)
            _change_root(box, binds)
        except OSError as error:
            os.write(fails, str(error).encode())
            os._exit(1)
        for descriptor in (made, makes, mapped, maps, failed, fails):
            os.close(descriptor)
        return ""
    for descriptor in (makes, mapped, fails):
        os.close(descriptor)
    fault = ""
    try:
        if os.read(made, 1):
            if is_root:
                _map(str(maker), f"0 0 1\n1 {box.uid} 1", f"0 0 1\n1 {box.uid} 1")
            os.write(maps, b".")
    except OSError as error:
        fault = str(error)
        os.kill(maker, signal.SIGKILL)
    fault = fault or os.read(failed, 1000).decode()
    if not fault:
        control.close()
    os.waitpid(maker, 0)
    if not fault:
        os._exit(0)
    for descriptor in (made, maps, failed):
        os.close(descriptor)
    return fault


def _map(process: str, users: str, groups: str) -> None:
    lines = {"uid_map": users, "gid_map": groups}
    for name, line in lines.items() if process != "self" else [("setgroups", "deny"), *lines.items()]:
        with open(f"/proc/{process}/{name}", "w") as file:
            file.write(line)


def _change_root(box: _Box, binds: list[str]) -> None:
    """A tree of what Python needs, not to be written to; the old one is gone."""
    root = box.folder
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NO_SUID | _NO_DEV, "size=1m,mode=755")
    for path in ("/box", "/dev", "/proc"):  # of which the last stays empty
        os.mkdir(root + path)
    os.symlink("/box", f"{root}/dev/shm")
    if not any(path.startswith("/tmp/") for path in binds):
        os.symlink("/box", f"{root}/tmp")
    for path in binds:
        if os.path.islink(path) and not os.path.isabs(os.readlink(path)):
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.mkdir(root + path) if os.path.isdir(path) else os.mknod(root + path)
            _mount(path, root + path, None, _BIND | _REC)
    attributes = struct.pack("QQQQ", _READ_ONLY | _NO_SUID, 0, _PRIVATE, 0)
    _call("syscall", _MOUNT_SETATTR, -100, root.encode(), _RECURSIVE, attributes, len(attributes))
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")  # a program makes none, in which it would have rights
    box.own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
    os.chdir(root)
    _call("syscall", int(_NUMBERS[os.uname().machine].split()[0]), b".", b".")
    _call("umount2", b".", _DETACH)
    os.chdir("/")
    box.uid = None if box.uid is None else 1


def _ranges(name: str) -> list[list[int]]:
    with open(f"/proc/self/{name}") as file:
        return [list(map(int, line.split())) for line in file]


def _filter(*, without_sockets: bool) -> tuple[bytes, Any]:
    """The system calls that there are as struct sock_fprog, and what it points to; empty: for an unknown machine."""
    machine = os.uname().machine
    numbers = dict(zip(_DENIED.split(), map(int, _NUMBERS.get(machine, "").split()), strict=False))
    if not numbers:
        return b"", None
    clone3, clone, single, pair = (numbers.pop(name) for name in ("clone3", "clone", "socket", "socketpair"))
    load, equal, at_least, has, give = 0x20, 0x15, 0x35, 0x45, 0x06
    # struct seccomp_data: 0 the call's number, 4 the ABI, 16 the first argument
    lines: list[tuple[int, int | str, int | str, int]] = [(load, 0, 0, 4), (equal, 0, "deny", _ABI[machine])]
    lines += [(load, 0, 0, 0), (at_least, "deny", 0, 1 << 30)]
    lines += [(equal, "deny", 0, number) for number in numbers.values()]
    # glibc takes clone then, whose flags can be read
    lines += [(equal, "unknown", 0, clone3)]
    lines += [(equal, 0, 2, clone), (load, 0, 0, 16), (has, "deny", "allow", _NEW_USER)]
    lines += [(equal, "deny" if without_sockets else 1, 0, single), (equal, 0, "allow", pair)]
    lines += [(load, 0, 0, 16), (equal, "allow", "deny", socket.AF_UNIX)]
    ends = {"deny": len(lines), "unknown": len(lines) + 1, "allow": len(lines) + 2}
    lines += [(give, 0, 0, 0x50000 | errno) for errno in (1, 38)] + [(give, 0, 0, 0x7FFF0000)]
    words = b""
    for at, (code, if_so, if_not, number) in enumerate(lines):
        jumps = (ends[to] - at - 1 if isinstance(to, str) else to for to in (if_so, if_not))
        words += struct.pack("HBBI", code, *jumps, number)
    kept = ctypes.create_string_buffer(words)
    return struct.pack("HP", len(lines), ctypes.addressof(kept)), kept


class _Box:
    """What programs run in."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.limits, self.folder = asked["limits"], asked["folder"]
        self.missing = ""
        "why there are no namespaces; empty: there are"
        with open("/proc/self/status") as file:
            rights = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
        fresh, maps = 61184 + os.getpid() % 4096, [_ranges("uid_map"), _ranges("gid_map")]
        # with CAP_SETGID and CAP_SETUID
        may_change = os.geteuid() == 0 and rights & 0xC0 == 0xC0
        is_there = all(any(first <= fresh < first + count for first, _, count in one) for one in maps)
        self.uid = fresh if may_change and is_there else None
        "what programs run under, of those that dynamic users have; None: what this process does"
        self.is_root = os.geteuid() == 0 and maps[0] == [[0, 0, (1 << 32) - 1]]
        "of the machine, whose processes are not counted"
        self.filter: tuple[bytes, Any] = (b"", None)
        "of programs' system calls"
        self._count = 0
        self.own_pids = -1
        "the pid namespace of this process, in which each program's is made"

    def run(self, asked: dict[str, Any], control: socket.socket) -> dict[str, Any]:
        """Run one program; what became of it."""
        began_s, place = time.monotonic(), self._make_folder()
        stdin = os.memfd_create("stdin")
        with open(os.dup(stdin), "wb") as file:
            file.write(asked["stdin"].encode(errors="replace"))
        os.lseek(stdin, 0, os.SEEK_SET)
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        if not self.missing:
            _call("setns", self.own_pids, _NEW_PID)
            _call("unshare", _NEW_PID | _NEW_IPC)
        if (pid := os.fork()) == 0:
            try:
                self._become((stdin, out_end, err_end), place)
                _execute(asked)
            finally:
                os._exit(1)
        for descriptor in (stdin, out_end, err_end):
            os.close(descriptor)
        watched = _Watched(pid, (out, err), self.limits["output_bytes"], control.fileno())
        fault = watched.until(began_s + asked["wall_s"])
        status, cpu_s = self._end(pid)
        fault = watched.drained() or fault
        self._remove_folder(place)
        for descriptor in (out, err):
            os.close(descriptor)
        if not fault and status in (-signal.SIGKILL, -signal.SIGXCPU):
            fault = "timeout" if cpu_s >= self.limits["cpu_s"] - 0.1 else "memory"
        stdout, stderr = (b"".join(texts).decode(errors="replace") for texts in watched.texts.values())
        seconds = time.monotonic() - began_s
        return {"fault": fault, "code": status, "stdout": stdout, "stderr": stderr, "seconds": seconds}

    def _make_folder(self) -> str:
        """An empty folder of the program's."""
        if self.missing:
            self._count += 1
            place = f"{self.folder}/{self._count}"
            os.mkdir(place, 0o700)
            os.chmod(self.folder, 0o711)
            os.chown(place, *((-1, -1) if self.uid is None else (self.uid, self.uid)))
            return place
        size, uid = self.limits["disk_mb"] << 20, self.uid or 0
        options = f"size={size},nr_inodes=4096,mode=700,uid={uid},gid={uid}"
        _mount("tmpfs", "/box", "tmpfs", _NO_SUID | _NO_DEV, options)
        return "/box"

    def _remove_folder(self, place: str) -> None:
        if self.missing:
            os.spawnv(os.P_WAIT, "/bin/rm", ["rm", "-rf", place])  # however deep it is
        else:
            _call("umount2", b"/box", _DETACH)

    def _become(self, descriptors: tuple[int, ...], place: str) -> None:
        """Give up, in this process, what a program has no right to."""
        os.setsid()
        for at, descriptor in enumerate(descriptors):
            os.dup2(descriptor, at)
        os.closerange(3, 4096)
        os.chdir(place)
        os.environ |= {"HOME": place, "TMPDIR": place}
        limits = self.limits
        for name, soft, more in (
            ("AS", limits["memory_mb"] << 20, 0),
            ("CPU", limits["cpu_s"], 1),
            ("NPROC", limits["processes"], 0),
            ("NOFILE", limits["files"], 0),
            ("FSIZE", limits["disk_mb"] << 20, 0),
            *((name, 0, 0) for name in ("CORE", "MEMLOCK", "MSGQUEUE")),
        ):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}", 12), (soft, soft + more))  # 12: MSGQUEUE
        if self.uid is not None:
            os.setgroups([])
            os.setresgid(self.uid, self.uid, self.uid)
            os.setresuid(self.uid, self.uid, self.uid)
        _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
        if self.filter[0]:
            _call("prctl", _SECCOMP, 2, self.filter[0])

    def _end(self, pid: int) -> tuple[int, float]:
        """End the program and all that it left behind; its exit code (a signal: below 0) and seconds of CPU."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        _, status, used = os.wait4(pid, 0)
        while self.missing:  # else whoever is in its pid namespace ended with it
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                left = [int(one) for one in file.read().split()]
            for one in left:
                os.kill(one, signal.SIGKILL)
            if not left:
                break
            os.waitpid(-1, 0)
        return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


class _Watched:
    """A program that runs, and what it writes."""

    def __init__(self, pid: int, pipes: tuple[int, int], room: int, control: int) -> None:
        """`room`: bytes that it may write; `control`: what it ends with."""
        self.texts: dict[int, list[bytes]] = {pipe: [] for pipe in pipes}
        self._room, self._pid, self._control = room, pid, control
        for pipe in pipes:
            os.set_blocking(pipe, False)

    def until(self, end_s: float) -> str:
        """Wait for its end; why it was not waited for, or nothing."""
        ended, poll = os.pidfd_open(self._pid), select.poll()
        for descriptor in (*self.texts, self._control, ended):
            poll.register(descriptor, select.POLLIN)
        try:
            while (left_s := end_s - time.monotonic()) > 0:
                for descriptor, _ in poll.poll(math.ceil(left_s * 1000)):
                    if descriptor in (ended, self._control):  # nobody waits for it where that says something
                        return ""
                    if not self._take(descriptor):
                        poll.unregister(descriptor)
                    if self._room < 0:
                        return "output"
            return "timeout"
        finally:
            os.close(ended)

    def drained(self) -> str:
        """Read what is left of one that has ended."""
        for pipe in self.texts:
            while self._room >= 0 and self._take(pipe):
                pass
        return "output" if self._room < 0 else ""

    def _take(self, pipe: int) -> int:
        """Bytes that there were; 0: it is closed, or has none now."""
        try:
            text = os.read(pipe, 65536)
        except BlockingIOError:
            return 0
        self.texts[pipe].append(text[: max(self._room, 0)])
        self._room -= len(text)
        return len(text)


def _execute(asked: dict[str, Any]) -> None:
    """Be the program: `python`'s ways with its source, its uncaught error and its exit, or another command."""
    if asked["argv"]:
        os.execvp(asked["argv"][0], asked["argv"])
    random.seed(0)  # the same program, the same outcome
    builtins.exit = builtins.quit = sys.exit  # pyright: ignore[reportAttributeAccessIssue]  # those of site
    module = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv, code = module, ["program.py"], 1
    module.__file__ = "program.py"
    try:
        exec(compile(asked["source"], "program.py", "exec", dont_inherit=True), module.__dict__)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        behind = error.__traceback__.tb_next if error.__traceback__ else None
        try:
            traceback.print_exception(error.with_traceback(behind))
        except BaseException:  # no memory for it
            os.write(2, type(error).__name__.encode())
    finally:
        try:
            threading._shutdown()  # pyright: ignore
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            code = code or 120  # as python where what is written cannot be flushed
        os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
