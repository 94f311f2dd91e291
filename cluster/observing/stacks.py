"""Stacks of another process of this machine, whatever it does: by py-spy, else from its stack page.

py-spy reads the memory of a process, of a stopped one too. Without it, or without the right to use it, the process's
own `faulthandler` is asked by a signal (`actors.waiting.stack_page`), which a stopped one does not hear.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlhfspec.actors.waiting.stack_page import STACKS_SIGNAL
from rlhfspec.core.proc_files import stat_fields

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
