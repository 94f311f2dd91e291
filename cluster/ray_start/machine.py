"""What this machine has: memory, shared memory, disk, GPUs. Linux only; None where it cannot be known."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ...core.proc_files import PROC, sizes

_CGROUP_LIMITS = [Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Gpus:
    """Those of one machine."""

    number: int
    each_bytes: int
    "of memory, of the smallest"


def gpus() -> Gpus:
    """Those that torch sees here."""
    import torch

    devices = range(torch.cuda.device_count())
    sizes = [torch.cuda.get_device_properties(index).total_memory for index in devices]
    return Gpus(len(sizes), min(sizes, default=0))


def memory_bytes() -> int | None:
    """Memory this process may count on: what is available now, at most the container's limit."""
    available = sizes(PROC / "meminfo").get("MemAvailable")
    limits = [limit for path in _CGROUP_LIMITS if (limit := _read_limit(path)) is not None]
    return min([available, *limits]) if available is not None else None


def free_disk_bytes(folder: Path) -> int:
    """Free bytes where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def shared_memory_bytes() -> int | None:
    """Free bytes of /dev/shm, which holds Ray's object store."""
    return shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_limit(path: Path) -> int | None:
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None
