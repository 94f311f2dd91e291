"""A drafter that computes, and one that looks up: each sample verifies, step by step, what promises it more.

What is found is learned from whether it is verified or not: the step's own tokens say how far it was right. Where it
is enough for all samples nothing is computed. No sample has branches of both: a node must earn its verification, and
where a look-up is likely the other branch seldom is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlhfspec.core.decode_records import Budget
from rlhfspec.engine.cache.kv_pool import KVPool
from rlhfspec.engine.decoding.draft_tree import DEAD, DraftTree, chain
from rlhfspec.engine.decoding.noise import Noise
from rlhfspec.engine.decoding.running_batch import RunningBatch
from rlhfspec.engine.decoding.verify import Verdict
from rlhfspec.engine.drafters.drafter import Drafter, TrainedDrafter
from rlhfspec.engine.drafters.lookup_drafter import LookedUp, LookupDrafter
from rlhfspec.engine.drafters.refinement import Refinement
from rlhfspec.engine.upload import upload

FOLLOW = 1.0 / 32.0
"How fast the mean of what the computing drafter gets accepted follows."
FIRST_MEAN = 1.0
"Tokens that a computed draft is thought to get accepted before any was."
Part = TypeVar("Part")


class PairedDrafter:
    """Both, slot by slot beside the target's. The cache is the computing drafter's."""

    def __init__(self, computed: Drafter, looked_up: LookupDrafter) -> None:
        self.computed = computed
        self.looked_up = looked_up
        self._found: LookedUp | None = None
        self._used: Bool[np.ndarray, " B"] | None = None
        "samples whose look-ups are being verified"
        self._is_computed = False
        "the computing drafter has drafted in this step"
        self._is_verified = False
        "nodes are, in this step"
        self._mean_accepted = FIRST_MEAN

    def admit(self, slots: range, batch: RunningBatch) -> None:
        """See `Drafter`."""
        self.computed.admit(slots, batch)
        self.looked_up.admit(slots, batch)

    def draft(
        self,
        batch: RunningBatch,
        budget: Budget,
        noise: Noise,
        refinement: Refinement | None = None,
    ) -> DraftTree | None:
        """See `Drafter`; a policy that refines decides, where it has left room for look-ups."""
        self._found = self._used = None
        self._is_computed, self._is_verified = True, False
        if refinement is None:
            return self._draft_by_budget(batch, budget, noise)
        if not budget.look_up:
            return self.computed.draft(batch, budget, noise, refinement)
        started = refinement.clock()
        found = self._found = self.looked_up.find(batch, min(budget.num_nodes, budget.look_up))
        path = np.zeros((len(batch), 0), dtype=np.float32) if found is None else found.path
        tree = None
        self._is_computed = not refinement.looked_up(path, refinement.clock() - started)
        if self._is_computed:
            tree = self.computed.draft(batch, budget, noise, refinement)
        if refinement.num_nodes is None:
            refinement.select()
        used, num_nodes = refinement.used, refinement.num_nodes
        assert used is not None and num_nodes is not None, "the policy has been asked"
        if found is None or not used.any():
            return tree
        self._used = used
        return either(tree, found.tokens, used, num_nodes, batch.device)

    def _draft_by_budget(self, batch: RunningBatch, budget: Budget, noise: Noise) -> DraftTree | None:
        """Nobody weighs costs: a look-up is verified where it promises more than computed drafts got of late."""
        found = self._found = self.looked_up.find(batch, min(budget.num_nodes, budget.depth))
        if found is None:
            return self.computed.draft(batch, budget, noise)
        used = found.path.sum(axis=1) > self._mean_accepted
        self._is_computed = not used.all()
        tree = self.computed.draft(batch, budget, noise) if self._is_computed else None
        if not used.any():
            return tree
        self._used = used
        num_computed = np.full(len(batch), 0 if tree is None else tree.num_nodes)
        if tree is not None and tree.num_kept is not None:
            num_computed = tree.num_kept
        num_kept = np.where(used, found.num_found, num_computed)
        return either(tree, found.tokens, used, num_kept, batch.device)

    def commit(self, batch: RunningBatch, tree: DraftTree, verdict: Verdict) -> Int[Tensor, " B"] | None:
        """Let the computing drafter keep what was its own."""
        self._is_verified = True
        kept = self.computed.commit(batch, tree, verdict) if self._is_computed else None
        if kept is None or self._used is None:
            return kept
        (own,) = upload([~self._used], batch.device)
        return kept * own

    def note_kept(self, batch: RunningBatch, num_kept: Int[np.ndarray, " B"]) -> None:
        """Of the computing drafter."""
        self.computed.note_kept(batch, num_kept)

    def note_emitted(
        self, batch: RunningBatch, token_ids: Int[np.ndarray, "B D"], num_accepted: Int[np.ndarray, " B"]
    ) -> None:
        """See how far look-ups were right, and how many computed tokens are."""
        if self._is_computed and self._is_verified:
            own = num_accepted if self._used is None else num_accepted[~self._used]
            if len(own):
                self._mean_accepted += FOLLOW * (float(own.mean()) - self._mean_accepted)
        if self._found is not None:
            self.looked_up.learn(self._found, token_ids, num_accepted)
        self._found = self._used = None

    def move_slot(self, source: int, target: int) -> None:
        """See `Drafter`."""
        self.computed.move_slot(source, target)
        self.looked_up.move_slot(source, target)

    def leave(self, slot: int, batch: RunningBatch) -> None:
        """See `Drafter`."""
        self.computed.leave(slot, batch)
        self.looked_up.leave(slot, batch)

    def drop(self) -> None:
        """See `Drafter`."""
        self.computed.drop()
        self.looked_up.drop()

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


class TrainedPair(PairedDrafter):
    """A pair whose computing drafter follows the target. It is a `TrainedDrafter`."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `TrainedDrafter`."""
        cast(TrainedDrafter, self.computed).load(tensors)

    def checksum(self) -> str:
        """See `TrainedDrafter`."""
        return cast(TrainedDrafter, self.computed).checksum()


def paired(computed: Drafter, looked_up: LookupDrafter) -> PairedDrafter:
    """Return the pair of the two."""
    kind = TrainedPair if isinstance(computed, TrainedDrafter) else PairedDrafter
    return kind(computed, looked_up)


def part_of(drafter: Drafter | None, kind: type[Part]) -> Part | None:
    """Return the drafter, or that of a pair, which is of this kind; None where there is none."""
    parts = (drafter.computed, drafter.looked_up) if isinstance(drafter, PairedDrafter) else (drafter,)
    return next((part for part in parts if isinstance(part, kind)), None)


def either(
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
