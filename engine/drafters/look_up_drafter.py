"""Drafts what is looked up: the response that other weights gave under the sample's own key (`SampleRequest.draft`).

A token is a function of weights, prompt and key, and neighbouring versions under one noise agree almost always: at
least with (1 - TV) / (1 + TV) a token (Daliri et al., arXiv 2408.07978). Behind the first difference such a draft is of
no use, and nothing of it is proposed any more. A chain for each sample, scored by how such look-ups were accepted so
far: with a law that refines drafts only what is worth its verification is verified.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from ...core.decode_records import Budget
from ..decoding.draft_tree import DEAD, DraftTree, keep
from ..decoding.noise import Noise
from ..decoding.running_batch import RunningBatch
from .drafter import Drafter, chains
from .match_acceptance import OF_ITS_OWN_KEY, MatchAcceptance
from .refinement import Refinement


class Found(NamedTuple):
    """What may follow one sample's tokens: lists of one length."""

    token_ids: list[int]
    match_lengths: list[int]
    "tokens before it that match where it was found; OF_ITS_OWN_KEY: what the request brings"
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


class LookUpDrafter(Drafter):
    """Proposes what a request brings, as far as the response agrees with it."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size`: ids outside it are no tokens, whatever a request says."""
        self.found: LookedUp | None = None
        "in this step"
        self._acceptance = MatchAcceptance()
        self._vocab_size = vocab_size
        self._brought: dict[int, tuple[np.ndarray, int]] = {}
        "by slot: what its request brings, and how much of it the response is known to agree with"

    def admit(self, slots: range, batch: RunningBatch) -> None:
        """Take up what their requests bring, to the first id that is no token."""
        for slot in slots:
            if (draft := batch.requests[slot].draft) is not None:
                is_token = (draft >= 0) & (draft < self._vocab_size)
                self._brought[slot] = (draft[: int(is_token.cumprod().sum())], 0)

    def move_slot(self, source: int, target: int) -> None:
        """Follow a sample to its new slot."""
        if source in self._brought:
            self._brought[target] = self._brought.pop(source)

    def leave(self, slot: int, batch: RunningBatch) -> None:
        """Forget what its request brought."""
        self._brought.pop(slot, None)

    @property
    def num_brought(self) -> int:
        """See `Drafter`."""
        return len(self._brought)

    @property
    def may_find(self) -> bool:
        """Whether there is anything to look up in."""
        return bool(self._brought)

    def draft(
        self, batch: RunningBatch, budget: Budget, noise: Noise, refinement: Refinement | None = None
    ) -> DraftTree | None:
        """See `Drafter`; where no law chooses, all that was found within the budget is verified."""
        tokens = self.propose(batch, budget, noise, refinement)
        if tokens is None:
            return None
        tree = chains(tokens, batch)
        if refinement is not None:
            return keep(tree, refinement.choose()[0])
        count = (tokens != DEAD).sum(axis=1)
        # a CPU computes fewer rows then; another device would have to be told of them
        is_ragged = batch.device.type == "cpu" and count.min() < tree.num_nodes
        return replace(tree, num_kept=count) if is_ragged else tree

    def propose(
        self, batch: RunningBatch, budget: Budget, noise: Noise, refinement: Refinement | None = None
    ) -> Int[np.ndarray, "B n"] | None:
        """Return one chain per sample; None when nothing is found for any."""
        started = 0.0 if refinement is None else refinement.clock()
        found = self.found = self._find(batch, budget.look_up or min(budget.num_nodes, budget.depth))
        if refinement is not None:
            path = np.zeros((len(batch), 0), dtype=np.float32) if found is None else found.path
            refinement.offer(path, refinement.clock() - started)
        return None if found is None else found.tokens

    def learn(
        self,
        batch: RunningBatch,
        token_ids: np.ndarray,
        num_accepted: np.ndarray,
        num_kept: np.ndarray | None,
    ) -> None:
        """Learn how far what was found is what was emitted: num_accepted + 1 tokens are known."""
        found, self.found = self.found, None
        if found is None:
            return
        count = min(found.tokens.shape[1], token_ids.shape[1])
        level = np.arange(count)
        judged = level < np.minimum(found.num_found, num_accepted + 1)[:, None]
        # a token is judged where those before it are right
        right = ((found.tokens[:, :count] == token_ids[:, :count]) & judged).cumprod(axis=1).astype(bool)
        judged[:, 1:] &= right[:, :-1]
        self._acceptance.observe(found.classes[:, :count][judged], right[judged])

    def _find(self, batch: RunningBatch, count: int) -> LookedUp | None:
        """Look up at most `count` tokens for each running sample; None where nothing is found for any."""
        found = [self._look_up(slot, batch, count) for slot in range(len(batch))]
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

    def _look_up(self, slot: int, batch: RunningBatch, count: int) -> Found:
        """Return at most `count` tokens that may follow the sample in a slot."""
        draft, agreed = self._brought.get(slot, (None, 0))
        if draft is None:
            return Found([], [], [])
        begin, length = int(batch.prompt_lengths[slot]), int(batch.lengths[slot])
        written = length - begin
        if not np.array_equal(draft[agreed:written], batch.tokens[slot, begin + agreed : length]):
            del self._brought[slot]
            return Found([], [], [])
        self._brought[slot] = draft, written
        following = draft[written : written + count].tolist()
        return Found(following, [OF_ITS_OWN_KEY] * len(following), [1.0] * len(following))
