"""The target's later versions by broadcast groups of trainers and instances; the object store where that fails.

Groups are made when they are first needed, and made anew when instances were replaced. Where every instance sits on the
GPU of a trainer, each such trainer has a group of those on its own, which read its buckets there: no byte leaves a GPU.
Else the first trainer serves all, by NCCL where each has a GPU of its own, by Gloo where a group is asked for or
instances are on several nodes. A failed broadcast leaves instances that decode nothing until the object store has
brought them a whole version.
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
from ...core.errors import InstanceLost, NumericsError, RlhfSpecError, WeightsError
from ...core.weight_records import DEVICE_BUCKET_BYTES, WORDS, WeightManifest
from ...engine.weights.chunks import CHUNK_BYTES
from ..weights.publish import PublishedWeights, confirm, part_seconds
from .trainer_pool import TrainerPool

if TYPE_CHECKING:
    from ...actors.transport.broadcast import BroadcastForm

JOIN_TIMEOUT_S = 30.0
"For all members to come, and for each bucket."
_GRACE_S = 5.0


class Broadcast:
    """The loop's side of the groups; `publish` answers None where the object store has to serve."""

    def __init__(self, cluster: ClusterConfig, trainers: TrainerPool, note: Callable[[str], None]) -> None:
        """`note` is told once, in one line, what keeps weights from going between GPUs, or ends broadcasting."""
        transport = cluster.publication.transport
        # on one node the object store is shared memory, and faster than a group over loopback (measured)
        self._is_on = transport in ("broadcast", "nccl") or (transport == "auto" and num_nodes() > 1)
        self._may_share = cluster.is_on_gpus and transport != "object_store"
        self._tries_nccl = transport == "nccl" or (transport == "auto" and cluster.is_on_gpus)
        self._timeout_s = cluster.order_timeout_s
        self._trainers, self._note = trainers, note
        self._members: tuple[str, ...] = ()
        self._served: dict[str, tuple[str, ...]] = {}
        "instances by the trainer that serves them; empty: the object store serves these members"
        self._checksums = WORDS if cluster.is_on_gpus else ""
        self._form_now: BroadcastForm = "gloo"

    def publish(
        self, layout: PublishedWeights, weight_version: int, instances: Mapping[str, Handle]
    ) -> PublishedWeights | None:
        """Bring every instance the trainers' version; each has confirmed it. None: do it by the object store.

        Args:
            layout: an earlier version, for names and sizes.
            weight_version: that the trainers have now.
            instances: that are to get it, all living ones.

        Raises:
            NumericsError: the weights are not finite.
        """
        if not (self._is_on or self._may_share or self._tries_nccl) or not instances:
            return None
        announced = replace(layout.manifest, weight_version=weight_version, checksum=self._checksums)
        try:
            if self._members != tuple(instances):
                self._gather(announced, instances)
            if not self._served:
                return None
            return self._send(announced.in_chunks_of(self._bucket_bytes), instances)
        except NumericsError:
            raise
        except RlhfSpecError as error:
            # a dead or a frozen instance is found by the publication that follows
            is_death = isinstance(error, InstanceLost)
            self._members = ()
            if not is_death:
                # no way between devices is tried again, and whoever asked for a group has Gloo's
                self._tries_nccl = self._may_share = False
                self._is_on = self._is_on and self._form_now != "gloo"
            goes_on = self._is_on or self._may_share or self._tries_nccl
            for one in self._trainers.handles.values():
                one.close_broadcast.remote()
            again = "this once" if goes_on else "from here on"
            if self._is_on and not is_death:
                again += ", a Gloo group from then on"
            self._note(f"publication by broadcast failed ({error}); the object store carries weights {again}")
            return None

    def _gather(self, announced: WeightManifest, instances: Mapping[str, Handle]) -> None:
        """Make the groups that these instances are served by, if any."""
        self._form_now, self._served = self._choose(instances)
        self._bucket_bytes = CHUNK_BYTES if self._form_now == "gloo" else DEVICE_BUCKET_BYTES
        room_bytes = max(announced.in_chunks_of(self._bucket_bytes).chunk_num_bytes, default=0)
        trainers = self._trainers.handles
        for name in trainers.keys() - self._served:
            trainers[name].close_broadcast.remote()
        opened = {
            name: trainers[name].open_broadcast.remote(members, self._form_now, room_bytes)
            for name, members in self._served.items()
        }
        tickets = self._all(opened, "open a broadcast group")
        joins = {name: trainers[name].join_broadcast.remote(JOIN_TIMEOUT_S) for name in tickets} | {
            member: instances[member].join_broadcast.remote(tickets[name], rank, JOIN_TIMEOUT_S)
            for name, members in self._served.items()
            for rank, member in enumerate(members, start=1)
        }
        self._all(joins, "join the broadcast group")
        self._members = tuple(instances)

    def _choose(self, instances: Mapping[str, Handle]) -> tuple[BroadcastForm, dict[str, tuple[str, ...]]]:
        """How they are served, and by whom; by nobody where the object store does it better."""
        first = self._trainers.first_name
        by_first = {first: tuple(instances)}
        if self._may_share or self._tries_nccl:
            asked = {
                name: one.gpu_seat.remote() for name, one in {**self._trainers.handles, **instances}.items()
            }
            seats = self._all(asked, "name its GPU")
            trainers = {name: seats[name] for name in self._trainers.handles}
            others = {name: seats[name] for name in instances}
            if self._may_share and (beside := beside_trainers(trainers, others)) is not None:
                return "shared", beside
            hindrance = why_not_nccl({first: trainers[first]} | others)
            if self._tries_nccl and hindrance is None:
                return "nccl", by_first
            if self._tries_nccl:
                self._tries_nccl = False
                way = "the host (Gloo)" if self._is_on else "the object store"
                self._note(f"weights go through {way}, not over NCCL: {hindrance}")
        return "gloo", by_first if self._is_on else {}

    def _send(self, announced: WeightManifest, instances: Mapping[str, Handle]) -> PublishedWeights:
        began_s, size = awake_s(), self._bucket_bytes
        answers = self._all(
            {
                # who serves nobody takes part where each holds a part of every weight
                name: one.broadcast.remote(announced, size) if name in self._served else one.follow.remote()
                for name, one in self._trainers.handles.items()
            }
            | {
                name: handle.receive_weights.remote(self._timeout_s, announced)
                for name, handle in instances.items()
            },
            f"pass on {announced.model} version {announced.weight_version}",
        )
        sent: dict[str, SentWeights] = {name: answers[name] for name in self._served}
        (first, manifest), *others = ((name, one.manifest) for name, one in sent.items())
        if odd := [name for name, other in others if not other.describes_what(manifest)]:
            raise WeightsError(
                f"{odd[0]} and {first} hold different weights of version {manifest.weight_version}, expected equal ones"
            )
        loaded: list[LoadedWeights] = [answers[name] for name in instances]
        for answer in loaded:
            confirm(answer, manifest)
        return PublishedWeights(
            manifest=manifest,
            chunk_refs=(),
            fetch=self._trainers.begin_take,
            part_seconds=part_seconds(
                awake_s() - began_s, loaded, pack_s=max(one.pack_s for one in sent.values())
            ),
        )

    def _all(self, refs: Mapping[str, Any], order: str) -> dict[str, Any]:
        """Wait for every answer, then raise the first error: nobody is left waiting in the group."""
        answers: dict[str, Any] = {}
        failed: list[RlhfSpecError] = []
        for name, ref in refs.items():
            try:
                answers[name] = get(
                    ref, waiter="the loop", waited_for=name, order=order, timeout_s=self._timeout_s + _GRACE_S
                )
            except RlhfSpecError as error:
                failed.append(error)
        if failed:
            raise next(
                (error for error in failed if isinstance(error, InstanceLost | NumericsError)), failed[0]
            )
        return answers


def beside_trainers(
    trainers: Mapping[str, str | None], instances: Mapping[str, str | None]
) -> dict[str, tuple[str, ...]] | None:
    """Instances by the trainer on whose GPU they sit, by the names of GPUs; None: not all sit beside one."""
    on = {seat: name for name, seat in trainers.items() if seat is not None}
    found: dict[str, tuple[str, ...]] = {}
    for name, seat in instances.items():
        if seat is None or seat not in on:
            return None
        found[on[seat]] = (*found.get(on[seat], ()), name)
    return found


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
