"""A bucket's bytes on the host, where its checksum is computed: XXH3 runs on processors only."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class HostMirror:
    """One buffer, pinned for a GPU's buckets, that is written over and over."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def of(self, bucket: Tensor) -> np.ndarray:
        """Return a bucket's bytes, uint8 [n], once they are here; valid until the next call.

        A bucket of the host is copied too: whoever has none on a device does without a mirror.
        """
        on_gpu = bucket.device.type == "cuda"
        if len(self._room) < len(bucket):
            self._room = torch.empty(len(bucket), dtype=torch.uint8, pin_memory=on_gpu)
        here = self._room[: len(bucket)]
        here.copy_(bucket, non_blocking=on_gpu)
        if on_gpu:
            # only what packs and copies: transfers of earlier buckets have a stream of their own
            torch.cuda.current_stream(bucket.device).synchronize()
        return here.numpy()
