"""The drafter protocol. A drafter may be wrong at any time; it can never change a token (design 3.1).

Its state per sample, if any, lives in slots that mirror the target's: the engine tells it of every change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int
from torch import Tensor

from rlhfspec.core.decode_records import Budget
from rlhfspec.engine.cache.kv_pool import KVPool
from rlhfspec.engine.decoding.draft_tree import DraftTree
from rlhfspec.engine.decoding.noise import Noise
from rlhfspec.engine.decoding.running_batch import RunningBatch
from rlhfspec.engine.decoding.verify import Verdict
from rlhfspec.engine.drafters.refinement import Refinement


@runtime_checkable
class Drafter(Protocol):
    """Proposes a draft tree for every running sample."""

    def admit(self, slots: range, batch: RunningBatch) -> None:
        """New samples stand in these slots; their prompts are committed, nothing of theirs is cached."""
        ...

    def draft(
        self,
        batch: RunningBatch,
        budget: Budget,
        noise: Noise,
        refinement: Refinement | None = None,
    ) -> DraftTree | None:
        """Propose at most `budget.num_nodes` nodes per sample; None when there is nothing to propose.

        Args:
            batch: committed tokens of the running samples; the drafter catches up with them first.
            budget: how deep, how wide, how many.
            noise: the target's noise for the positions of depth 1, 2, ...: drafting with the same noise
                guesses the sampled token and not merely a likely one.
            refinement: to be asked for scores, depth and choice of nodes; a drafter without scores ignores it.
        """
        ...

    def commit(self, batch: RunningBatch, tree: DraftTree, verdict: Verdict) -> Int[Tensor, "B ..."] | None:
        """The verdict's path is about to be committed: keep what the draft cache already holds of it.

        Return what `note_kept` is to be told, on the device, such as how many of its nodes that is; None: nothing.
        """
        ...

    def note_kept(self, batch: RunningBatch, num_kept: Int[np.ndarray, "B ..."]) -> None:
        """What `commit` returned has reached the host, before the batch takes the path's tokens."""
        ...

    def note_emitted(
        self, batch: RunningBatch, token_ids: Int[np.ndarray, "B D"], num_accepted: Int[np.ndarray, " B"]
    ) -> None:
        """What follows the batch's tokens: num_accepted + 1 of each row, before the batch takes them.

        After every step that `draft` was asked in, though none of its nodes were verified, and after `note_kept`.
        """
        ...

    def move_slot(self, source: int, target: int) -> None:
        """The sample of slot `source` now stands in slot `target`."""
        ...

    def leave(self, slot: int, batch: RunningBatch) -> None:
        """The sample in this slot is about to leave it, finished or not; it still stands in `batch`."""
        ...

    def drop(self) -> None:
        """Forget all cached state: the draft model's weights have changed."""
        ...

    @property
    def cache(self) -> KVPool | None:
        """The drafter's keys and values, slot by slot beside the target's; None when it keeps none."""
        ...

    def num_cached_tokens(self, slot: int) -> int:
        """Committed tokens of a slot that the cache holds; they can be taken to another instance."""
        ...

    def adopt(self, slot: int, num_tokens: int) -> None:
        """The cache has been given the first `num_tokens` tokens of the sample in this slot."""
        ...


@runtime_checkable
class TrainedDrafter(Protocol):
    """A drafter with weights that follow the target."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over weights of another version, and forget what depends on the old ones. Raises WeightsError."""
        ...

    def checksum(self) -> str:
        """Of the weights, as manifests have it."""
        ...
