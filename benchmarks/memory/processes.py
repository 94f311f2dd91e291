"""What processes hold together, shared pages counted once (PSS), by kind of process and by what it is (Linux)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...core.awake import looking
from ...core.proc_files import PROC, sizes
from ..support.processes import command_line, descendants

PARTS = {"own": "Pss_Anon", "files": "Pss_File", "shared": "Pss_Shmem"}
"""Of a process, by the field of `smaps_rollup`: what it has allocated (of what forks still share its share), libraries
and mapped files, shared memory such as Ray's object store."""
_POLL_S = 0.5


@dataclass(slots=True)
class Peak:
    """The moment in which they held most."""

    held: Counter[tuple[str, str]] = field(default_factory=Counter)
    "bytes by kind of process and part"
    processes: Counter[str] = field(default_factory=Counter)
    "how many there were, by kind"
    resident_bytes: int = 0
    "most of all moments, shared pages counted in each process"

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.held.total()

    def of(self, kind: str) -> int:
        """Bytes of a kind of process."""
        return sum(self.held[kind, part] for part in PARTS)

    @property
    def kinds(self) -> list[str]:
        """The largest first."""
        return sorted(self.processes, key=lambda kind: -self.of(kind))

    def __str__(self) -> str:
        """The whole in GB, and of which kinds it is."""
        parts = (f"{kind} {self.of(kind) / 1e9:.2f}" for kind in self.kinds)
        return f"{self.bytes / 1e9:.2f} GB ({', '.join(parts)}); resident {self.resident_bytes / 1e9:.2f}"


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Watch all processes below this one in the block."""
    peak = Peak()

    def look() -> None:
        now = _moment()
        peak.resident_bytes = max(peak.resident_bytes, now.resident_bytes)
        if now.bytes > peak.bytes:
            peak.held, peak.processes = now.held, now.processes

    with looking(look, _POLL_S):
        yield peak


def _moment() -> Peak:
    now = Peak()
    for pid in descendants(os.getpid()):
        found = sizes(PROC / str(pid) / "smaps_rollup")
        if not found:
            continue
        kind = kind_of(command_line(pid))
        now.processes[kind] += 1
        now.resident_bytes += found["Rss"]
        for part, name in PARTS.items():
            now.held[kind, part] += found[name]
    return now


def kind_of(command: str) -> str:
    """Of a Ray worker its class, else the program's name, of Python's the module's."""
    program, *words = command.split() or ["ended"]
    if program.startswith("ray::"):
        return program.removeprefix("ray::").partition(".")[0]
    name = program.split("/")[-1]
    if name.startswith("python"):
        name = next((word.split("/")[-1] for word in words if not word.startswith("-")), name)
    return name.removesuffix(".py").split(".")[-1]
