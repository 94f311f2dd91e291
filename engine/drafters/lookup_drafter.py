"""Drafters that look tokens up: a chain for each sample, scored by how such look-ups were accepted so far.

A subclass says what follows. With a policy that refines drafts only what is worth its verification is verified.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
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


class _Draft(NamedTuple):
    """What is being verified."""

    classes: Int[np.ndarray, "B n"]
    num_verified: Int[np.ndarray, " B"]


class LookupDrafter(CachelessDrafter):
    """All but the look-up itself."""

    def __init__(self) -> None:
        self._acceptance = MatchAcceptance()
        self._drafted: _Draft | None = None

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
        self._drafted = None
        found = [self.look_up(slot, batch, min(budget.num_nodes, budget.depth)) for slot in range(len(batch))]
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
        if refinement is None:
            self._drafted = _Draft(classes, num_found)
            return chains(tokens, batch.device)
        acceptance = np.where(tokens != DEAD, self._acceptance.conditional(classes), 0.0)
        refinement.whole_chain(np.multiply.accumulate(acceptance, axis=1, dtype=np.float32))
        num_kept = refinement.select()
        if not num_kept.any():
            return None
        self._drafted = _Draft(classes, num_kept)
        (ids,) = upload([tokens], batch.device)
        return keep(chain(ids, num_in_cache=0), num_kept)

    def commit(self, batch: RunningBatch, tree: DraftTree, verdict: Verdict) -> Int[Tensor, " B"]:
        """Nothing is cached; `note_kept` is to be told how much was accepted."""
        return verdict.num_accepted

    def note_kept(self, batch: RunningBatch, num_kept: Int[np.ndarray, " B"]) -> None:
        """Learn from what was accepted, and from the first that was not."""
        drafted, self._drafted = self._drafted, None
        if drafted is None:
            return
        level, accepted = np.arange(drafted.classes.shape[1]), num_kept[:, None]
        judged = (level <= accepted) & (level < drafted.num_verified[:, None])
        self._acceptance.observe(drafted.classes[judged], (level < accepted)[judged])
