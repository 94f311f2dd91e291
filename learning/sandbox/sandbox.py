"""Programs that nobody trusts, run one by one in processes of a sandbox; what holds there is said in one line."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ...core.errors import ConfigError

_SERVER = Path(__file__).with_name("sandbox_server.py")
_START_S, _GRACE_S = 60.0, 10.0
"what a server may take to start; what it may be late with a program that it should have ended"
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
_ENVIRONMENT |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_TREE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

Fault = Literal["", "error", "timeout", "memory", "output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use; past the first three it is ended, at the others it meets an error."""

    wall_s: float = 10.0
    "seconds of the clock; as many of one process on the CPU, rounded up"
    output_bytes: int = 1 << 20
    "of stdout and stderr together"
    memory_mb: int = 512
    "address space of one process"
    processes: int = 16
    "and threads, those of the sandbox (two) among them"
    files: int = 64
    "that one process has open"
    disk_mb: int = 64
    "its folder together, which is memory; without namespaces one file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a program."""

    fault: Fault
    "empty: it ended with 0; output: it wrote more than the limit and was ended; memory: it met that limit"
    code: int
    "exit code, below 0 the signal that ended it"
    stdout: str
    stderr: str
    seconds: float


class Sandbox:
    """Runs programs, each alone in an empty folder; several threads may ask, which wait beside each other."""

    def __init__(
        self, limits: Limits | None = None, *, max_concurrent: int = 0, namespaces: bool = True
    ) -> None:
        """`max_concurrent`: programs at once, 0: one a core; `namespaces` False: as where the kernel has none.

        Starts the first process. Raises ConfigError: it does not start.
        """
        self.limits, self._namespaces = limits or Limits(), namespaces
        self._places = threading.Semaphore(max_concurrent or len(os.sched_getaffinity(0)))
        self._idle = [_Server(self.limits, namespaces)]
        self.holds = self._idle[0].holds

    @property
    def described(self) -> str:
        """What holds, or what does not and what that means."""
        limits, holds = self.limits, self.holds
        user = "own user" if holds["own_user"] else "the run's user"
        network = "" if holds["filter"] else " (sockets to the machine's host are not filtered here)"
        inside = f"{user}, own pid, network, ipc and mount namespaces{network}"
        if holds["missing"]:
            reach = (
                "files that anybody may read" if holds["own_user"] else "its files, and signal its processes"
            )
            network = "no sockets" if holds["filter"] else "the network too"
            inside = f"NO namespaces ({holds['missing']}): {user}, programs can read {reach}; {network}"
        if holds["unlimited"]:
            inside += "; processes are NOT counted (root that may not change its user)"
        if holds["closed"]:
            inside += f"; they import little, as other users may not enter {holds['closed']}, where Python is"
        disk = f"{limits.disk_mb} MB of files" + (" each" if holds["missing"] else "")
        return (
            f"sandbox: {inside}; {limits.wall_s:g} s, memory {limits.memory_mb} MB a process, {limits.processes} "
            f"processes, {limits.files} open files, {disk}, {limits.output_bytes >> 10} kB of output"
        )

    def run(
        self, source: str = "", stdin: str = "", *, argv: Sequence[str] = (), wall_s: float = math.inf
    ) -> Outcome:
        """Run Python source, or a command; `wall_s` may lower the limit. Raises ConfigError: no server starts."""
        asked = {"source": source, "stdin": stdin, "argv": argv, "wall_s": min(wall_s, self.limits.wall_s)}
        with self._places:
            for _ in range(2):  # one that was ended while it was idle is no fault of the program
                try:
                    server = self._idle.pop()
                except IndexError:
                    server = _Server(self.limits, self._namespaces)
                outcome = server.run(asked)
                if server.is_alive:
                    self._idle.append(server)
                if outcome is not None:
                    return outcome
        return Outcome(fault="error", code=1, stdout="", stderr="it ended the sandbox's process", seconds=0.0)

    def close(self) -> None:
        """End the processes that are idle."""
        while self._idle:
            self._idle.pop().kill()


class _Server:
    """One process that runs programs, one at a time."""

    def __init__(self, limits: Limits, namespaces: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rlhfspec-sandbox-")
        self._control, theirs = socket.socketpair()
        paths = sysconfig.get_paths()
        packages = list(dict.fromkeys((paths["purelib"], paths["platlib"])))
        prefixes = [
            f"{prefix}/{part}" for prefix in (sys.base_prefix, sys.prefix) for part in ("bin", "lib", "lib64")
        ]
        binds: list[str] = []
        for path in (*_TREE, *_DEVICES, *sorted((*prefixes, *packages), key=len)):
            if not any(path == one or path.startswith(f"{one}/") for one in binds):
                binds.append(path)
        asked = {
            "control": theirs.fileno(),
            "limits": asdict(limits) | {"cpu_s": math.ceil(limits.wall_s)},
            "folder": self._folder.name,
            "binds": binds,
            "path": packages,
            "namespaces": namespaces,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-s", "-P", "-B", "-X", "utf8", str(_SERVER), json.dumps(asked)],
            env=_ENVIRONMENT,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._end = weakref.finalize(self, _end, self._process, self._control, self._folder)
        self.is_alive = True
        self._control.settimeout(_START_S)
        try:
            self.holds = self._receive()
        except OSError as error:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # who holds its stderr, too
            said = self._process.stderr.read().decode(errors="replace") if self._process.stderr else ""
            self.kill()
            raise ConfigError(f"the sandbox's process does not start: {error or ''} {said[-500:]}") from error

    def run(self, asked: dict[str, Any]) -> Outcome | None:
        """One program; None: this process is gone. Where it does not answer it is ended, and the program with it."""
        try:
            self._control.settimeout(asked["wall_s"] + _GRACE_S)
            text = json.dumps(asked).encode()
            self._control.sendall(struct.pack("!I", len(text)) + text)
            said = self._receive()
        except OSError as error:
            self.kill()
            if not isinstance(error, TimeoutError):
                return None
            return Outcome(fault="timeout", code=-9, stdout="", stderr="", seconds=asked["wall_s"] + _GRACE_S)
        if not said["fault"] and said["code"] != 0:
            last = said["stderr"].rstrip().rpartition("\n")[2]
            said["fault"] = "memory" if last.startswith("MemoryError") else "error"
        return Outcome(**said)

    def _receive(self) -> dict[str, Any]:
        (length,) = struct.unpack("!I", self._exactly(4))
        return json.loads(self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        text = b""
        while len(text) < count:
            if not (more := self._control.recv(count - len(text))):
                raise OSError("it hung up")
            text += more
        return text

    def kill(self) -> None:
        """End it, and whatever runs in it."""
        self.is_alive = False
        self._end()


def _end(
    process: subprocess.Popen[bytes], control: socket.socket, folder: tempfile.TemporaryDirectory[str]
) -> None:
    control.close()
    try:
        process.wait(2.0)  # it ends what runs in it
    except subprocess.TimeoutExpired:
        # until it is waited for, nobody else has its number
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stderr is not None:
        process.stderr.close()
    with suppress(Exception):  # what a program left may be too deep for it
        folder.cleanup()
