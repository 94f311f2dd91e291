"""What one forward does with the KV pool: where tokens are written, what each of them sees.

A plan travels to every layer's attention. Two kinds: `TreePlan` for a decode step (the same number of tokens for
each sample: the root and its draft nodes) and `engine.model.prefill_plan.PrefillPlan` for prompts of different lengths.
Linears see the packed tokens; only attention unpacks (`engine.attention.packing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from ..attention.backends import SHARE_BIAS, Attention, num_biases
from ..attention.by_length import Marks, SplitAttention
from ..attention.packing import RaggedRows, pack_queries, unpack_queries
from ..attention.visibility import as_bias, chain_visibility, tree_visibility
from ..cache.kv_memory import round_up
from ..cache.kv_pool import KVPool
from ..cache.segments import Segments, segments_of
from .compute_backend import PoolAttention

TurnRows = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"`RowOperators.turn` with a layer's part of its arguments."


@runtime_checkable
class ForwardPlan(Protocol):
    """One forward's view of the pool."""

    pool: KVPool
    "where keys and values are"
    attention: Attention | PoolAttention

    def segments(self) -> Segments:
        """Return the stretches of tokens, for attention that works inside the pool."""
        ...

    def store_rows(self, layer: int, qkv: Float[Tensor, "M Hkv G E"]) -> None:
        """Write the tokens' keys and values by library calls."""
        ...

    def attend_rows(
        self,
        attention: Attention,
        layer: int,
        qkv: Float[Tensor, "M Hkv G E"],
        *,
        scaling: float,
        softcap: float | None,
        sliding_window: int | None,
    ) -> Float[Tensor, "M HE"]:
        """Do what `attend` does by attention over unpacked rows of queries."""
        ...

    def store_turned(
        self, layer: int, turn: TurnRows, qkv: Float[Tensor, "M W"], positions: Int[Tensor, " M"]
    ) -> Tensor:
        """Write keys and values of products by one operator; return the queries, by whatever rows."""
        ...

    def attend_turned(
        self,
        layer: int,
        turn: TurnRows,
        qkv: Float[Tensor, "M W"],
        positions: Int[Tensor, " M"],
        *,
        scaling: float,
        sliding_window: int | None,
    ) -> Float[Tensor, "M HE"]:
        """Do what `attend` does for products that are not turned yet; for attention in SHARE_BIAS."""
        ...

    @property
    def takes_products(self) -> bool:
        """Whether attention takes rows as they are, so that `attend_turned` serves."""
        return not isinstance(self.attention, PoolAttention) and self.attention in SHARE_BIAS

    def store(self, layer: int, qkv: Float[Tensor, "M Hkv G E"]) -> None:
        """Write the tokens' keys and values."""
        if isinstance(self.attention, PoolAttention):
            self.attention.store(self.pool, layer, qkv, self.segments())
        else:
            self.store_rows(layer, qkv)

    def attend(
        self,
        layer: int,
        qkv: Float[Tensor, "M Hkv G E"],
        *,
        scaling: float,
        softcap: float | None,
        sliding_window: int | None,
    ) -> Float[Tensor, "M HE"]:
        """Store the tokens' keys and values, return what their queries attend to; zeros for padding tokens."""
        how = {"scaling": scaling, "softcap": softcap, "sliding_window": sliding_window}
        if isinstance(self.attention, PoolAttention):
            return self.attention.attend(self.pool, layer, qkv, self.segments(), **how)
        return self.attend_rows(self.attention, layer, qkv, **how)


