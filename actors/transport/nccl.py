"""Back end "nccl": a private `ProcessGroupNCCL` per channel, for instances on GPUs of their own.

Frames pass through a staging buffer on the device. Written after torch's sources and not yet run: it
needs two GPUs, and its tests say so where there are none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .device_group import abort, finish, open_nccl, require_nccl, within
from .process_group import Pair, PairTransport
from .rendezvous import PairStore


class NcclTransport(PairTransport):
    """NCCL pairs that meet at the address `host` of this node."""

    name = "nccl"

    def __init__(self, *, host: str, timeout_s: float = 5.0, device: int = 0) -> None:
        """Use the GPU `device`, a number among those this process sees.

        Raises PlacementError where torch has no NCCL or no such GPU.
        """
        require_nccl(torch.device("cuda", device))
        super().__init__(host=host, timeout_s=timeout_s)
        self._device = torch.device("cuda", device)

    def _open_pair(self, store: PairStore, rank: int) -> Pair:
        group = open_nccl(store, rank, 2, device=self._device, timeout_s=self._timeout_s)
        return NcclPair(group, store, peer_rank=1 - rank, device=self._device)


class NcclPair:
    """A joined NCCL group of two. The communicator is made by the first transfer, through the store."""

    def __init__(self, group: Any, store: PairStore, *, peer_rank: int, device: torch.device) -> None:
        self._group = group
        self._store = store
        self._peer_rank = peer_rank
        self._device = device
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)

    # NCCL knows no tags: the length goes ahead, so that a frame of another length raises at the receiver
    # instead of being written past its buffer.

    def send(self, frame: np.ndarray, timeout_s: float) -> None:
        """See `Pair`."""
        deadline_s = time.monotonic() + timeout_s
        with torch.cuda.device(self._device):
            length = torch.tensor([frame.size], dtype=torch.int64, device=self._device)
            self._finish(lambda group: group.send([length], self._peer_rank, 0), deadline_s)
            staged = self._staged(frame.size)
            staged.copy_(torch.from_numpy(frame))
            self._finish(lambda group: group.send([staged], self._peer_rank, 0), deadline_s)

    def recv(self, into: np.ndarray, timeout_s: float) -> None:
        """See `Pair`."""
        deadline_s = time.monotonic() + timeout_s
        with torch.cuda.device(self._device):
            length = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._finish(lambda group: group.recv([length], self._peer_rank, 0), deadline_s)
            if int(length.item()) != into.size:
                self.close()
                raise RuntimeError(f"{int(length.item())} bytes")
            staged = self._staged(into.size)
            self._finish(lambda group: group.recv([staged], self._peer_rank, 0), deadline_s)
            torch.from_numpy(into).copy_(staged)

    def close(self) -> None:
        """See `Pair`."""
        group, self._group = self._group, None
        if group is not None:
            abort(group, self._device)
            self._store.close()

    def _joined(self) -> Any:
        if (group := self._group) is None:
            raise RuntimeError("a pair closed on this side")
        return group

    def _staged(self, length: int) -> torch.Tensor:
        if self._staging.numel() < length:
            self._staging = torch.empty(length, dtype=torch.uint8, device=self._device)
        return self._staging[:length]

    def _finish(self, begin: Callable[[Any], Any], deadline_s: float) -> None:
        group = self._joined()
        try:
            work = within(lambda: begin(group), deadline_s - time.monotonic(), self._device)
            finish(work, deadline_s - time.monotonic())
        except RuntimeError:
            self.close()
            raise
