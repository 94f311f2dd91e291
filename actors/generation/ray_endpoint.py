"""Joins a migrator to Ray: handles of peers, this node's address, the transport that the config names."""

from __future__ import annotations

import time

import numpy as np
import ray

from ..actor_messages import GenerationSpec
from ..migration.context import MigrationContext
from ..migration.migrator import Migrator
from ..migration.peers import Peers
from ..migration.transfers import Transfers
from ..remote.remote import Handle
from ..transport.object_store import ObjectStoreTransport
from ..transport.select import make_transport
from .decode_loop import DecodeLoop
from .engine_host import ManifestHost
from .loop_orders import MoveEventOrder


class RayMigrationEndpoint:
    """What a generation actor holds of its moves."""

    def __init__(self, spec: GenerationSpec, host: ManifestHost) -> None:
        assert spec.migration is not None
        self._spec, self._host, self._settings = spec, host, spec.migration
        self._transfers: Transfers | None = None
        own_handle = ray.get_runtime_context().current_actor
        self._peers = Peers(spec.instance, own_handle)
        self._transport = make_transport(
            self._settings.transport,
            host=ray.util.get_node_ip_address(),
            timeout_s=self._settings.timeout_s,
            handle=own_handle,
        )

    def open(self, loop: DecodeLoop) -> Migrator:
        """Make the migrator of a decode loop."""
        self._transfers = Transfers(self._transport, self._settings, loop.spans.add)
        context = MigrationContext(
            instance=self._spec.instance,
            engine_or_none=lambda: self._host.engine,
            transfers=self._transfers,
            settings=self._settings,
            post=self._peers.post,
            come_back=lambda event: loop.order(MoveEventOrder(event=event)),
            report=loop.report,
            open_epochs=loop.open_epochs,
            note=loop.spans.add,
            clock=time.monotonic,
            wall_clock=time.time,
        )
        return Migrator(context)

    def meet(self, name: str, handle: Handle) -> None:
        """Remember how to reach a peer."""
        self._peers.meet(name, handle)

    def deliver(self, channel: str, sequence: int, frame: np.ndarray | None) -> str:
        """Hand a frame from the object store to its channel."""
        if isinstance(self._transport, ObjectStoreTransport):
            return self._transport.deliver(channel, sequence, frame)
        return "gone"

    def close_channels(self) -> None:
        """Close what is open; the next move opens its channel anew."""
        if self._transfers is not None:
            self._transfers.close_channels()

    def close(self) -> None:
        """Close every channel."""
        if self._transfers is not None:
            self._transfers.close()
