"""Whether kernels of ours run on a device."""

from __future__ import annotations

import os
from importlib.util import find_spec
from shutil import which

import torch


def can_run_triton(device: torch.device) -> bool:
    """Whether kernels of ours run there: Triton is installed, and a C compiler for the launchers it makes."""
    compiler = os.environ.get("CC") or any(which(name) for name in ("cc", "gcc", "clang"))
    return device.type == "cuda" and find_spec("triton") is not None and bool(compiler)
