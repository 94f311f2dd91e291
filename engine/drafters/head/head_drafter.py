"""Drafts with a head on the target's hidden states: trees by the coupled rule (EAGLE-3, arXiv 2503.01840).

The head's cell i joins the target's hidden states at position i with token i + 1: a sample of n committed tokens has
n - 1 cells, the root's included, and a drafted token of level d stands in cell n - 2 + d.

    verification -> hidden states of what was accepted wait -> at the next draft, or when many wait, they are mixed,
    and keys and values written from them -> the root's forward -> level by level

Keys and values of committed tokens are always made of the target's own hidden states: nothing of a draft is kept.
What a sample's root lacks after a move (its hidden states stay behind) costs it one draft, never a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ....core.decode_records import Budget
from ...attention.backends import Attention
from ...cache.kv_pool import KVPool
from ...decoding.draft_tree import DEAD, DraftTree
from ...decoding.noise import Noise
from ...decoding.running_batch import RunningBatch
from ...model.compute_backend import PoolAttention
from ...model.forward_plan import TreePlan
from ...model.prefill_plan import PrefillPiece, PrefillPlan, packed_inputs
from ...upload import upload
from ..level_drafter import LevelDrafter, level_plan
from ..refinement import Refinement
from .head_forward import LayerForward
from .published_head import head_checksum

MAX_WAITING = 16
"Committed tokens of a sample whose hidden states may wait for their keys and values; those of one step come on top."


class HeadDrafter(LevelDrafter):
    """A head with its own KV pool of one layer, slot for slot beside the target's. It is a `HiddenFollower`.

    Nothing of a draft is kept: `verified` brings what is true of it. New weights drop nothing: cells that others made
    still tell much, and no token depends on them.
    """

    def __init__(
        self,
        forward: LayerForward,
        pool: KVPool,
        *,
        attention: Attention | PoolAttention,
        max_depth: int,
        vocab_size: int,
    ) -> None:
        """Start with empty caches.

        Args:
            forward: of the head.
            pool: of its one layer; capacity as the target's.
            attention: of the target's back end.
            max_depth: levels of the deepest tree.
            vocab_size: token ids that may be drafted; the head's others are padding.
        """
        self.forward = forward
        self._pool = pool
        self._attention = attention
        config, slots = forward.config, pool.num_slots
        ids = forward.head.token_ids
        self._ids = ids[ids < vocab_size].to(pool.device)
        "the target's ids of the draft vocabulary"
        self._is_whole = len(self._ids) == vocab_size
        self._num_taps = len(config.tapped_layers) * config.hidden_size
        room = MAX_WAITING + max_depth + 1
        self._waiting = torch.zeros(slots, room, self._num_taps, dtype=forward.dtype, device=pool.device)
        "hidden states behind the cells, those of the next ones"
        self._num_waiting = np.zeros(slots, dtype=np.int64)
        self._num_cells = np.zeros(slots, dtype=np.int64)
        self._root = torch.zeros(slots, config.hidden_size, dtype=forward.dtype, device=pool.device)
        "what the root's forward begins with, of the last cell; zeros where it was left behind"
        self._batch: RunningBatch | None = None
        self._hidden = self._root[:0, None]
        "the last level's output, [B, n, H]"

    @property
    def pool(self) -> KVPool:
        """See `LevelDrafter`."""
        return self._pool

    @property
    def cache(self) -> KVPool:
        """The head's keys and values."""
        return self._pool

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over trained weights; cells made by the old ones stay. Raises WeightsError: they do not fit."""
        self.forward.load(tensors)

    def checksum(self) -> str:
        """See `LevelDrafter`."""
        return head_checksum(self.forward.head)

    def admit(self, slots: range, batch: RunningBatch) -> None:
        """Start with an empty cache; prefill fills it."""
        self._batch = batch
        self._num_cells[slots.start : slots.stop] = 0
        self._num_waiting[slots.start : slots.stop] = 0
        self._root[slots.start : slots.stop] = 0.0

    def propose(
        self, batch: RunningBatch, budget: Budget, noise: Noise, refinement: Refinement | None = None
    ) -> DraftTree | None:
        """See `Drafter`. None where a sample has one token only: nothing stands behind its first."""
        if int(batch.lengths[: len(batch)].min()) < 2:
            return None
        tree = super().propose(
            batch, budget, noise if self._is_whole else noise.of_ids(self._ids), refinement
        )
        if tree is None or self._is_whole or not tree.num_nodes:
            return tree
        ids = tree.token_ids
        return replace(tree, token_ids=self._ids[ids.clamp(min=0)].masked_fill(ids == DEAD, DEAD))

    def move_slot(self, source: int, target: int) -> None:
        """Follow a sample to its new slot."""
        self._pool.move_slot(source, target, int(self._num_cells[source]))
        for each in (self._num_cells, self._num_waiting, self._waiting, self._root):
            each[target] = each[source]

    def num_cached_tokens(self, slot: int) -> int:
        """Cells of a slot; what waits is written first."""
        if self._batch is not None and self._num_waiting[slot]:
            self._write_waiting(self._batch, [slot])
        return int(self._num_cells[slot])

    def adopt(self, slot: int, num_tokens: int) -> None:
        """Go on from cells that were filled elsewhere."""
        self._num_cells[slot] = num_tokens

    def filled(self, tokens: np.ndarray, pieces: Sequence[PrefillPiece], hidden: Tensor) -> None:
        """Write keys and values of prompts; see `HiddenFollower`."""
        self._write_cells(tokens, list(pieces), hidden[:, : self._num_taps])

    def copied(self, source: int, piece: PrefillPiece) -> None:
        """Copy the cells of a prompt that both have; the root's start where the other stands there too."""
        self._pool.copy_slot(source, piece.slot, piece.length)
        self._num_cells[piece.slot] = piece.length
        if self._num_cells[source] == piece.length and not self._num_waiting[source]:
            self._root[piece.slot] = self._root[source]

    def verified(
        self, batch: RunningBatch, hidden: Tensor, token_ids: np.ndarray, num_accepted: np.ndarray
    ) -> None:
        """Let the hidden states of what was accepted wait; see `HiddenFollower`."""
        live = len(batch)
        self._close_gaps(batch)
        waiting = self._num_waiting[:live]
        full = np.flatnonzero(waiting + num_accepted + 1 > self._waiting.shape[1])
        if len(full):
            # no draft has taken them for a while; all at once cost what one would
            self._write_waiting(batch, np.flatnonzero(waiting).tolist())
        row, entry = np.nonzero(np.arange(hidden.shape[1]) <= num_accepted[:, None])
        index = upload([row, entry, waiting[row] + entry], hidden.device)
        self._waiting[index[0], index[2]] = hidden[index[0], index[1], : self._num_taps].to(
            self._waiting.dtype
        )
        waiting += num_accepted + 1

    def moved(self, source: int, target: int) -> None:
        """`move_slot` is told as well."""

    def left(self, slot: int, batch: RunningBatch) -> None:
        """`leave` is told as well."""

    def root_logits(self, batch: RunningBatch) -> Float[Tensor, "B D"]:
        """Write what waits, then run the roots; see `LevelDrafter`."""
        live = len(batch)
        self._close_gaps(batch)
        self._write_waiting(batch, np.flatnonzero(self._num_waiting[:live]).tolist())
        inputs = batch.inputs()
        base = inputs.lengths - 2
        plan = TreePlan(
            pool=self._pool,
            attention=self._attention,
            base=base,
            num_tokens=1,
            view_tokens=int(batch.lengths[:live].max()) - 1,
        )
        return self._run(inputs.last_tokens[:, -1:], self._root[:live, None], base[:, None], plan)[:, 0]

    def forward_level(
        self, batch: RunningBatch, ids: Tensor, seen: Tensor | None, depth: Tensor, parents: Tensor | None
    ) -> Float[Tensor, "B n D"]:
        """See `LevelDrafter`."""
        plan, positions = level_plan(self._pool, self._attention, batch, ids, seen, depth, lag=1)
        hidden = self._hidden
        if parents is not None:
            hidden = hidden.gather(1, parents[..., None].expand(-1, -1, hidden.shape[-1]))
        return self._run(self._ids[ids], hidden, positions, plan)

    def _run(self, ids: Tensor, hidden: Tensor, positions: Tensor, plan: TreePlan) -> Float[Tensor, "B n D"]:
        """Run B samples' tokens, [B, n] each; keep the layer's output for the level that follows."""
        live, n = ids.shape
        flat = hidden.reshape(live * n, -1)
        with torch.inference_mode():
            logits, out = self.forward(ids.reshape(-1), flat, positions.reshape(-1), plan)
        self._hidden = out.view(live, n, -1)
        return logits[:, : len(self._ids)].view(live, n, -1)

    def _write_waiting(self, batch: RunningBatch, slots: list[int]) -> None:
        """Write the cells whose hidden states wait, as far as their tokens are committed."""
        if not slots:
            return
        counts = np.minimum(self._num_waiting[slots], batch.lengths[slots] - 1 - self._num_cells[slots])
        pieces = [
            PrefillPiece(slot=slot, start=int(self._num_cells[slot]), length=int(count))
            for slot, count in zip(slots, counts, strict=True)
            if count > 0
        ]
        self._num_waiting[slots] = 0
        if not pieces:
            return
        rows = np.repeat([p.slot for p in pieces], [p.length for p in pieces])
        entries = np.concatenate([np.arange(p.length) for p in pieces])
        on_device = upload([rows, entries], self._waiting.device)
        self._write_cells(batch.tokens, pieces, self._waiting[on_device[0], on_device[1]])

    def _write_cells(
        self, tokens: np.ndarray, pieces: list[PrefillPiece], taps: Float[Tensor, "M kH"]
    ) -> None:
        """Write keys and values of runs of cells from the target's hidden states, packed one behind the other."""
        # a cell's token is the next one
        ids, positions = packed_inputs(tokens[:, 1:], pieces)
        on_device = upload([ids, positions], self._pool.device)
        with torch.inference_mode():
            mixed = self.forward.mix(taps)
            plan = PrefillPlan(pool=self._pool, attention=self._attention, pieces=pieces)
            self.forward.fill(on_device[0], mixed, on_device[1], plan)
        last = np.cumsum([p.length for p in pieces]) - 1
        slots = [p.slot for p in pieces]
        self._num_cells[slots] = [p.start + p.length for p in pieces]
        index = upload([np.array(slots), last], self._pool.device)
        self._root[index[0]] = mixed[index[1]]

    def _close_gaps(self, batch: RunningBatch) -> None:
        """Zeros where a sample came without some of its cells: its hidden states are elsewhere."""
        live = len(batch)
        held = self._num_cells[:live] + self._num_waiting[:live]
        for slot in np.flatnonzero(batch.lengths[:live] - 1 != held).tolist():
            first, stop = int(self._num_cells[slot]), int(batch.lengths[slot]) - 1
            self._pool.range_of(slot, min(first, stop), stop).zero_()
            self._num_cells[slot], self._num_waiting[slot] = stop, 0
            self._root[slot] = 0.0
