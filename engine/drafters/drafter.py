"""The contract of drafters. A drafter may be wrong at any time; it can never change a token (design 3.1).

    propose   candidates for every running sample, of which the budget, or the law, lets some be verified
    commit    the verdict's path is about to be committed: what the draft cache holds of it stays there
    learn     what was emitted, on the host

Its state per sample, if any, lives in slots that mirror the target's: the engine tells it of every change.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from jaxtyping import Int
from torch import Tensor

from ...core.decode_records import Budget
from ..cache.kv_pool import KVPool
from ..decoding.draft_tree import DraftTree, chain, keep, select_best
from ..decoding.noise import Noise
from ..decoding.running_batch import RunningBatch
from ..decoding.verify import Verdict
from ..upload import upload
from .refinement import Refinement

Part = TypeVar("Part")


class Drafter:
    """Proposes tokens for every running sample. One that keeps nothing of samples has `propose` alone."""

    def propose(
        self, batch: RunningBatch, budget: Budget, noise: Noise, refinement: Refinement | None = None
    ) -> DraftTree | Int[np.ndarray, "B n"] | None:
        """Return candidates: a tree, or a chain for each sample on the host, DEAD behind its end; None: there are none.

        Args:
            batch: committed tokens of the running samples; the drafter catches up with them first.
            budget: how deep, how wide, how many.
            noise: the target's noise for the positions of depth 1, 2, ...: drafting with the same noise
                guesses the sampled token and not merely a likely one.
            refinement: is shown the scores, and asked for more levels; a drafter without scores ignores it.
        """
        raise NotImplementedError

    def draft(
        self, batch: RunningBatch, budget: Budget, noise: Noise, refinement: Refinement | None = None
    ) -> DraftTree | None:
        """Propose, and keep what is to be verified: `budget.num_nodes` a sample at most, or what the law chooses."""
        candidates = self.propose(batch, budget, noise, refinement)
        if candidates is None:
            return None
        tree = candidates if isinstance(candidates, DraftTree) else chains(candidates, batch)
        if not tree.num_nodes:
            return tree
        if refinement is None or not refinement.has_scores:
            return select_best(tree, budget.num_nodes)
        return keep(tree, refinement.choose()[0])

    def commit(self, batch: RunningBatch, tree: DraftTree, verdict: Verdict) -> Int[Tensor, "B ..."] | None:
        """Keep what the draft cache holds of the path; return, on the device, how much that is; None: nothing."""
        return None

    def learn(
        self,
        batch: RunningBatch,
        token_ids: Int[np.ndarray, "B D"],
        num_accepted: Int[np.ndarray, " B"],
        num_kept: Int[np.ndarray, "B ..."] | None,
    ) -> None:
        """Take what follows the batch's tokens, num_accepted + 1 of each row, and what `commit` returned.

        After every step that `draft` was asked in, though none of its nodes were verified, before the batch takes them.
        """
        return

    def admit(self, slots: range, batch: RunningBatch) -> None:
        """New samples stand in these slots; their prompts are committed, nothing of theirs is cached."""
        return

    def move_slot(self, source: int, target: int) -> None:
        """The sample of slot `source` now stands in slot `target`."""
        return

    def leave(self, slot: int, batch: RunningBatch) -> None:
        """The sample in this slot is about to leave it, finished or not; it still stands in `batch`."""
        return

    def drop(self) -> None:
        """Forget all cached state: the draft model's weights have changed."""
        return

    @property
    def cache(self) -> KVPool | None:
        """The drafter's keys and values, slot by slot beside the target's; None when it keeps none."""
        return None

    def num_cached_tokens(self, slot: int) -> int:
        """Committed tokens of a slot that the cache holds; they can be taken to another instance."""
        return 0

    def adopt(self, slot: int, num_tokens: int) -> None:
        """The cache has been given the first `num_tokens` tokens of the sample in this slot."""
        return

    @property
    def num_brought(self) -> int:
        """Running samples whose requests brought a draft that they agree with so far."""
        return 0

    def working(self) -> Drafter:
        """Itself, or of a list the one drafter that can have anything to propose in this step."""
        return self

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters that this one is a list of: itself."""
        return (self,)


def part_of(drafter: Drafter | None, kind: type[Part]) -> Part | None:
    """Return the drafter, or that of a list, which is of this kind; None where there is none."""
    parts = () if drafter is None else drafter.parts
    return next((part for part in parts if isinstance(part, kind)), None)


def chains(tokens: Int[np.ndarray, "B n"], batch: RunningBatch) -> DraftTree:
    """Return chains on the device; no cache holds them."""
    (ids,) = upload([tokens], batch.device)
    return chain(ids, num_in_cache=0)
