"""The gate: ship a sample's caches or compute them anew, whichever has it decoding at its destination sooner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from policies.reallocation.records import MoveMode
from profiles.transfer import PrefillModel, TransferModel

GateMode = Literal["auto", "always_migrate", "always_recompute"]

BYSTANDER_SHARE = 0.05
"Of a transfer's seconds, what both instances lose to it."


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCost:
    """What moves are predicted to cost; arrays are [n] over samples."""

    recompute: np.ndarray
    "bool: by computing anew"
    ready_s: np.ndarray
    "from the order to the first decode step at the destination"
    lost_s: np.ndarray
    "decoding time that the pair of instances loses: a prefill holds the destination up and the sample stands still"

    def mode(self, index: int) -> MoveMode:
        """How the sample should be moved."""
        return MoveMode.RECOMPUTE if self.recompute[index] else MoveMode.MIGRATE


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

    def migrate_s(self, context_tokens: np.ndarray | int, *, cold: np.ndarray | bool) -> np.ndarray:
        """Seconds until migrated caches are there."""
        return self.transfer.seconds(np.asarray(context_tokens) * self.kv_bytes_per_token, cold=cold)

    def recompute_s(
        self, context_tokens: np.ndarray | int, *, wait_s: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """Seconds until recomputed caches are there; `wait_s` until the destination's decode step is over."""
        return self.prefill.seconds(context_tokens) + wait_s

    def costs(
        self,
        context_tokens: np.ndarray,
        *,
        cold: np.ndarray | bool = False,
        wait_s: np.ndarray | float = 0.0,
    ) -> MoveCost:
        """Choose for each sample. `wait_s`: expected rest of the destination's decode step."""
        migrate = np.asarray(self.migrate_s(context_tokens, cold=cold), dtype=float)
        recompute = np.asarray(self.recompute_s(context_tokens, wait_s=wait_s), dtype=float)
        if self._mode == "auto":
            chosen = recompute < migrate
        else:
            chosen = np.full(migrate.shape, self._mode == "always_recompute")
        return MoveCost(
            recompute=chosen,
            ready_s=np.where(chosen, recompute, migrate),
            lost_s=np.where(chosen, recompute, BYSTANDER_SHARE * migrate + wait_s),
        )

    def note_transfer(self, *, num_bytes: int, seconds: float, cold: bool) -> None:
        """A migration's caches took so long."""
        self.transfer.observe(num_bytes, seconds, cold=cold)

    def note_prefill(self, *, num_tokens: int, seconds: float) -> None:
        """A prefill took so long."""
        self.prefill.observe(num_tokens, seconds)
