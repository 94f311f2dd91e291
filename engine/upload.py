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
    if device.type == "cpu" or not arrays:
        return [torch.from_numpy(array) for array in arrays]
    # torch keeps pinned memory until the copy has been made
    packed = pack(arrays, pinned=device.type == "cuda")
    return unpack(packed.to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[np.ndarray], *, pinned: bool) -> Tensor:
    """Return the arrays' bytes behind one another, each part aligned, uint8."""
    sizes = _aligned_sizes(arrays)
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    for array, part in zip(arrays, packed.split(sizes), strict=True):
        part.numpy()[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def unpack(packed: Tensor, like: Sequence[np.ndarray]) -> list[Tensor]:
    """Return the parts of packed bytes as views, in types and shapes of the arrays that they were packed from."""
    return [
        part[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, part in zip(like, packed.split(_aligned_sizes(like)), strict=True)
    ]


def _aligned_sizes(arrays: Sequence[np.ndarray]) -> list[int]:
    return [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
