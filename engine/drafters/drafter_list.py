"""Look-ups beside a drafter that computes: each sample verifies, step by step, the proposal that promises it more.

What is found is learned from whether it is verified or not: the step's own tokens say how far it was right. Where it
is enough for all samples nothing is computed. No sample has branches of both: a node must earn its verification, and
where a look-up is likely the other branch seldom is.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...core.decode_records import Budget
from ..cache.kv_pool import KVPool
from ..decoding.draft_tree import DEAD, DraftTree, chain, keep
from ..decoding.noise import Noise
from ..decoding.running_batch import RunningBatch
from ..decoding.verify import Verdict
from ..upload import upload
from .drafter import Drafter
from .level_drafter import LevelDrafter
from .look_up_drafter import LookUpDrafter
from .refinement import Refinement

FOLLOW = 1.0 / 32.0
"How fast the mean of what the computing drafter gets accepted follows."
FIRST_MEAN = 1.0
"Tokens that a computed draft is thought to get accepted before any was."
Chosen = tuple[DraftTree | None, Int[np.ndarray, " B"], Int[np.ndarray, " B"]]
"What was computed, and how many nodes of each sample are verified: of those looked up, of those computed."


class DrafterList(Drafter):
    """Both, slot by slot beside the target's; the cheaper one is asked first. The cache is the computing drafter's."""

    def __init__(self, looked_up: LookUpDrafter, computed: LevelDrafter) -> None:
        self.looked_up = looked_up
        self.computed = computed
        self._used: Bool[np.ndarray, " B"] | None = None
        "samples whose look-ups are being verified"
        self._is_computed = False
        "the computing drafter has drafted in this step"
        self._is_verified = False
        "nodes are, in this step"
        self._mean_accepted = FIRST_MEAN

    def working(self) -> Drafter:
        """See `Drafter`: the one that computes where nothing can be looked up."""
        return self if self.looked_up.may_find else self.computed

    @property
    def num_brought(self) -> int:
        """See `Drafter`."""
        return self.looked_up.num_brought

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """In the order that they are asked in."""
        return self.looked_up, self.computed

    def draft(
        self, batch: RunningBatch, budget: Budget, noise: Noise, refinement: Refinement | None = None
    ) -> DraftTree | None:
        """See `Drafter`; a law decides, where there is one and it has left room for look-ups."""
        self._used, self._is_computed, self._is_verified = None, True, False
        if refinement is not None and not budget.look_up:
            return self.computed.draft(batch, budget, noise, refinement)
        tokens = self.looked_up.propose(batch, budget, noise, refinement)
        if refinement is None:
            tree, looked_up, computed = self._by_promise(batch, budget, noise)
        else:
            tree, looked_up, computed = self._by_law(batch, budget, noise, refinement)
        used = looked_up > 0
        if tokens is None or not used.any():
            return tree
        self._used = used
        return merge_proposals(tree, tokens, used, looked_up + computed, batch.device)

    def _by_promise(self, batch: RunningBatch, budget: Budget, noise: Noise) -> Chosen:
        """Nobody weighs costs: a look-up is verified where it promises more than computed drafts got of late."""
        found, num_found = self.looked_up.found, np.zeros(len(batch), dtype=np.int64)
        if found is not None:
            num_found = np.where(found.path.sum(axis=1) > self._mean_accepted, found.num_found, 0)
        self._is_computed = budget.num_nodes > 0 and not num_found.all()
        tree = self.computed.draft(batch, budget, noise) if self._is_computed else None
        return tree, num_found, np.where(num_found, 0, 0 if tree is None else tree.num_nodes)

    def _by_law(self, batch: RunningBatch, budget: Budget, noise: Noise, refinement: Refinement) -> Chosen:
        self._is_computed = not refinement.is_enough()
        tree = self.computed.propose(batch, budget, noise, refinement) if self._is_computed else None
        looked_up, *computed = refinement.choose()
        if not computed:
            return tree, looked_up, np.zeros_like(looked_up)
        assert tree is not None, "its scores were shown"
        return keep(tree, computed[0]), looked_up, computed[0]

    def commit(self, batch: RunningBatch, tree: DraftTree, verdict: Verdict) -> Int[Tensor, " B"] | None:
        """Let the computing drafter keep what was its own."""
        self._is_verified = True
        kept = self.computed.commit(batch, tree, verdict) if self._is_computed else None
        if kept is None or self._used is None:
            return kept
        (own,) = upload([~self._used], batch.device)
        return kept * own

    def learn(
        self,
        batch: RunningBatch,
        token_ids: np.ndarray,
        num_accepted: np.ndarray,
        num_kept: np.ndarray | None,
    ) -> None:
        """See how far look-ups were right, and how many computed tokens are."""
        if self._is_computed and self._is_verified:
            own = num_accepted if self._used is None else num_accepted[~self._used]
            if len(own):
                self._mean_accepted += FOLLOW * (float(own.mean()) - self._mean_accepted)
        for part in self.parts:
            part.learn(batch, token_ids, num_accepted, num_kept)
        self._used = None

    def admit(self, slots: range, batch: RunningBatch) -> None:
        """See `Drafter`."""
        for part in self.parts:
            part.admit(slots, batch)

    def move_slot(self, source: int, target: int) -> None:
        """See `Drafter`."""
        for part in self.parts:
            part.move_slot(source, target)

    def leave(self, slot: int, batch: RunningBatch) -> None:
        """See `Drafter`."""
        for part in self.parts:
            part.leave(slot, batch)

    def drop(self) -> None:
        """See `Drafter`."""
        for part in self.parts:
            part.drop()

    @property
    def cache(self) -> KVPool | None:
        """The computing drafter's."""
        return self.computed.cache

    def num_cached_tokens(self, slot: int) -> int:
        """Of the computing drafter."""
        return self.computed.num_cached_tokens(slot)

    def adopt(self, slot: int, num_tokens: int) -> None:
        """Of the computing drafter; look-ups need the tokens alone."""
        self.computed.adopt(slot, num_tokens)


