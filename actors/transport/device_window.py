"""Device memory of one process that others on the same GPU read: CUDA's inter-process handles, as torch passes them on.

The owner keeps the memory for as long as anybody reads it; what is written there is ordered by the host alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ...core.errors import PlacementError

_DEVICE = 6
"The place of the owner's device among what torch rebuilds a tensor from."


Offered = tuple[Any, ...]
"What torch rebuilds a CUDA tensor from: its form and CUDA's handles."


def offer(memory: Tensor) -> Offered:
    """Return what another process of this machine needs to read a CUDA tensor. Raises PlacementError: it is none."""
    if memory.device.type != "cuda":
        raise PlacementError(
            f"expected memory of a GPU that others can read, got a tensor on {memory.device}"
        )
    rebuild, parts = reduce_tensor(memory)
    if rebuild is not rebuild_cuda_tensor:
        raise PlacementError(
            f"torch {torch.__version__} passes CUDA tensors on in a way that is not known here"
        )
    return tuple(parts)


def reach(offered: Offered, device: torch.device | None) -> Tensor:
    """Return the offered memory as a tensor, on what this process calls `device`. Raises PlacementError."""
    parts = list(offered)
    if device is not None:
        # the owner's number of the GPU they share
        parts[_DEVICE] = device.index or 0
    try:
        return rebuild_cuda_tensor(*parts)
    except RuntimeError as error:
        raise PlacementError(f"cannot read the trainer's memory on {device}: {error}") from error
