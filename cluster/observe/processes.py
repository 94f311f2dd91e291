"""The processes of a run on this machine and their stacks, looked at from outside: none of them need answer, nor Ray.

Each has a memory file whose name says run and actor (`rlhfspec.actors.waiting.stack_page`). Stacks come from py-spy,
the tool of `ray stack`, which reads the memory of a process, of a stopped one too. Without it, or without the right to
use it, the process's own `faulthandler` is asked by a signal, which a stopped one does not hear.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhfspec.actors.waiting.stack_page import PAGE_STEM, STACKS_SIGNAL, page_name
from rlhfspec.core.proc_files import NUM_THREADS, PARENT, PROC, SYSTEM_TICKS, USER_TICKS, sizes, stat_fields

LOOK_S = 0.05
_FAULTHANDLER_THREAD = re.compile(r"^(?:Current t|T)hread (0x[0-9a-f]+)")
_FAULTHANDLER_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True, slots=True)
class Frame:
    """One call."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """A thread; the innermost call comes first."""

    name: str
    frames: tuple[Frame, ...]


def read_stacks(pid: int, page: Path, *, timeout_s: float) -> tuple[ThreadStack, ...] | str:
    """Threads of the process; where none can be had, why not.

    Args:
        pid: of a process of this machine and user.
        page: its stack page, as a path under /proc.
        timeout_s: how long each of the two ways may take.
    """
    found = by_py_spy(pid, timeout_s=timeout_s)
    if found:
        return found
    if is_stopped(pid):
        return "it is stopped, and py-spy is not there or may not look"
    return by_signal(pid, page, timeout_s=timeout_s)


def by_py_spy(pid: int, *, timeout_s: float) -> tuple[ThreadStack, ...]:
    """What py-spy sees; nothing where it is not installed, not permitted or too slow."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return ()
    # it must not stop the process it looks at
    words = [program, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    with suppress(OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        answer = subprocess.run(words, capture_output=True, timeout=timeout_s, check=True)
        return tuple(
            ThreadStack(
                name=thread["thread_name"] or str(thread["thread_id"]),
                frames=tuple(
                    Frame(frame["name"], frame["filename"], frame["line"]) for frame in thread["frames"]
                ),
            )
            for thread in json.loads(answer.stdout)
        )
    return ()


def by_signal(pid: int, page: Path, *, timeout_s: float) -> tuple[ThreadStack, ...] | str:
    """What the process writes of itself."""
    try:
        if not _hears(pid):
            return "it does not answer the signal for stacks"
        with page.open("r+b") as file:
            file.truncate(0)
        os.kill(pid, STACKS_SIGNAL)
        before, deadline_s = b"", time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
            text = page.read_bytes()
            if text and text == before:
                return parse_faulthandler(text.decode(errors="replace"))
            before = text
    except OSError as error:
        return f"it cannot be looked at: {error.strerror}"
    return f"it did not answer the signal for stacks within {timeout_s:.0f} s"


def parse_faulthandler(text: str) -> tuple[ThreadStack, ...]:
    """Threads of what `faulthandler` wrote."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if thread := _FAULTHANDLER_THREAD.match(line):
            threads.append((thread[1], []))
        elif threads and (frame := _FAULTHANDLER_FRAME.match(line)):
            threads[-1][1].append(Frame(frame[3], frame[1], int(frame[2])))
    return tuple(ThreadStack(name, tuple(frames)) for name, frames in threads)


def is_stopped(pid: int) -> bool:
    """Whether it was stopped (SIGSTOP, or a debugger)."""
    return stat_fields(pid)[:1] in (["T"], ["t"])


def _hears(pid: int) -> bool:
    """Whether it catches the signal: by default it would end the process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


STACKS_TIMEOUT_S = 8.0
_LINK = f"/memfd:{PAGE_STEM}:"
_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenProcess:
    """One process of a run."""

    actor: str
    pid: int
    host: str
    is_stopped: bool
    own_bytes: int
    "resident memory that it shares with nobody's object store"
    shared_bytes: int
    "what it maps of the object store"
    num_threads: int
    cpu_s: float
    stacks: tuple[ThreadStack, ...] = ()
    why_no_stacks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNode:
    """What this machine has of a run."""

    host: str
    processes: tuple[SeenProcess, ...] = ()
    store_bytes: int = 0
    "of the object store's memory that was ever written"
    store_limit_bytes: int = 0
    memory_bytes: int = 0
    memory_free_bytes: int = 0
    runs: tuple[str, ...] = field(default=())
    "that have processes here"

    def as_tree(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def look_here(run: str, *, timeout_s: float = STACKS_TIMEOUT_S) -> SeenNode:
    """Everything of that run here; `timeout_s` for each process's stacks."""
    pages = list(_pages())
    # names that are too long for a memory file are cut
    found = [
        (actor, pid, page) for actor, of, pid, page in pages if page_name(of, actor) == page_name(run, actor)
    ]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        seen = pool.map(lambda one: _see(one[0], one[1], one[2], timeout_s), found)
        processes = tuple(sorted((one for one in seen if one is not None), key=lambda one: one.actor))
    store, limit = _object_store(one.pid for one in processes)
    memory = sizes(PROC / "meminfo")
    return SeenNode(
        host=socket.gethostname(),
        processes=processes,
        store_bytes=store,
        store_limit_bytes=limit,
        memory_bytes=memory.get("MemTotal", 0),
        memory_free_bytes=memory.get("MemAvailable", 0),
        runs=tuple(sorted({of for _, of, _, _ in pages})),
    )


def _pages() -> Iterator[tuple[str, str, int, Path]]:
    """Actor, run, pid and stack page of all processes that this user may look at."""
    for process in PROC.glob("[0-9]*"):
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    name = os.readlink(link)
                    if name.startswith(_LINK):
                        actor, _, run = name.removeprefix(_LINK).removesuffix(" (deleted)").partition(":")
                        yield actor, run, int(process.name), link
                        break


def _see(actor: str, pid: int, page: Path, timeout_s: float) -> SeenProcess | None:
    """None where it has ended meanwhile."""
    words, held = stat_fields(pid), sizes(PROC / str(pid) / "status")
    if not words:
        return None
    stacks = read_stacks(pid, page, timeout_s=timeout_s)
    return SeenProcess(
        actor=actor,
        pid=pid,
        host=socket.gethostname(),
        is_stopped=is_stopped(pid),
        own_bytes=held.get("RssAnon", 0) + held.get("RssFile", 0),
        shared_bytes=held.get("RssShmem", 0),
        num_threads=int(words[NUM_THREADS]),
        cpu_s=(int(words[USER_TICKS]) + int(words[SYSTEM_TICKS])) / os.sysconf("SC_CLK_TCK"),
        stacks=() if isinstance(stacks, str) else stacks,
        why_no_stacks=stacks if isinstance(stacks, str) else "",
    )


def _object_store(pids: Iterator[int]) -> tuple[int, int]:
    """Bytes of the object store of the raylet that started these, and its limit."""
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            parent = int(stat_fields(pid)[PARENT])
            words = (PROC / str(parent) / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if Path(words[0]).name == "raylet":
                limit = next(word for word in words if word.startswith("--object_store_memory="))
                # its file has no name any more; blocks are those that were ever written
                files = [
                    link for link in (PROC / str(parent) / "fd").iterdir() if "plasma" in os.readlink(link)
                ]
                return sum({(at := link.stat()).st_ino: at.st_blocks << 9 for link in files}.values()), int(
                    limit.split("=")[1]
                )
    return 0, 0
