"""Back end "gloo": a private `ProcessGroupGloo` per channel, outside torch.distributed's global state.

A killed peer is seen at once, a silent one at the timeout, and other channels do not notice either.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed

from ...core.errors import ConfigError
from .channels import reason_of
from .process_group import Pair, PairTransport
from .rendezvous import PairStore

_ProcessGroupGloo: Any = torch.distributed.ProcessGroupGloo


class GlooTransport(PairTransport):
    """Gloo pairs bound to the address `host` of this node."""

    name = "gloo"

    def __init__(self, *, host: str, timeout_s: float = 5.0) -> None:
        """Raise ConfigError when `host` is no address of this node."""
        super().__init__(host=host, timeout_s=timeout_s)
        try:
            _ProcessGroupGloo.create_device(hostname=host)
        except RuntimeError as error:
            raise ConfigError(
                f"the transport gloo cannot use the address {host}: expected one of this node, got "
                f"'{reason_of(error)}'; pass the node's own address"
            ) from error

    @cached_property
    def _device(self) -> Any:
        # Gloo's own would be the loopback's. It wakes a hundred times a second: from the first pair on, not before.
        return _ProcessGroupGloo.create_device(hostname=self._host)

    def close(self) -> None:
        """See `Transport`."""
        super().close()
        self.__dict__.pop("_device", None)

    def _open_pair(self, store: PairStore, rank: int) -> Pair:
        options = _ProcessGroupGloo._Options()
        options._devices = [self._device]
        options._threads = 1
        options._timeout = timedelta(seconds=self._timeout_s)
        try:
            group = _ProcessGroupGloo(store, rank, 2, options)
        finally:
            # Addresses have been exchanged; gloo needs the store no more.
            store.close()
        return GlooPair(group, peer_rank=1 - rank)


class GlooPair:
    """A joined gloo group of two."""

    def __init__(self, group: Any, *, peer_rank: int) -> None:
        self._group, self._peer_rank = group, peer_rank

    # The length is the tag: gloo matches frames of equal length only, so a receiver that expects another
    # length waits in vain. Without it a longer frame ends the receiving process (gloo throws in a thread of
    # its own) and a shorter one leaves the buffer's tail unfilled and reports success.

    def send(self, frame: np.ndarray, timeout_s: float) -> None:
        """See `Pair`."""
        group = self._joined()
        work = group.send([torch.from_numpy(frame)], self._peer_rank, frame.size)
        work.wait(timedelta(seconds=timeout_s))

    def recv(self, into: np.ndarray, timeout_s: float) -> None:
        """See `Pair`."""
        # Held until the wait is over, even if another thread closes this pair meanwhile.
        group = self._joined()
        work = group.recv([torch.from_numpy(into)], self._peer_rank, into.size)
        work.wait(timedelta(seconds=timeout_s))

    def close(self) -> None:
        """See `Pair`."""
        self._group = None

    def _joined(self) -> Any:
        if (group := self._group) is None:
            raise RuntimeError("a pair closed on this side")
        return group
