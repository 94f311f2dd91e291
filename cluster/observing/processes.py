"""The processes of a run on this machine, found and read from /proc alone: none of them need answer, nor Ray.

Each has a memory file whose name says run and actor (`actors.waiting.stack_page`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhfspec.actors.waiting.stack_page import PAGE_STEM, page_name
from rlhfspec.cluster.observing.stacks import ThreadStack, is_stopped, read_stacks
from rlhfspec.core.proc_files import NUM_THREADS, PARENT, PROC, SYSTEM_TICKS, USER_TICKS, sizes, stat_fields

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
