"""Generation actor: a thin Ray shell around the decode loop of one instance.

`run` occupies the default thread for the actor's life. The group `control` carries orders into the
loop's mailbox; the group `poll` holds the scheduler's one open poll, so that a slow order never delays
a heartbeat; `moves` carries, in order, what is said about moving samples; `transfer` takes frames that
come through the object store. `max_restarts=0`: a restarted actor would be empty; the loop makes a replacement and the
scheduler queues its samples again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from ...core.errors import WaitTimeout, WeightsError
from ...core.records import Completion, SampleKey, SampleRequest
from ...core.weight_records import WeightManifest
from ...policies.migration.move_messages import CallOff, MoveOrder, PeerMessage, Settle
from ..actor_messages import (
    FinishedText,
    GenerationSpec,
    HeadComparison,
    HeadProgress,
    HeldSamples,
    InstanceNumerics,
    LoadedWeights,
    PollReply,
)
from ..remote.actor_start import begin_actor
from ..remote.remote import Handle, remote
from ..trace_events import TraceEvent
from .decode_loop import DecodeLoop
from .gauges import InstanceGauges
from .loop_orders import (
    CallOrder,
    CutOrder,
    HoldOrder,
    LoadOrder,
    LoopOrder,
    MoveEventOrder,
    RememberOrder,
    StepLogOrder,
    StopOrder,
    SubmitOrder,
)

if TYPE_CHECKING:
    from ...engine.exchange import CachePiece
    from ..transport.broadcast import BroadcastGroup, BroadcastTicket


@remote(max_restarts=0, concurrency_groups={"control": 3, "poll": 1, "moves": 1, "transfer": 1})
class GenerationActor:
    """One instance, or the leader of its ranks (`rank_actors`)."""

    def __init__(self, spec: GenerationSpec) -> None:
        # The scheduler imports this module with a handle and has no use for torch: seconds and memory.
        from .engine_host import ManifestHost
        from .ray_endpoint import RayMigrationEndpoint

        begin_actor(spec.instance)
        self._spec = spec
        self._gauges = InstanceGauges(spec.instance)
        self._group: BroadcastGroup | None = None
        self._host = host = ManifestHost(spec)
        self._endpoint = RayMigrationEndpoint(spec, host) if spec.migration else None
        self._loop = DecodeLoop(
            spec.instance,
            host,
            report_interval_s=spec.report_interval_s,
            on_report=self._gauges.update,
            make_migrator=self._endpoint.open if self._endpoint else None,
        )
        host.on_lost = self._loop.lose

    def __repr__(self) -> str:
        return f"GenerationActor({self._spec.instance if '_spec' in vars(self) else 'not made'})"

    def run(self) -> None:
        """Decode until told to stop; the caller keeps the reference as a death sentinel."""
        from ...engine.numerics import use_threads

        # The number of threads is a setting of the calling thread, and this thread does the work.
        use_threads(self._spec.engine.num_threads)
        try:
            self._loop.run()
        finally:
            self._host.close()
            self._gauges.close()
            if self._endpoint is not None:
                self._endpoint.close()

    @ray.method(concurrency_group="poll")
    def poll(self, acknowledged: int, wait_s: float) -> PollReply:
        """Answer with what finished, at once or after `wait_s` with nothing."""
        self._gauges.repeat()
        return self._loop.poll(acknowledged=acknowledged, wait_s=wait_s)

    @ray.method(concurrency_group="control")
    def submit(self, requests: tuple[SampleRequest, ...], timeout_s: float, term: int = 0) -> None:
        """Take samples. Raises DataError for one that does not fit the context."""
        self._carry_out(SubmitOrder(requests=requests, term=term), timeout_s)

    @ray.method(concurrency_group="control")
    def cut(self, keys: frozenset[SampleKey], term: int = 0) -> None:
        """End these samples where they are; `poll` tells what there is of each. Nobody waits for the order itself."""
        self._loop.order(CutOrder(keys=keys, term=term))

    @ray.method(concurrency_group="control")
    def so_far(self, keys: frozenset[SampleKey], timeout_s: float) -> tuple[Completion, ...]:
        """What there is of these samples, of those that run here, between two decode steps; they go on."""
        call = partial(self._host.so_far, keys)
        return self._carry_out(CallOrder(what="tell what there is of samples", call=call), timeout_s)

    @ray.method(concurrency_group="control")
    def hold(self, term: int, timeout_s: float) -> HeldSamples:
        """Answer what is held, and take no samples from a scheduler of an earlier term any more."""
        return self._carry_out(HoldOrder(term=term), timeout_s)

    @ray.method(concurrency_group="control")
    def load_weights(self, timeout_s: float, manifest: WeightManifest, *chunks: np.ndarray) -> LoadedWeights:
        """Load one version of one model between decode steps; no sample may be open.

        Raises WeightsError when the chunks do not match the manifest or a sample is open.
        """
        return self._carry_out(LoadOrder(manifest=manifest, chunks=chunks), timeout_s)

    @ray.method(concurrency_group="control")
    def remember(self, texts: Sequence[FinishedText], timeout_s: float) -> None:
        """Look up in what other instances have finished, too."""
        others = tuple((text.prompt, text.response) for text in texts if text.instance != self._spec.instance)
        self._carry_out(RememberOrder(responses=others), timeout_s)

    @ray.method(concurrency_group="control")
    def join_broadcast(self, ticket: BroadcastTicket, rank: int, timeout_s: float) -> None:
        """Join the trainer's broadcast group. Raises WaitTimeout."""
        from ..transport.broadcast import join_broadcast

        if self._group is not None:
            # a group keeps threads, and NCCL's device memory, until it is left
            self._group.close()
        self._group = join_broadcast(
            ticket,
            rank=rank,
            me=self._spec.instance,
            host=ray.util.get_node_ip_address(),
            timeout_s=timeout_s,
            device=self._host.device,
        )

    @ray.method(concurrency_group="control")
    def node(self) -> str:
        """Ray's id of the node that it runs on."""
        return ray.get_runtime_context().get_node_id()

    @ray.method(concurrency_group="control")
    def gpu_seat(self) -> str | None:
        """The GPU that decodes, by a name that no other GPU of the cluster has; None: a CPU."""
        from ..remote.assigned_device import gpu_seat

        return gpu_seat(self._host.device)

    @ray.method(concurrency_group="control")
    def receive_weights(self, timeout_s: float, layout: WeightManifest) -> LoadedWeights:
        """Load the target's next version from the broadcast group between decode steps; no sample may be open.

        `layout` is an earlier manifest with the new version: names, shapes and sizes.
        """
        if self._group is None:
            raise WeightsError(f"{self._spec.instance} is in no broadcast group")
        return self._carry_out(LoadOrder(manifest=layout, chunks=(), group=self._group), timeout_s)

    @ray.method(concurrency_group="control")
    def numerics(self) -> InstanceNumerics:
        """What is promised of tokens here, and why; to be asked once all models have weights."""
        return self._host.numerics()

    @ray.method(concurrency_group="control", num_returns=2)
    def take_head(self, timeout_s: float) -> tuple[HeadProgress, dict[str, np.ndarray]]:
        """What spot training did since the last published head, and the tensors that came of it."""
        return self._carry_out(
            CallOrder(what="hand over the trained head", call=self._host.head_progress), timeout_s
        )

    @ray.method(concurrency_group="control")
    def compare_head(self, timeout_s: float, manifest: WeightManifest, *chunks: np.ndarray) -> HeadComparison:
        """Compare a head that is not published with the present one on what is held out here."""
        call = partial(self._host.compare_head, manifest, chunks)
        return self._carry_out(CallOrder(what="compare draft heads", call=call), timeout_s)

    @ray.method(concurrency_group="control")
    def give_up_head(self, timeout_s: float) -> None:
        """Train again from the published head, at half the rate."""
        self._carry_out(CallOrder(what="give up the trained head", call=self._host.give_up_head), timeout_s)

    @ray.method(concurrency_group="control")
    def train_on_head(self, timeout_s: float) -> None:
        """Train on from what was learned here: nobody could compare it."""
        self._carry_out(CallOrder(what="train the head on", call=self._host.train_on_head), timeout_s)

    @ray.method(concurrency_group="control")
    def stop(self, timeout_s: float) -> None:
        """Leave the loop at the next step boundary."""
        self._carry_out(StopOrder(), timeout_s)

    @ray.method(concurrency_group="moves")
    def move_out(self, orders: tuple[MoveOrder, ...], destinations: dict[str, Handle], term: int = 0) -> None:
        """Move samples to other instances; what comes of it is said in the polls."""
        if self._endpoint is not None:
            for name, handle in destinations.items():
                self._endpoint.meet(name, handle)
        for order in orders:
            self._loop.order(MoveEventOrder(event=order, term=term))

    @ray.method(concurrency_group="moves")
    def settle(self, verdicts: tuple[Settle | CallOff, ...], term: int = 0) -> None:
        """Take the scheduler's word on moves."""
        for verdict in verdicts:
            self._loop.order(MoveEventOrder(event=verdict, term=term))

    @ray.method(concurrency_group="moves")
    def peer_messages(
        self,
        messages: tuple[PeerMessage, ...],
        pieces: tuple[tuple[CachePiece, ...], ...],
        sender: str,
        handle: Handle,
    ) -> None:
        """Take what another instance says about moves, and the pieces of caches beside each message."""
        if self._endpoint is not None:
            self._endpoint.meet(sender, handle)
        for message, beside in zip(messages, pieces, strict=True):
            self._loop.order(MoveEventOrder(event=message, pieces=beside))

    @ray.method(concurrency_group="transfer")
    def deliver_frame(self, channel: str, sequence: int, frame: np.ndarray | None) -> str:
        """Take a frame that comes through the object store."""
        return self._endpoint.deliver(channel, sequence, frame) if self._endpoint is not None else "gone"

    @ray.method(concurrency_group="control")
    def close_channels(self) -> None:
        """Close the channels to other instances; the next move opens them anew."""
        if self._endpoint is not None:
            self._endpoint.close_channels()

    @ray.method(concurrency_group="control")
    def take_spans(self) -> list[TraceEvent]:
        """Return what this instance did since the last call: decode steps, transfers, arrivals."""
        return self._loop.spans.take()

    @ray.method(concurrency_group="control")
    def take_step_log(self, timeout_s: float) -> bytes:
        """What every decode step since the last call saw, decided and did, as a file; empty where none was made."""
        from ...profiles.step_log import PolicyOrigin, encode_step_log

        records = self._carry_out(StepLogOrder(), timeout_s)
        origin = PolicyOrigin(
            speculation=self._spec.speculation,
            profile=self._spec.profile,
            takes_drafts=self._spec.takes_drafts,
        )
        return encode_step_log(records, origin) if records else b""

    def _carry_out(self, order: LoopOrder, timeout_s: float) -> Any:
        future: Future = self._loop.order(order)
        try:
            return future.result(timeout=timeout_s)
        except FutureTimeout:
            if future.done():
                raise
            raise WaitTimeout(
                waiter="a caller",
                waited_for=f"the decode loop of {self._spec.instance} (boundary {self._loop.boundary})",
                order=str(order),
                waited_s=timeout_s,
                advice="a decode step takes too long; lower engine.max_running_samples or raise "
                "cluster.order_timeout_s",
            ) from None
