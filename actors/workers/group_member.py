"""What every actor that trains has in common: its device, and the group in which several trainers learn as one."""

from __future__ import annotations

from typing import Any, Literal

import ray
import torch

from ...learning.training.parallel import DataParallel, OneTrainer, join_group, meet, new_store, store_at
from ...learning.training.sharded import Sharded
from ..actor_messages import TrainerMeeting
from ..remote.assigned_device import assigned_gpus, resolve_device


class GroupMember:
    """One trainer of `size`, in the order of ranks; alone until it has met the others."""

    def __init__(self, name: str, *, rank: int, size: int, timeout_s: float) -> None:
        """`timeout_s` is of every wait in the group once it has met."""
        self._name, self._rank, self._size, self._timeout_s = name, rank, size, timeout_s
        self._trainers = OneTrainer()
        self._store: Any = None
        self._meeting: TrainerMeeting | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self).get('_name', 'not made')})"

    def open_group(self, timeout_s: float) -> TrainerMeeting:
        """Make a place where the trainers meet, at this node's address; for the first of them."""
        host = ray.util.get_node_ip_address()
        self._store = new_store(host, self._size, timeout_s)
        return TrainerMeeting(host=host, port=self._store.port, timeout_s=timeout_s)

    def meet_others(
        self, meeting: TrainerMeeting, device: torch.device, *, strategy: Literal["fsdp2", "ddp"]
    ) -> None:
        """Join the other trainers. Raises PeerLost when not all come in time."""
        self._meeting = meeting
        self._store = self._store or store_at(meeting.host, meeting.port, self._size, meeting.timeout_s)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # who comes late imports torch still: that is not what the group's own limit is for
        meet(self._store, "join", rank=self._rank, size=self._size, timeout_s=meeting.timeout_s)
        join_group(self._store, rank=self._rank, size=self._size, device=device, timeout_s=self._timeout_s)
        self._trainers = Sharded(device) if strategy == "fsdp2" else DataParallel()

    def wait_for_others(self) -> None:
        """Wait, where there are any, until all are here: loading has a longer limit than what follows."""
        if self._meeting is not None:
            meet(self._store, "load", rank=self._rank, size=self._size, timeout_s=self._meeting.timeout_s)

    def device_of(self, wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
        """Where it trains. Not kept: what Ray assigns to an actor stays."""
        return resolve_device(wanted, assigned=assigned_gpus(), key="trainer.device", pool="cluster.trainer")
