"""Where our own code computes."""

from __future__ import annotations

import torch

from engine.cpu.jit import can_make_code
from engine.cpu.writer import WIDTH


def serves_thread(device: torch.device) -> bool:
    """Whether our own code computes on this device at all: the CPU, by one thread."""
    return device.type == "cpu" and torch.get_num_threads() == 1 and can_make_code()


def serves(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether our own code computes such a model: by type, shape and threads alone, so in every forward or in none."""
    return dtype == torch.float32 and head_size % WIDTH == 0 and serves_thread(device)
