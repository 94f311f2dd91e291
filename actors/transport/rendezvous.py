"""Where the two ends of a process group meet: a small store at the listening side, on its own address.

One server per listening transport, on a free port; a client of its own per channel, because a client
that waits for its peer holds up every other user of it. Nothing here touches the global state of
torch.distributed.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed

Store = Any
"A torch store; neither it nor the process groups are in torch's public types."
_c10d: Any = torch.distributed


class Rendezvous:
    """A key-value server that ends with this object."""

    def __init__(self, *, host: str, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family, backlog=128)
        self.port = int(listening.getsockname()[1])
        # Handing over a bound socket is the only way to keep the server off every other address.
        self._server: Store | None = _c10d.TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listening.detach(),
        )

    def forget(self, channel: str) -> None:
        """Drop what a channel left in the store."""
        server = self._server
        if server is not None:
            with suppress(RuntimeError):
                for key in server.list_keys():
                    if channel in key:
                        server.delete_key(key)

    def close(self) -> None:
        """Free the port; connected clients see their connection closed."""
        self._server = None


def meet(*, host: str, port: int, channel: str, timeout_s: float) -> Store:
    """A client of the server at `host`:`port` that sees the keys of one channel only.

    Raises RuntimeError (torch's DistError) when nobody answers within `timeout_s`.
    """
    client = _c10d.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    return _c10d.PrefixStore(channel, client)
