"""The target's later versions by a broadcast group of trainer and instances; the object store where that fails.

The group is made when it is first needed, and made anew when instances were replaced. Where trainer and instances share
one GPU, they read the trainer's buckets there; it is one of NCCL where that is asked for and each has a GPU of its own;
else one of Gloo, where that is asked for or instances are on several nodes. A failed broadcast leaves instances that
decode nothing until the object store has brought them a whole version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from ...actors.actor_messages import LoadedWeights, SentWeights
from ...actors.remote.remote import Handle
from ...actors.remote.waiting import awake_s, get
from ...core.config import ClusterConfig
from ...core.errors import InstanceLost, NumericsError, RlhfSpecError
from ...core.weight_records import DEVICE_BUCKET_BYTES, WORDS, WeightManifest
from ..weights.publish import PublishedWeights, confirm, part_seconds
from .trainer_pool import TrainerPool

if TYPE_CHECKING:
    from ...actors.transport.broadcast import BroadcastForm

JOIN_TIMEOUT_S = 30.0
"For all members to come, and for each bucket."
_GRACE_S = 5.0


class Broadcast:
    """The loop's side of the group; `publish` answers None where the object store has to serve."""

    def __init__(self, cluster: ClusterConfig, trainers: TrainerPool, note: Callable[[str], None]) -> None:
        """`note` is told once, in one line, when broadcasting is given up."""
        transport = cluster.publication.transport
        # on one node the object store is shared memory, and faster than a group over loopback (measured)
        self._is_on = transport in ("broadcast", "nccl") or (transport == "auto" and num_nodes() > 1)
        self._may_share = cluster.is_on_gpus and transport != "object_store"
        self._timeout_s = cluster.order_timeout_s
        self._trainers, self._note = trainers, note
        self._members: tuple[str, ...] = ()
        # by name only: it has never run, and torch bounds the making of its communicator by a limit of its own
        self._tries_nccl = transport == "nccl"
        self._checksums = WORDS if cluster.is_on_gpus else ""
        self._form_now: BroadcastForm = "gloo"

    def publish(
        self, layout: PublishedWeights, weight_version: int, instances: Mapping[str, Handle]
    ) -> PublishedWeights | None:
        """Bring every instance the trainer's version; each has confirmed it. None: do it by the object store.

        Args:
            layout: an earlier version, for names and sizes.
            weight_version: that the trainer has now.
            instances: that are to get it, all living ones.

        Raises:
            NumericsError: the weights are not finite.
        """
        if not (self._is_on or self._may_share) or not instances:
            return None
        announced = replace(layout.manifest, weight_version=weight_version, checksum=self._checksums)
        buckets = announced.in_chunks_of(DEVICE_BUCKET_BYTES)
        try:
            if self._members != tuple(instances) and not self._gather(buckets, instances):
                return None
            return self._send(announced if self._form_now == "gloo" else buckets, instances)
        except NumericsError:
            raise
        except RlhfSpecError as error:
            # a dead or a frozen instance is found by the publication that follows
            is_death, form = isinstance(error, InstanceLost), self._form_now
            self._members = ()
            if not is_death:
                # what failed is not tried again, and whoever asked for a group has Gloo's
                self._tries_nccl = self._tries_nccl and form != "nccl"
                self._may_share = self._may_share and form != "shared"
                self._is_on = self._is_on and form != "gloo"
            goes_on = self._is_on or self._may_share
            self._trainers.first.close_broadcast.remote()
            again = "this once" if goes_on else "from here on"
            then = ", a Gloo group from then on" if goes_on and not is_death else ""
            self._note(
                f"publication by broadcast failed ({error}); the object store carries weights {again}{then}"
            )
            return None

    def _gather(self, buckets: WeightManifest, instances: Mapping[str, Handle]) -> bool:
        """Make a group of trainer and instances; False: none serves better than the object store."""
        names = tuple(instances)
        sender, trainer = self._trainers.first_name, self._trainers.first
        form = self._choose(instances) if self._tries_nccl or self._may_share else "gloo"
        if form == "gloo" and not self._is_on:
            return False
        self._form_now = form
        room_bytes = max(buckets.chunk_num_bytes, default=0)
        opened = trainer.open_broadcast.remote(names, form, room_bytes)
        ticket = self._ask(opened, sender, "open a broadcast group")
        joins = {sender: trainer.join_broadcast.remote(JOIN_TIMEOUT_S)} | {
            name: handle.join_broadcast.remote(ticket, rank, JOIN_TIMEOUT_S)
            for rank, (name, handle) in enumerate(instances.items(), start=1)
        }
        self._all(joins, "join the broadcast group")
        self._members = names
        return True

    def _choose(self, instances: Mapping[str, Handle]) -> BroadcastForm:
        asked = {self._trainers.first_name: self._trainers.first.gpu_seat.remote()} | {
            name: handle.gpu_seat.remote() for name, handle in instances.items()
        }
        seats = self._all(asked, "name its GPU")
        if self._may_share and len(set(seats.values())) == 1 and None not in seats.values():
            return "shared"
        self._may_share = False
        if not self._tries_nccl:
            return "gloo"
        if (hindrance := why_not_nccl(seats)) is None:
            return "nccl"
        # of a broadcast that goes through the host this is said once
        self._tries_nccl = False
        self._note(f"weights are broadcast through the host (Gloo), not over NCCL: {hindrance}")
        return "gloo"

    def _send(self, announced: Any, instances: Mapping[str, Handle]) -> PublishedWeights:
        began_s = awake_s()
        order = f"pass on {announced.model} version {announced.weight_version}"
        sender, following = self._trainers.first_name, self._trainers.follow()
        answers = self._all(
            {sender: self._trainers.first.broadcast.remote(announced)}
            | following
            | {
                name: handle.receive_weights.remote(self._timeout_s, announced)
                for name, handle in instances.items()
            },
            order,
        )
        sent: SentWeights = answers[sender]
        loaded: list[LoadedWeights] = [answers[name] for name in instances]
        for answer in loaded:
            confirm(answer, sent.manifest)
        return PublishedWeights(
            manifest=sent.manifest,
            chunk_refs=(),
            fetch=self._trainers.begin_take,
            part_seconds=part_seconds(awake_s() - began_s, loaded, pack_s=sent.pack_s),
        )

    def _all(self, refs: Mapping[str, Any], order: str) -> dict[str, Any]:
        """Wait for every answer, then raise the first error: nobody is left waiting in the group."""
        answers: dict[str, Any] = {}
        failed: list[RlhfSpecError] = []
        for name, ref in refs.items():
            try:
                answers[name] = self._ask(ref, name, order)
            except RlhfSpecError as error:
                failed.append(error)
        if failed:
            raise next(
                (error for error in failed if isinstance(error, InstanceLost | NumericsError)), failed[0]
            )
        return answers

    def _ask(self, ref: Any, waited_for: str, order: str) -> Any:
        timeout_s = self._timeout_s + _GRACE_S
        return get(ref, waiter="the loop", waited_for=waited_for, order=order, timeout_s=timeout_s)


def why_not_nccl(seats: Mapping[str, str | None]) -> str | None:
    """What keeps these members, with their GPUs' names, from an NCCL group; None: each has a GPU of its own."""
    owners: dict[str, str] = {}
    for name, seat in seats.items():
        if seat is None:
            return f"{name} is on a CPU"
        if (other := owners.setdefault(seat, name)) != name:
            return f"{other} and {name} share {seat}"
    return None


def num_nodes() -> int:
    """Living nodes of the cluster."""
    return sum(bool(node["Alive"]) for node in ray.nodes())
