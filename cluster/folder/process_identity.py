"""Who wrote something down, so that a later process can tell whether that one is gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rlhfspec.core.proc_files import PROC, STARTED, stat_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process of one machine; its start tells it from a later one with the same number."""

    pid: int
    host: str
    pid_started: int | None
    "clock ticks after the machine's start; None where /proc is missing"
    pid_namespace: str | None
    "two containers may share a host's name and temporary folder, and not see each other's processes"
    boot: str | None = None
    "of the machine's start: two machines may share a name and an output folder"

    @classmethod
    def of_this(cls) -> Self:
        """Describe this process."""
        return cls(
            pid=os.getpid(),
            host=socket.gethostname(),
            pid_started=_started(os.getpid()),
            pid_namespace=_pid_namespace(),
            boot=_boot(),
        )

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Self | None:
        """Read what `asdict` wrote, among other keys; None where it is missing or damaged."""
        pid, host = tree.get("pid"), tree.get("host")
        if not isinstance(pid, int) or not isinstance(host, str) or pid < 1:
            return None
        started, namespace, boot = tree.get("pid_started"), tree.get("pid_namespace"), tree.get("boot")
        return cls(
            pid=pid,
            host=host,
            pid_started=started if isinstance(started, int) else None,
            pid_namespace=namespace if isinstance(namespace, str) else None,
            boot=boot if isinstance(boot, str) else None,
        )

    def as_tree(self) -> dict[str, Any]:
        """Fields by name, for JSON."""
        return asdict(self)

    @property
    def is_here(self) -> bool:
        """True where this process could see it: the same machine since its start, the same container."""
        here = (socket.gethostname(), _pid_namespace(), _boot())
        return None not in here and (self.host, self.pid_namespace, self.boot) == here

    @property
    def is_gone(self) -> bool:
        """True only when it is certain: it could be seen from here, and is not there."""
        if not self.is_here:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        if stat_fields(self.pid)[:1] == ["Z"]:
            return True  # it has ended, and its parent has not asked how
        now = _started(self.pid)
        return None not in (now, self.pid_started) and now != self.pid_started


def processes_using(folder: Path) -> list[int]:
    """Processes that name the folder in their command, work in it, or have a file of it open."""
    return sorted(
        int(entry.name)
        for entry in PROC.glob("[0-9]*")
        if any(_is_in(folder, text) for text in _traces(entry))
    )


def _traces(process: Path) -> Iterator[str]:
    """What tells the places a process uses; nothing of one that has ended or is another user's."""
    with suppress(OSError):
        yield from (process / "cmdline").read_bytes().decode(errors="replace").replace("=", "\0").split("\0")
    with suppress(OSError):
        yield os.readlink(process / "cwd")
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                yield os.readlink(link)


def _is_in(folder: Path, text: str) -> bool:
    return text == str(folder) or text.startswith(f"{folder}/")


def _started(pid: int) -> int | None:
    try:
        return int(stat_fields(pid)[STARTED])
    except (IndexError, ValueError):
        return None


def _boot() -> str | None:
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _pid_namespace() -> str | None:
    try:
        return os.readlink(PROC / "self" / "ns" / "pid")
    except OSError:
        return None
