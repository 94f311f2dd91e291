"""Memory of this process: told to the metrics port by a thread of its own every few seconds, and given back."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from . import run_metrics

EVERY_S = 5.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def begin_process_metrics(actor: str) -> None:
    """Set the gauges from now on, until the process ends."""
    export_process_metrics(actor)

    def export() -> None:
        while True:
            time.sleep(EVERY_S)
            with suppress(Exception):
                export_process_metrics(actor)

    threading.Thread(target=export, name="process-metrics", daemon=True).start()


def export_process_metrics(actor: str) -> None:
    """Set the gauges once; where the system has no /proc, only the GPU's."""
    with suppress(OSError):
        with open("/proc/self/statm") as file:
            _, resident, shared, *_ = (int(word) * _PAGE_BYTES for word in file.read().split())
        run_metrics.set_value("process_resident_bytes", resident, actor=actor)
        run_metrics.set_value("process_shared_bytes", shared, actor=actor)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        run_metrics.set_value("process_gpu_bytes", torch.cuda.memory_reserved(), actor=actor)


def _trim() -> Callable[[int], Any] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        # another C library
        return None


_malloc_trim = _trim()


def give_back_free_memory() -> None:
    """Give free pages of this process back to the system; milliseconds. Nothing where the C library is not glibc.

    What an iteration computes is freed between what lasts, in the arenas of many threads; glibc gives back only what
    lies at the end of the main one: a process that keeps nothing would grow for hundreds of iterations.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)
