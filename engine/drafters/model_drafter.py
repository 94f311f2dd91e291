"""Drafts with a small causal LM that has a cache of its own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from ..attention.visibility import count_up
from ..cache.kv_pool import KVPool
from ..decoding.draft_tree import DraftTree
from ..decoding.running_batch import LAST_TOKENS, RunningBatch
from ..decoding.verify import Verdict
from ..model.compute_backend import FusedChain
from ..model.forward_plan import TreePlan
from ..model.prefill import fill_committed
from ..model.prefill_plan import PrefillPiece
from ..model.runner import ModelRunner
from ..weights.shared_ids import foreign_of, without
from .level_drafter import LevelDrafter, level_plan

MAX_CATCH_UP_TOKENS = LAST_TOKENS
"More missing tokens than this are prefilled sample by sample instead of batched with the root."


class ModelDrafter(LevelDrafter):
    """A draft model with its own KV pool, slot for slot beside the target's."""

    def __init__(self, runner: ModelRunner, *, max_prefill_tokens: int) -> None:
        self.runner = runner
        self._max_prefill_tokens = max_prefill_tokens
        self._foreign = foreign_of(runner.model.config, runner.vocab_size)
        if self._foreign is not None:
            self._foreign = self._foreign.to(runner.device)
        self._cached = np.zeros(runner.pool.num_slots, dtype=np.int64)
        "committed tokens whose keys and values the draft cache holds"

    @property
    def pool(self) -> KVPool:
        """See `LevelDrafter`."""
        return self.runner.pool

    @property
    def fused_chain(self) -> FusedChain | None:
        """See `LevelDrafter`."""
        return self.runner.fused_chain if self._foreign is None else None

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `LevelDrafter`."""
        # first: what raises when it is read back leaves new weights
        self.drop()
        self.runner.load(dict(tensors))

    def admit(self, slots: range, batch: RunningBatch) -> None:
        """Start with an empty cache; the next draft catches up."""
        self._cached[slots.start : slots.stop] = 0

    def commit(self, batch: RunningBatch, tree: DraftTree, verdict: Verdict) -> Int[Tensor, " B"]:
        """Keep the accepted nodes that were expanded: move them to their dense positions."""
        if tree.is_chain:
            # they are dense
            return verdict.num_accepted.clamp(max=tree.num_in_cache)
        slots = tree.draft_slots.gather(1, (verdict.path[:, 1:] - 1).clamp_(min=0))
        step = count_up(slots.shape[1], slots.device)
        kept = (slots >= 0) & (step < verdict.num_accepted[:, None])
        self.pool.make_dense(batch.inputs().lengths, slots, kept & (slots != step))
        return kept.sum(1)

    def learn(
        self,
        batch: RunningBatch,
        token_ids: np.ndarray,
        num_accepted: np.ndarray,
        num_kept: np.ndarray | None,
    ) -> None:
        """Count what was kept as cached."""
        if num_kept is not None:
            self._cached[: len(batch)] = batch.lengths[: len(batch)] + num_kept

    def move_slot(self, source: int, target: int) -> None:
        """Follow a sample to its new slot."""
        self.runner.pool.move_slot(source, target, int(self._cached[source]))
        self._cached[target] = self._cached[source]

    def drop(self) -> None:
        """Forget every cached token."""
        self._cached[:] = 0

    @property
    def cache(self) -> KVPool:
        """The draft model's keys and values."""
        return self.runner.pool

    def num_cached_tokens(self, slot: int) -> int:
        """Committed tokens in the draft cache of a slot."""
        return int(self._cached[slot])

    def adopt(self, slot: int, num_tokens: int) -> None:
        """Go on from a cache that was filled elsewhere."""
        self._cached[slot] = num_tokens

    def root_logits(self, batch: RunningBatch) -> Float[Tensor, "B V"]:
        """Bring every cache up to the root, which included; return the logits behind the root."""
        logits = self.behind_root(batch, self.catch_up(batch))
        self._cached[: len(batch)] = batch.lengths[: len(batch)]
        return logits

    def catch_up(self, batch: RunningBatch) -> int:
        """Prefill caches that lag far behind; return how many tokens `behind_root` is to run of each sample."""
        live = len(batch)
        lengths = batch.lengths[:live]
        missing = lengths - self._cached[:live]
        behind = np.nonzero(missing > min(MAX_CATCH_UP_TOKENS, int(lengths.min())))[0]
        fill_committed(
            self.runner,
            batch.tokens,
            [
                PrefillPiece(slot=int(s), start=int(self._cached[s]), length=int(missing[s]) - 1)
                for s in behind
            ],
            self._max_prefill_tokens,
            cached=self._cached[:live],
        )
        missing[behind] = 1
        self._cached[behind] = lengths[behind] - 1
        return int(missing.max())

    def behind_root(self, batch: RunningBatch, count: int) -> Float[Tensor, "B V"]:
        """Run each sample's last `count` committed tokens; return the logits behind the root."""
        live = len(batch)
        inputs = batch.inputs()
        ids = inputs.last_tokens[:, -count:]
        base = inputs.lengths - count
        index = count_up(count, base.device)
        plan = TreePlan(
            pool=self.runner.pool,
            attention=self.runner.attention,
            base=base,
            num_tokens=count,
            view_tokens=int(batch.lengths[:live].max()),
        )
        logits = self.runner.logits(ids.reshape(-1), (base[:, None] + index).reshape(-1), plan)
        return without(logits.view(live, count, -1)[:, -1], self._foreign)

    def forward_level(
        self, batch: RunningBatch, ids: Tensor, seen: Tensor | None, depth: Tensor, parents: Tensor | None
    ) -> Float[Tensor, "B n V"]:
        """See `LevelDrafter`. Parents are seen in the cache."""
        plan, positions = level_plan(self.pool, self.runner.attention, batch, ids, seen, depth)
        logits = self.runner.logits(ids.reshape(-1), positions.reshape(-1), plan).view(*ids.shape, -1)
        return without(logits, self._foreign)
