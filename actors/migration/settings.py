"""How an instance moves samples."""

from __future__ import annotations

from dataclasses import dataclass

from actors.transport.select import TransportName


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationSettings:
    """Limits and sizes of one instance's moves."""

    transport: TransportName = "auto"
    timeout_s: float = 5.0
    "for each stage of a move, and for each frame"
    frame_bytes: int = 1 << 19
    "caches are shipped in frames of about this size"
    max_bytes_per_s: float = float("inf")
    "of each transfer; a network that others need too"
    transfer_share: float = 0.15
    "most of its time that a transfer thread may compute while samples decode here"
