"""Drafters that look tokens up: a chain for each sample, scored by how such look-ups were accepted so far.

A subclass says what follows. With a policy that refines drafts only what is worth its verification is verified.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from rlhfspec.core.decode_records import Budget
from rlhfspec.engine.decoding.draft_tree import DEAD, DraftTree, chain, keep
from rlhfspec.engine.decoding.noise import Noise
from rlhfspec.engine.decoding.running_batch import RunningBatch
from rlhfspec.engine.drafters.cacheless import CachelessDrafter, chains
from rlhfspec.engine.drafters.match_acceptance import MatchAcceptance
from rlhfspec.engine.drafters.refinement import Refinement
from rlhfspec.engine.upload import upload


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
        self._found: LookedUp | None = None
        "in this step"

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
        found = self._found = self.find(batch, min(budget.num_nodes, budget.depth))
        if found is None:
            return None
        if refinement is None:
            return chains(found.tokens, batch.device)
        refinement.whole_chain(found.path)
        num_kept = refinement.select()
        if not num_kept.any():
            return None
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
        self, found: LookedUp, token_ids: Int[np.ndarray, "B D"], num_accepted: Int[np.ndarray, " B"]
    ) -> None:
        """Learn how far what was found is what was emitted, verified or not: num_accepted + 1 tokens are known."""
        count = min(found.tokens.shape[1], token_ids.shape[1])
        level = np.arange(count)
        judged = level < np.minimum(found.num_found, num_accepted + 1)[:, None]
        # a token is judged where those before it are right
        right = ((found.tokens[:, :count] == token_ids[:, :count]) & judged).cumprod(axis=1).astype(bool)
        judged[:, 1:] &= right[:, :-1]
        self._acceptance.observe(found.classes[:, :count][judged], right[judged])

    def note_emitted(
        self, batch: RunningBatch, token_ids: Int[np.ndarray, "B D"], num_accepted: Int[np.ndarray, " B"]
    ) -> None:
        """Learn from it."""
        if self._found is not None:
            self.learn(self._found, token_ids, num_accepted)
        self._found = None
