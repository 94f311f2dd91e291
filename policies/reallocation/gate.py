"""The gate: ship a sample's caches or compute them anew, whichever has it decoding at its destination sooner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...profiles.transfer import PrefillModel, TransferModel
from .pool_records import MoveMode

GateMode = Literal["auto", "always_migrate", "always_recompute"]

BYSTANDER_SHARE = 0.05
"Of the seconds that bytes are on the line, what both instances lose to it."
HANDLING_S = 0.004
"Decode-thread seconds that both instances together spend on one migration (measured: 2 to 4 ms)."


@dataclass(frozen=True, slots=True, kw_only=True)
class WayCosts:
    """What moves are predicted to cost by either way; arrays are [...] over samples."""

    migrate_s: np.ndarray
    "from the order to the first decode step at the destination; inf where the way is closed"
    recompute_s: np.ndarray
    line_s: np.ndarray
    "of migrate_s, what grows with the bytes: the rest is waiting, which costs nobody"

    @property
    def migrate_lost_s(self) -> np.ndarray:
        """Decoding time that both instances lose to the transfer."""
        return HANDLING_S + BYSTANDER_SHARE * self.line_s

    @property
    def recompute_lost_s(self) -> np.ndarray:
        """Decoding time that the destination loses: its decode steps wait for the prefill."""
        return self.recompute_s


class Gate:
    """Predicts both ways from learnt models."""

    def __init__(
        self,
        *,
        kv_bytes_per_token: float,
        transfer: TransferModel | None = None,
        prefill: PrefillModel | None = None,
        mode: GateMode = "auto",
    ) -> None:
        """Make the gate.

        Args:
            kv_bytes_per_token: of target and draft cache together.
            transfer: start values; guesses by default.
            prefill: the same.
            mode: `always_migrate` and `always_recompute` are baselines.
        """
        self.kv_bytes_per_token = kv_bytes_per_token
        self.transfer = transfer or TransferModel()
        self.prefill = prefill or PrefillModel()
        self._mode = mode

    def costs(self, context_tokens: np.ndarray | int, *, cold: np.ndarray | bool = False) -> WayCosts:
        """Predict both ways; recomputed caches are there after their prefill."""
        num_bytes = np.asarray(context_tokens) * self.kv_bytes_per_token
        migrate, recompute = self.transfer.seconds(num_bytes, cold=cold), self.prefill.seconds(context_tokens)
        closed = np.full(migrate.shape, np.inf)
        return WayCosts(
            migrate_s=closed if self._mode == "always_recompute" else migrate,
            recompute_s=closed if self._mode == "always_migrate" else recompute,
            line_s=self.transfer.seconds(num_bytes) - self.transfer.seconds(0),
        )

    def choose(self, context_tokens: int, *, cold: bool = False) -> MoveMode:
        """The way that is predicted to have the sample decoding at its destination sooner."""
        costs = self.costs(context_tokens, cold=cold)
        return MoveMode.RECOMPUTE if costs.recompute_s < costs.migrate_s else MoveMode.MIGRATE

    def note_transfer(self, *, num_bytes: int, seconds: float, cold: bool) -> None:
        """A migration's caches took so long."""
        self.transfer.observe(num_bytes, seconds, cold=cold)

    def note_prefill(self, *, num_tokens: int, seconds: float) -> None:
        """A prefill took so long."""
        self.prefill.observe(num_tokens, seconds)
