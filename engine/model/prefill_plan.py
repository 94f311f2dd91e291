"""Prompts of different lengths in one forward: their tokens lie packed, neighbours attend together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float
from torch import Tensor

from ..attention.backends import (
    SHARE_BIAS,
    Attention,
    num_biases,
    reference_attention,
    variable_length_attention,
)
from ..attention.packing import pack_queries, queries_by_head, unpack_queries
from ..attention.visibility import as_bias, chain_visibility
from ..cache.kv_memory import round_up
from ..cache.kv_pool import KVPool
from ..cache.segments import Segments, segments_of
from ..upload import upload
from .compute_backend import PoolAttention
from .forward_plan import ForwardPlan, TurnRows

MAX_SCORES_TOGETHER = 1 << 20
"Attention scores of prompts attended together; more would fall out of a processor's cache."
MAX_BIAS_TOGETHER = 1 << 27
"The same on a GPU, where it bounds what a bias takes: 256 MiB in bfloat16."


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPiece:
    """A stretch of one sample's tokens inside a packed prefill."""

    slot: int
    start: int
    "position of the first token"
    length: int


def packed_inputs(
    tokens: np.ndarray | Sequence[Sequence[int]], pieces: Sequence[PrefillPiece]
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and positions of stretches, one behind the other, int64 [M] each; `tokens` holds each slot's."""
    ids = np.concatenate([tokens[p.slot][p.start : p.start + p.length] for p in pieces])
    positions = np.concatenate([np.arange(p.start, p.start + p.length) for p in pieces])
    return ids, positions


@dataclass(slots=True, kw_only=True)
class PrefillPlan(ForwardPlan):
    """Stretches of several samples' tokens, packed one behind the other; each is causal.

    In 16 bits those behind the last that has tokens cached before it are one call of attention, without a mask.
    """

    pool: KVPool
    attention: Attention | PoolAttention
    pieces: list[PrefillPiece]
    _rows_once: Tensor | None = field(init=False, default=None)
    _starts: Tensor = field(init=False)
    "where the tokens of unmasked stretches begin among them, and their number; made with the rows"
    _segments: Segments | None = field(init=False, default=None)
    _attended: dict[tuple[int | None, int], list[Neighbours]] = field(init=False, default_factory=dict)

    @property
    def _rows(self) -> Tensor:
        """Where library calls write keys and values."""
        if self._rows_once is None:
            slots = np.repeat([p.slot for p in self.pieces], [p.length for p in self.pieces])
            positions = np.concatenate([np.arange(p.start, p.start + p.length) for p in self.pieces])
            starts = np.cumsum([0, *(p.length for p in self.pieces[self._num_cached :])], dtype=np.int32)
            *places, self._starts = upload([slots, positions, starts], self.pool.device)
            self._rows_once = self.pool.rows(*places)
        return self._rows_once

    @property
    def _num_cached(self) -> int:
        """Pieces up to the last that has cached tokens before it."""
        return max((index + 1 for index, piece in enumerate(self.pieces) if piece.start), default=0)

    def segments(self) -> Segments:
        """See `ForwardPlan.segments`."""
        if self._segments is None:
            slots, starts, counts = np.array([(p.slot, p.start, p.length) for p in self.pieces]).T
            self._segments = segments_of(self.pool, slots=slots, counts=counts, starts=starts)
        return self._segments

    def store_rows(self, layer: int, qkv: Tensor) -> None:
        """See `ForwardPlan.store_rows`."""
        num_tokens = sum(piece.length for piece in self.pieces)
        self.pool.write(layer, self._rows, qkv[:num_tokens, :, -2:])

    def attend_rows(
        self,
        attention: Attention,
        layer: int,
        qkv: Tensor,
        *,
        scaling: float,
        softcap: float | None,
        sliding_window: int | None,
    ) -> Tensor:
        """See `ForwardPlan.attend_rows`; neighbouring slots attend together while that stays small."""
        self.store_rows(layer, qkv)

        def pack(part: Neighbours) -> Tensor:
            return pack_queries(qkv[part.tokens], part.num_slots).to(self.pool.cells.dtype)

        return self._attend(
            attention, layer, pack, qkv[:, :, :-2], len(qkv), scaling, softcap, sliding_window
        )

    def store_turned(self, layer: int, turn: TurnRows, qkv: Tensor, positions: Tensor) -> Tensor:
        """See `ForwardPlan.store_turned`; queries [tokens * Hkv, queries, E]."""
        return turn(qkv, positions, self.pool.writable(layer), self._rows, 1)

    def attend_turned(
        self,
        layer: int,
        turn: TurnRows,
        qkv: Tensor,
        positions: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
    ) -> Tensor:
        """See `ForwardPlan.attend_turned`."""
        assert not isinstance(self.attention, PoolAttention)
        queries = self.store_turned(layer, turn, qkv, positions)
        by_token = queries.unflatten(0, (-1, self.pool.shape.num_kv_heads))

        def pack(part: Neighbours) -> Tensor:
            return queries_by_head(by_token[part.tokens], part.num_slots)

        return self._attend(self.attention, layer, pack, by_token, len(qkv), scaling, None, sliding_window)

    def _attend(
        self,
        attention: Attention,
        layer: int,
        pack: Callable[[Neighbours], Tensor],
        by_token: Float[Tensor, "M Hkv S E"],
        num_packed: int,
        scaling: float,
        softcap: float | None,
        sliding_window: int | None,
    ) -> Tensor:
        shape = self.pool.shape
        queries = shape.num_heads // shape.num_kv_heads
        out = self.pool.cells.new_zeros(num_packed, shape.num_heads * shape.head_size)
        unmasked = None
        if softcap is None and attention in SHARE_BIAS and attention is not reference_attention:
            unmasked = variable_length_attention(out.dtype, shape.head_size)
        num_masked = len(self.pieces) if unmasked is None else self._num_cached
        for part in self._neighbours_for(sliding_window, queries, num_masked):
            keys, values = self.pool.view(layer, part.first_slot, part.num_slots, part.view)
            attended = attention(
                pack(part),
                keys,
                values,
                part.bias,
                rows=part.length * queries,
                scaling=scaling,
                softcap=softcap,
            )
            attended = unpack_queries(attended, part.num_slots, part.length, len(part.tokens))
            out[part.real_tokens] = attended if part.real is None else attended[part.real]
        if unmasked is not None and num_masked < len(self.pieces):
            begin, end = (sum(p.length for p in pieces) for pieces in (self.pieces[:num_masked], self.pieces))
            rows = self._rows[begin * shape.num_kv_heads * 2 :]
            stored = self.pool.writable(layer).index_select(0, rows)
            keys, values = stored.view(end - begin, shape.num_kv_heads, 2, shape.head_size).unbind(2)
            out[begin:end] = unmasked(
                by_token[begin:end].flatten(1, 2).to(out.dtype),
                keys,
                values,
                starts=self._starts,
                longest=max(piece.length for piece in self.pieces[num_masked:]),
                scale=scaling,
                window=sliding_window,
            ).flatten(1)
        return out

    def _neighbours_for(self, window: int | None, queries: int, num_pieces: int) -> list[Neighbours]:
        key = (window, num_pieces)
        if key not in self._attended:
            self._attended[key] = list(self._make_neighbours(window, queries, self.pieces[:num_pieces]))
        return self._attended[key]

    def _make_neighbours(
        self, window: int | None, queries: int, pieces: list[PrefillPiece]
    ) -> Iterator[Neighbours]:
        device = self.pool.device
        heads = num_biases(self.attention, self.pool.shape.num_kv_heads)
        most = MAX_SCORES_TOGETHER if device.type == "cpu" else MAX_BIAS_TOGETHER
        first_token = 0
        for together in _together(pieces, heads * queries, most):
            lengths = np.array([piece.length for piece in together])
            starts = np.array([piece.start for piece in together])
            length = int(lengths.max())
            view = min(round_up(int((starts + lengths).max())), self.pool.capacity)
            begins = first_token + lengths.cumsum() - lengths
            step = np.arange(length)
            real = np.flatnonzero(step < lengths[:, None])
            # the padding of a shorter piece repeats its last token
            tokens = (begins[:, None] + np.minimum(step, lengths[:, None] - 1)).reshape(-1)
            first, padded, unpadded, places = upload([starts, tokens, tokens[real], real], device)
            seen = chain_visibility(first, length, view, window=window)
            yield Neighbours(
                first_slot=together[0].slot,
                num_slots=len(together),
                length=length,
                view=view,
                tokens=padded,
                real_tokens=unpadded,
                real=None if len(real) == len(tokens) else places,
                bias=as_bias(seen, heads=heads, queries=queries).to(self.pool.cells.dtype),
            )
            first_token += int(lengths.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Pieces of neighbouring slots that attend together, padded to the longest."""

    first_slot: int
    num_slots: int
    length: int
    view: int
    tokens: Tensor
    "packed tokens of each slot, padded: [num_slots * length]"
    real_tokens: Tensor
    real: Tensor | None
    "which entries of `tokens` are no padding; None: all"
    bias: Tensor


def _together(pieces: list[PrefillPiece], heads: int, most: int) -> Iterator[list[PrefillPiece]]:
    """Cut where slots are no neighbours, and into parts of at most `most` scores (or one piece)."""
    together: list[PrefillPiece] = []
    for piece in pieces:
        longer = [*together, piece]
        length = max(p.length for p in longer)
        view = round_up(max(p.start + p.length for p in longer))
        small = len(longer) * heads * length * view <= most
        if together and not (small and piece.slot == together[-1].slot + 1):
            yield together
            longer = [piece]
        together = longer
    if together:
        yield together