@dataclass(slots=True, kw_only=True)
class TreePlan(ForwardPlan):
    """`num_tokens` tree tokens for each of the samples in slots 0..B-1, behind `base` cached tokens each.

    The tree may grow level by level: of its t = num_earlier + num_tokens columns the first were written by earlier
    forwards. Each token sees its sample's first `base` tokens and the columns marked in `seen` (itself too);
    without `seen`, all columns up to itself: a chain. `depth` is each column's distance from the first `base` tokens.
    """

    pool: KVPool
    attention: Attention | PoolAttention
    base: Int[Tensor, " B"]
    num_tokens: int
    num_earlier: int = 0
    seen: Bool[Tensor, "B n t"] | None = None
    depth: Int[Tensor, "B t"] | None = None
    view_tokens: int
    "largest base + t"
    ragged: RaggedRows | None = None
    "some samples have fewer tokens than `num_tokens`"
    _rows_once: Tensor | None = field(init=False, default=None)
    _segments: Segments | None = field(init=False, default=None)
    _padding: Tensor = field(init=False)
    "of a fixed copy: where its padding samples write"
    _bias: dict[int | None, Tensor] = field(init=False, default_factory=dict)
    _marks_once: Marks | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        capacity = self.pool.capacity
        self.view_tokens = capacity if self.by_length else min(round_up(self.view_tokens), capacity)

    @property
    def by_length(self) -> bool:
        """Whether attention takes marks: then the view is the whole cache, of which it reads what there is."""
        return isinstance(self.attention, SplitAttention)

    @property
    def marked_columns(self) -> int:
        """How many columns the marks have, rounded up; 0: there are none."""
        return 0 if self.seen is None or not self.by_length else round_up(self.seen.shape[2])

    @property
    def _rows(self) -> Tensor:
        """Where library calls write keys and values."""
        if self._rows_once is None:
            self._rows_once = self.pool.tree_rows(self.base + self.num_earlier, self.num_tokens)
        return self._rows_once

    def segments(self) -> Segments:
        """See `ForwardPlan.segments`; on the CPU."""
        if self._segments is None:
            bases = self.base.numpy()
            # the table holds their addresses
            self.seen = None if self.seen is None else self.seen.contiguous()
            self.depth = None if self.depth is None else self.depth.contiguous()
            counts = np.full(len(bases), self.num_tokens) if self.ragged is None else self.ragged.counts
            self._segments = segments_of(
                self.pool,
                slots=np.arange(len(bases)),
                counts=counts,
                starts=bases + self.num_earlier,
                bases=bases,
                seen=self.seen,
                depth=self.depth,
            )
        return self._segments

    def fixed_copy(self, num_samples: int) -> TreePlan:
        """Return a plan for `num_samples` samples whose tensors stay where they are; `follow` changes what they hold.

        Call after a forward of this plan: what its layers asked for is copied. Samples behind ours are padding: their
        tokens go to the last position of their slots.
        """
        live = self.base.shape[0]
        unread = self.base.new_full((num_samples,), self.pool.capacity - 1)
        fixed = TreePlan(
            pool=self.pool,
            attention=self.attention,
            base=self.base.new_zeros(num_samples),
            num_tokens=self.num_tokens,
            view_tokens=self.view_tokens,
        )
        cell = self.pool.tree_rows(unread, 1).view(num_samples, 1, -1)
        fixed._padding = cell.expand(-1, self.num_tokens, -1).reshape(num_samples, -1)
        for window, bias in self._bias.items():
            fixed._bias[window] = bias.new_zeros(bias.shape[0] // live * num_samples, *bias.shape[1:])
        if self.by_length:
            fixed._marks_once = self._fixed_marks(num_samples)
        fixed.follow(self)
        return fixed

    def _fixed_marks(self, num_samples: int) -> Marks:
        base, columns = self.base.new_zeros(num_samples), self.marked_columns
        if self.seen is None:
            return Marks(base=base)
        return Marks(
            base=base,
            seen=self.seen.new_zeros(num_samples, self.num_tokens, columns),
            column_depth=base.new_zeros(num_samples, columns),
            token_depth=base.new_zeros(num_samples, self.num_tokens),
        )

    def follow(self, plan: TreePlan) -> None:
        """Take over where another plan of at most as many samples writes, and what its tokens see."""
        live = plan.base.shape[0]
        rows = self._rows.view(self.base.shape[0], -1)
        rows[:live].copy_(plan._rows.view(live, -1))
        rows[live:].copy_(self._padding[live:])
        for window, bias in self._bias.items():
            seen = plan._bias_for(window)
            bias[: seen.shape[0]].copy_(seen)
        if self.by_length:
            self._follow_marks(plan._marks)

    def _follow_marks(self, marks: Marks) -> None:
        """Columns behind the plan's are seen by none; padding samples have nothing cached."""
        mine, live = self._marks, len(marks.base)
        mine.base[:live].copy_(marks.base)
        mine.base[live:].zero_()
        for into, of in (
            (mine.seen, marks.seen),
            (mine.column_depth, marks.column_depth),
            (mine.token_depth, marks.token_depth),
        ):
            if into is not None and of is not None:
                into[:live, ..., : of.shape[-1]].copy_(of)
                into[:live, ..., of.shape[-1] :].zero_()

    def store_rows(self, layer: int, qkv: Tensor) -> None:
        """See `ForwardPlan.store_rows`."""
        self._write(layer, qkv if self.ragged is None else self.ragged.unpack(qkv))

    def _write(self, layer: int, rows: Tensor) -> None:
        self.pool.write(layer, self._rows, rows[: self.base.shape[0] * self.num_tokens, :, -2:])

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
        """See `ForwardPlan.attend_rows`."""
        batch, n = self.base.shape[0], self.num_tokens
        num_packed = qkv.shape[0]
        if self.ragged is not None:
            qkv = self.ragged.unpack(qkv)
        self._write(layer, qkv)
        queries = pack_queries(qkv[: batch * n], batch).to(self.pool.cells.dtype)
        rows = n * (qkv.shape[2] - 2)
        out = self._attended(attention, layer, queries, rows, scaling, softcap, sliding_window)
        return self._unpacked(out, num_packed)

    def store_turned(self, layer: int, turn: TurnRows, qkv: Tensor, positions: Tensor) -> Tensor:
        """See `ForwardPlan.store_turned`; queries by (sample, KV head)."""
        if self.ragged is not None:
            qkv, positions = self.ragged.unpack(qkv), self.ragged.unpack(positions)
        return turn(qkv, positions, self.pool.writable(layer), self._rows, self.num_tokens)

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
        out = self._attended(self.attention, layer, queries, queries.shape[1], scaling, None, sliding_window)
        return self._unpacked(out, qkv.shape[0])

    def _attended(
        self,
        attention: Attention,
        layer: int,
        queries: Tensor,
        rows: int,
        scaling: float,
        softcap: float | None,
        sliding_window: int | None,
    ) -> Tensor:
        """Attention's output token by token, those that some samples lack included."""
        batch, n = self.base.shape[0], self.num_tokens
        keys, values = self.pool.view(layer, 0, batch, self.view_tokens)
        how: Any = {"scaling": scaling, "softcap": softcap}
        if isinstance(attention, SplitAttention):
            how |= {"tokens": n, "window": sliding_window}
            return attention.by_length(queries[:, :rows], keys, values, self._marks, **how)
        out = attention(queries, keys, values, self._bias_for(sliding_window), rows=rows, **how)
        return unpack_queries(out, batch, n, batch * n)

    def _unpacked(self, out: Tensor, num_packed: int) -> Tensor:
        """The output of the tokens that there are, zeros for padding tokens."""
        packed = out if self.ragged is None else self.ragged.pack(out)
        missing = num_packed - packed.shape[0]
        return packed if missing == 0 else F.pad(packed, (0, 0, 0, missing))

    @property
    def _marks(self) -> Marks:
        if self._marks_once is None:
            if self.seen is None or self.depth is None:
                first = self.base + self.num_earlier if self.num_earlier else self.base
                self._marks_once = Marks(base=first)
            else:
                seen, depth = self.seen.contiguous(), self.depth.contiguous()
                own = self.depth[:, -self.num_tokens :]
                self._marks_once = Marks(base=self.base, seen=seen, column_depth=depth, token_depth=own)
        return self._marks_once

    def _bias_for(self, window: int | None) -> Tensor:
        if window not in self._bias:
            seen, shape = self._visible(window), self.pool.shape
            heads = num_biases(self.attention, shape.num_kv_heads)
            bias = as_bias(seen, heads=heads, queries=shape.num_heads // shape.num_kv_heads)
            self._bias[window] = bias.to(self.pool.cells.dtype)
        return self._bias[window]

    def _visible(self, window: int | None) -> Bool[Tensor, "B n C"]:
        if self.seen is None or self.depth is None:
            return chain_visibility(
                self.base + self.num_earlier, self.num_tokens, self.view_tokens, window=window
            )
        return tree_visibility(self.base, self.seen, self.depth, self.view_tokens, window=window)
