"""Messages between instances as Ray calls: fire and forget, because the protocol's timeouts look after losses."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from ...engine.exchange import CachePiece
from ...policies.migration.move_messages import PeerMessage
from ..remote.remote import Handle


class Peers:
    """The other instances this one has met; each message carries the sender's own handle for the answer."""

    def __init__(self, instance: str, own_handle: Handle) -> None:
        self._instance = instance
        self._own_handle = own_handle
        self._handles: dict[str, Handle] = {}
        self._unsent: dict[str, list[tuple[PeerMessage, tuple[CachePiece, ...]]]] = {}
        self._lock = threading.Lock()
        # a Ray call takes a millisecond or more, which the decode thread need not give
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="post")

    def meet(self, name: str, handle: Handle) -> None:
        """Remember how to reach a peer."""
        self._handles[name] = handle

    def post(self, peer: str, message: PeerMessage, pieces: tuple[CachePiece, ...]) -> None:
        """Send a message, and pieces of caches beside it, to a peer that was met; from the decode thread, not waiting.

        Messages that gather until the posting thread comes to them go together: moves are ordered many at once.
        """
        with self._lock:
            unsent = self._unsent.setdefault(peer, [])
            unsent.append((message, pieces))
            if len(unsent) > 1:
                return
        self._thread.submit(self._send, peer)

    def _send(self, peer: str) -> None:
        with self._lock:
            messages, pieces = zip(*self._unsent.pop(peer), strict=True)
        self._handles[peer].peer_messages.remote(messages, pieces, self._instance, self._own_handle)
