"""Drafters that look tokens up: a chain for each sample, scored by how such look-ups were accepted so far.

A subclass says what follows. With a policy that refines drafts only what is worth its verification is verified.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from core.decode_records import Budget
from engine.decoding.draft_tree import DEAD, DraftTree, chain, keep
from engine.decoding.noise import Noise
from engine.decoding.running_batch import RunningBatch
from engine.decoding.verify import Verdict
from engine.drafters.cacheless import CachelessDrafter, chains
from engine.drafters.match_acceptance import MatchAcceptance
from engine.drafters.refinement import Refinement
from engine.upload import upload


class Found(NamedTuple):
    """What follows one sample's tokens elsewhere: lists of one length."""

    token_ids: list[int]
    match_lengths: list[int]
    "tokens before it that match where it was found, at least 1"
    shares: list[float]
    "of the times that those tokens went on like this"


class LookedUp(NamedTuple):
    """What was found for all running samples."""

    tokens: Int[np.ndarray, "B n"]
    "DEAD where nothing was found"
    classes: Int[np.ndarray, "B n"]
    num_found: Int[np.ndarray, " B"]
    path: Float[np.ndarray, "B n"]
    "estimated acceptance of the whole way to each token, float32"


class LookupDrafter(CachelessDrafter):
    """All but the look-up itself."""

    def __init__(self) -> None:
        self._acceptance = MatchAcceptance()
        self._verified: tuple[LookedUp, Int[np.ndarray, " B"]] | None = None
        "with how many tokens of each sample"

    @abstractmethod
    def look_up(self, slot: int, batch: RunningBatch, count: int) -> Found:
        """Return at most `count` tokens that may follow the sample in a slot."""

    def draft(
        self,
        batch: RunningBatch,
        budget: Budget,
        noise: Noise,
        refinement: Refinement | None = None,
    ) -> DraftTree | None:
        """Return one chain per sample, dead nodes where nothing was found; None when there is nothing at all."""
        self._verified = None
        found = self.find(batch, min(budget.num_nodes, budget.depth))
        if found is None:
            return None
        if refinement is None:
            self._verified = found, found.num_found
            return chains(found.tokens, batch.device)
        refinement.whole_chain(found.path)
        num_kept = refinement.select()
        if not num_kept.any():
            return None
        self._verified = found, num_kept
        (ids,) = upload([found.tokens], batch.device)
        return keep(chain(ids, num_in_cache=0), num_kept)

    def find(self, batch: RunningBatch, count: int) -> LookedUp | None:
        """Look up at most `count` tokens for each running sample; None where nothing is found for any."""
        found = [self.look_up(slot, batch, count) for slot in range(len(batch))]
        num_found = np.array([len(each.token_ids) for each in found])
        longest = int(num_found.max(initial=0))
        if not longest:
            return None
        tokens = np.full((len(batch), longest), DEAD, dtype=np.int64)
        lengths = np.ones((len(batch), longest), dtype=np.int64)
        shares = np.zeros((len(batch), longest), dtype=np.float32)
        for row, (ids, matches, how_often) in enumerate(found):
            tokens[row, : len(ids)] = ids
            lengths[row, : len(ids)] = matches
            shares[row, : len(ids)] = how_often
        classes = self._acceptance.classes(lengths, shares)
        acceptance = np.where(tokens != DEAD, self._acceptance.conditional(classes), 0.0)
        path = np.multiply.accumulate(acceptance, axis=1, dtype=np.float32)
        return LookedUp(tokens, classes, num_found, path)

    def learn(
        self, found: LookedUp, num_right: Int[np.ndarray, " B"], num_judged: Int[np.ndarray, " B"]
    ) -> None:
        """Learn from what was found: so many first tokens were right; of so many it is known at all."""
        level, right = np.arange(found.classes.shape[1]), num_right[:, None]
        judged = (level <= right) & (level < num_judged[:, None])
        self._acceptance.observe(found.classes[judged], (level < right)[judged])

    def commit(self, batch: RunningBatch, tree: DraftTree, verdict: Verdict) -> Int[Tensor, " B"]:
        """Nothing is cached; `note_kept` is to be told how much was accepted."""
        return verdict.num_accepted

    def note_kept(self, batch: RunningBatch, num_kept: Int[np.ndarray, " B"]) -> None:
        """Learn from what was accepted, and from the first that was not."""
        if self._verified is not None:
            found, num_verified = self._verified
            self.learn(found, num_kept, num_verified)
        self._verified = None
