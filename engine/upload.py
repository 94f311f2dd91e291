"""Small host arrays to the device, together: on a GPU one copy from pinned memory, which the host does not wait for.

Copied one by one from pageable memory, as `tensor.to(device)` does, each would hold the host until the device has
taken it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"Bytes: a part begins where kernels may read several of its numbers at once."


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return the arrays as tensors on the device; on the CPU they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    # torch keeps pinned memory until the copy has been made
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for array, part in zip(arrays, packed.split(sizes), strict=True):
        part.numpy()[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = packed.to(device, non_blocking=True).split(sizes)
    return [
        part[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, part in zip(arrays, there, strict=True)
    ]
