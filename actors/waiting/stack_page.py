"""Stacks of a process's threads for `rlhfspec diagnose`: written to a page of memory at SIGUSR2, read from outside.

The page is a memory file (Linux) whose name says run and actor, so that who looks finds a run's processes on a machine
without asking any of them. `faulthandler` writes from the signal's handler: a thread that hangs in C is shown too.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
from contextlib import suppress

STACKS_SIGNAL = signal.SIGUSR2
PAGE_STEM = "rlhfspec"
_NAME_BYTES = 200
"Linux takes 249."

_page: int | None = None


def page_name(run: str, actor: str) -> str:
    """Name of the memory file; a long one is cut."""
    return f"{PAGE_STEM}:{actor}:{run}".encode()[:_NAME_BYTES].decode(errors="ignore").replace("\0", "")


def begin_stack_page(run: str, actor: str) -> None:
    """Answer STACKS_SIGNAL from here on; where the system has no memory files, nothing."""
    global _page
    end_stack_page()
    with suppress(OSError, ValueError, RuntimeError, AttributeError):
        page = os.memfd_create(page_name(run, actor))
        # each answer goes to the end, wherever the reader has cut the page
        fcntl.fcntl(page, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(STACKS_SIGNAL, file=page, all_threads=True)
        _page = page


def end_stack_page() -> None:
    """Give the page back; the signal is ignored from here on, since by default it ends a process."""
    global _page
    if _page is None:
        return
    faulthandler.unregister(STACKS_SIGNAL)
    with suppress(ValueError):
        # a thread other than the main one may not
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    with suppress(OSError):
        os.close(_page)
    _page = None
