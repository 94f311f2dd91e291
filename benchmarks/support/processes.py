"""Commands as a user runs them, the processes below one (Linux), and the peak memory of one."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from ...core.errors import RlhfSpecError, WaitTimeout
from ...core.proc_files import PARENT, PROC, end_with, sizes, stat_fields
from .result import ROOT


def descendants(root: int) -> set[int]:
    """All processes below one."""
    children: dict[int, list[int]] = {}
    for entry in PROC.glob("[0-9]*"):
        fields = stat_fields(int(entry.name))
        if fields:
            children.setdefault(int(fields[PARENT]), []).append(int(entry.name))
    found, left = set(), [root]
    while left:
        for child in children.get(left.pop(), ()):
            if child not in found:
                found.add(child)
                left.append(child)
    return found


def command_line(pid: int) -> str:
    """Of a process; empty when it has ended."""
    with suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def private_mib(pid: int) -> float:
    """Memory of a process that no other has, nor the page cache: what would leak."""
    held = sizes(PROC / str(pid) / "smaps_rollup")
    return (held.get("Private_Dirty", 0) + held.get("Swap", 0)) / 2.0**20


def left_of(pids: set[int], wait_s: float) -> set[int]:
    """Those that have not ended within so many seconds: what Ray ends itself takes a moment."""
    ends_s = time.monotonic() + wait_s
    while (left := {pid for pid in pids if (PROC / str(pid)).exists()}) and time.monotonic() < ends_s:
        time.sleep(1.0)
    return left


TIMEOUT_S = 1800.0
_LAST_CHARS = 1500


def run_command(arguments: Sequence[str], *, folder: Path, log: Path) -> float:
    """Run `rlhfspec ARGUMENTS` in a folder, its output in `log`; the seconds it took.

    Raises RlhfSpecError with the end of what it said when it fails.
    """
    began_s = time.perf_counter()
    with start_command(arguments, folder=folder, log=log) as command:
        try:
            code = command.wait(timeout=TIMEOUT_S)
        except BaseException:
            command.kill()
            raise
    if code:
        raise RlhfSpecError(
            f"rlhfspec {' '.join(arguments)} ended with {code}; expected 0; it said: "
            f"{log.read_text(errors='replace')[-_LAST_CHARS:]}"
        )
    return time.perf_counter() - began_s


def start_command(arguments: Sequence[str], *, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start `rlhfspec ARGUMENTS` in a folder, its output in `log`; the caller waits for it.

    When this process ends however, it gets SIGTERM, after which it ends what it has started.
    """
    with log.open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "rlhfspec.cluster.cli", *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=subprocess.STDOUT,
            preexec_fn=ending_with_this(),
        )


def ending_with_this() -> Callable[[], None]:
    """What a child of this process does first, to get SIGTERM when this one ends."""
    return partial(end_with, os.getpid(), signal.SIGTERM)


def setting_words(settings: Iterable[str]) -> list[str]:
    """`--set` before each KEY=VALUE."""
    return [word for setting in settings for word in ("--set", setting)]


_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 600.0


def measured_in_a_process(bench: str, module: str, arguments: Sequence[str]) -> int:
    """Run `python -m MODULE ARGUMENTS` for a benchmark and return the bytes that it prints.

    Raises WaitTimeout, and RlhfSpecError with its last line when it fails.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=_ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
            preexec_fn=ending_with_this(),
        )
    except subprocess.TimeoutExpired as error:
        raise WaitTimeout(
            waiter=f"bench {bench}",
            waited_for="its memory process",
            order=" ".join(arguments[-2:]),
            waited_s=_TIMEOUT_S,
            advice="run it on an idle machine",
        ) from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RlhfSpecError(f"bench {bench}: {' '.join(command[1:])} failed: {last}") from error
    return int(done.stdout.split()[-1])


def begin_peak() -> None:
    """Let `peak_bytes` forget what was before, on Linux."""
    forget = Path("/proc/self/clear_refs")
    if forget.is_file():
        forget.write_text("5")


def peak_bytes() -> int:
    """Peak resident bytes since `begin_peak` or this program began; `ru_maxrss` would count what started it."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
