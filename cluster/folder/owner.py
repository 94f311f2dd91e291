"""Whose a run folder is: whoever took it last. One that was silent, and taken for gone, writes nothing more there.

    RUN/owners/0001.json    the process that began the run
    RUN/owners/0002.json    the one that resumed it

A file is made only where there is none of its number, so of two processes that resume at a time one fails. What is
seen of another machine's is as fresh as the shared file system.
"""

from __future__ import annotations

import json
import os
import re
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from ...core.errors import RunTaken
from ...core.files import storage_errors
from ...core.proc_files import PROC, STARTED, stat_fields


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
        return cls(pid=os.getpid(), pid_started=_started(os.getpid()), **_here())

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Self | None:
        """Read what `asdict` wrote, among other keys; None where it is missing or damaged."""
        pid, host = tree.get("pid"), tree.get("host")
        if not isinstance(pid, int) or not isinstance(host, str) or pid < 1:
            return None
        kinds = {"pid_started": int, "pid_namespace": str, "boot": str}
        others = {
            name: one if isinstance(one := tree.get(name), kind) else None for name, kind in kinds.items()
        }
        return cls(pid=pid, host=host, **others)

    def as_tree(self) -> dict[str, Any]:
        """Fields by name, for JSON."""
        return asdict(self)

    @property
    def is_here(self) -> bool:
        """True where this process could see it: the same machine since its start, the same container."""
        here = _here()
        return None not in here.values() and here.items() <= self.as_tree().items()

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


def _started(pid: int) -> int | None:
    try:
        return int(stat_fields(pid)[STARTED])
    except (IndexError, ValueError):
        return None


def _here() -> dict[str, Any]:
    here: dict[str, Any] = {"host": socket.gethostname(), "pid_namespace": None, "boot": None}
    with suppress(OSError):
        here["pid_namespace"] = os.readlink(PROC / "self" / "ns" / "pid")
        here["boot"] = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return here


def processes_using(folder: Path) -> list[int]:
    """Processes that name the folder in their command, work in it, or have a file of it open."""
    found = (int(entry.name) for entry in PROC.glob("[0-9]*") if _uses(entry, str(folder)))
    return sorted(found)


def _uses(process: Path, folder: str) -> bool:
    """False of one that has ended or is another user's."""
    traces = []
    with suppress(OSError):
        traces += (process / "cmdline").read_bytes().decode(errors="replace").replace("=", "\0").split("\0")
        traces += [os.readlink(process / "cwd")]
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                traces.append(os.readlink(link))
    return any(text == folder or text.startswith(f"{folder}/") for text in traces)


FOLDER = "owners"


class Owner:
    """What this process knows of it; it owns nothing until it has claimed the folder."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._number: int | None = None
        self._text = ""
        self._taken_by = ""

    def last(self) -> int:
        """Number of the last owner, 0 where nobody has claimed the folder."""
        folder = self._run / FOLDER
        names = [path.stem for path in folder.glob("*.json")] if folder.is_dir() else []
        return max((int(name) for name in names if re.fullmatch(r"[0-9]+", name)), default=0)

    def claim(self, *, after: int) -> bool:
        """Become the owner that follows number `after`; False where somebody else has just done so.

        Raises StorageError.
        """
        text = json.dumps(
            ProcessIdentity.of_this().as_tree()
            | {"claim": uuid.uuid4().hex, "since": datetime.now(UTC).isoformat(timespec="seconds")}
        )
        path = self._path(after + 1)
        with storage_errors(path):
            path.parent.mkdir(exist_ok=True)
            try:
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                return False
            with os.fdopen(file, "w") as out:
                out.write(text + "\n")
                out.flush()
                os.fsync(out.fileno())
        self._number, self._text = after + 1, text
        return True

    @property
    def name(self) -> str | None:
        """Of the own file, below the run folder; None where this process owns nothing."""
        return None if self._number is None else f"{FOLDER}/{self._number:04d}.json"

    @property
    def text(self) -> str:
        """What the own file holds."""
        return self._text

    @property
    def is_taken(self) -> bool:
        """Whether the folder was this process's own, and somebody else has taken it."""
        if self._number is None:
            return False
        if not self._taken_by:
            following = self._path(self._number + 1)
            if following.exists():
                self._taken_by = _who(following)
        return bool(self._taken_by)

    def lose(self, to: str) -> None:
        """Note that another has taken the run, as was seen elsewhere."""
        self._taken_by = self._taken_by or to

    def require(self) -> None:
        """Raise RunTaken where another process has taken the folder that this one owned."""
        if self.is_taken:
            raise RunTaken(
                f"the run {self._run} was taken up by {self._taken_by}, while this process ({os.getpid()}) was silent "
                "and taken for gone; this one ends here, and writes nothing more there"
            )

    def _path(self, number: int) -> Path:
        return self._run / FOLDER / f"{number:04d}.json"


def _who(path: Path) -> str:
    with suppress(OSError, ValueError):
        tree = json.loads(path.read_text())
        who = ProcessIdentity.from_tree(tree)
        if who is not None:
            return f"process {who.pid} on {who.host}"
    return "another process"