def merge_proposals(
    computed: DraftTree | None,
    looked_up: Int[np.ndarray, "B L"],
    used: Bool[np.ndarray, " B"],
    num_kept: Int[np.ndarray, " B"],
    device: torch.device,
) -> DraftTree | None:
    """Return the tree that has the looked-up tokens as a chain in the samples where they are used.

    Args:
        computed: the other samples' nodes, of the used ones any; None: there are none.
        looked_up: token ids, DEAD where there are none.
        used: which samples have their look-ups verified.
        num_kept: nodes of each sample that are verified, those looked up included.
        device: of the tree.

    Returns:
        None where no node is left.
    """
    widest = int(num_kept.max())
    if not widest:
        return None
    chains = np.full((len(used), widest), DEAD, dtype=np.int64)
    columns = min(widest, looked_up.shape[1])
    chains[:, :columns] = looked_up[:, :columns]
    chains[np.arange(widest) >= num_kept[:, None]] = DEAD
    ids, rows = upload([chains, used], device)
    rows = rows[:, None]
    ragged = None if int(num_kept.min()) == widest else num_kept
    if computed is None or not computed.num_nodes:
        tree = chain(ids.masked_fill(~rows, DEAD), num_in_cache=0)
        return replace(tree, num_kept=ragged, looked_up=used)
    ids = torch.where(rows, ids, _widened(computed.token_ids, widest, DEAD))
    if computed.is_chain:
        tree = chain(ids, num_in_cache=min(computed.num_in_cache, widest))
        return replace(tree, num_kept=ragged, looked_up=used)
    line = chain(ids, num_in_cache=0)
    return replace(
        computed,
        token_ids=ids,
        parents=torch.where(rows, line.parents, _widened(computed.parents, widest, 0)),
        depth=torch.where(rows, line.depth, _widened(computed.depth, widest, 1)),
        rank=torch.where(rows, line.rank, _widened(computed.rank, widest, 1)),
        scores=torch.where(rows, line.scores, _widened(computed.scores, widest, 0)),
        draft_slots=torch.where(rows, line.draft_slots, _widened(computed.draft_slots, widest, -1)),
        num_kept=ragged,
        looked_up=used,
    )


def _widened(nodes: Tensor, width: int, value: int) -> Tensor:
    """[B, N] as [B, width], the rest of a value; narrower where nobody keeps the last ones."""
    return torch.nn.functional.pad(nodes, (0, width - nodes.shape[1]), value=value)
