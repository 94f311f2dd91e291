"""What Linux tells of processes in /proc, nothing where there is none; what it sends one when its parent ends."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
_LIBC, _SET_DEATH_SIGNAL = ctypes.CDLL(None), 1
STATE, PARENT, USER_TICKS, SYSTEM_TICKS, STARTED = 0, 1, 11, 12, 19
"Places in what `stat_fields` returns; ticks are of the clock, `STARTED` after the machine's start."


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (proc(5), field 3); the command before them may hold anything."""
    try:
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def sizes(path: Path) -> dict[str, int]:
    """Lines such as `VmRSS:  123 kB` of a status, a memory map or meminfo, in bytes."""
    found = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith(" kB"):
                with suppress(ValueError):
                    found[name] = int(rest.split()[0]) << 10
    return found


def end_with(parent: int, number: int) -> None:
    """Have the signal sent to this process when its parent ends, even inside a call that never returns (Linux)."""
    if sys.platform == "linux":
        _LIBC.prctl(_SET_DEATH_SIGNAL, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
