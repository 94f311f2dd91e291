"""What drafters without a cache of their own have in common: nothing to move, keep or drop."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from rlhfspec.engine.decoding.draft_tree import DEAD, DraftTree, chain
from rlhfspec.engine.decoding.running_batch import RunningBatch
from rlhfspec.engine.decoding.verify import Verdict
from rlhfspec.engine.upload import upload


class CachelessDrafter:
    """All of `Drafter` but `draft`."""

    def admit(self, slots: range, batch: RunningBatch) -> None:
        """Nothing to prepare: the past is in the batch, or in the target's cache."""

    def commit(self, batch: RunningBatch, tree: DraftTree, verdict: Verdict) -> Int[Tensor, " B"] | None:
        """Nothing is cached."""

    def note_kept(self, batch: RunningBatch, num_kept: np.ndarray) -> None:
        """Nothing is cached."""

    def note_emitted(self, batch: RunningBatch, token_ids: np.ndarray, num_accepted: np.ndarray) -> None:
        """Nothing is learned from it."""

    def move_slot(self, source: int, target: int) -> None:
        """Nothing is cached."""

    def leave(self, slot: int, batch: RunningBatch) -> None:
        """Nothing is kept of it."""

    def drop(self) -> None:
        """Nothing is cached."""

    @property
    def cache(self) -> None:
        """Nothing is cached: another instance finds the past in the tokens."""
        return None

    def num_cached_tokens(self, slot: int) -> int:
        """Nothing is cached."""
        return 0

    def adopt(self, slot: int, num_tokens: int) -> None:
        """Nothing to take over."""


def chains(tokens: np.ndarray, device: torch.device) -> DraftTree | None:
    """Return a chain for each row of token ids [B, N], cut to the longest; DEAD where a row is shorter.

    None where all are empty.
    """
    longest = int((tokens != DEAD).sum(1).max(initial=0))
    if longest == 0:
        return None
    (ids,) = upload([tokens[:, :longest]], device)
    return chain(ids, (ids != DEAD).float())
