"""What one forward does with the KV pool: where tokens are written, what each of them sees.

A plan travels to every layer's attention. Two kinds: `TreePlan` for a decode step (the same number of tokens for
each sample: the root and its draft nodes) and `PrefillPlan` for prompts of different lengths. Linears see the
packed tokens; only attention unpacks. Queries, keys and values of a token lie together, KV head by KV head:
    qkv [M, Hkv, group + 2, E]: the group's queries, the key, the value
so that attention takes the queries of single tokens as they lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from engine.attention import MIN_ROWS, Attention
from engine.kv import KVPool, round_up
from engine.visibility import as_bias, chain_visibility, tree_visibility

MAX_RUN_SCORES = 1 << 20
"Attention scores of prompts attended together; more would fall out of the cache."


@runtime_checkable
class ForwardPlan(Protocol):
    """One forward's view of the pool."""

    def store(self, layer: int, qkv: Float[Tensor, "M Hkv G E"]) -> None:
        """Write the tokens' keys and values."""
        ...

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
        ...


@dataclass(slots=True, kw_only=True)
class TreePlan:
    """`num_tokens` tree tokens for each of the samples in slots 0..B-1, behind `base` cached tokens each.

    The tree may grow level by level: of its t = num_earlier + num_tokens columns the first were written by earlier
    forwards. Each token sees its sample's first `base` tokens and the columns marked in `seen` (itself too);
    without `seen`, all columns up to itself: a chain. `depth` is each column's distance from the first `base` tokens.
    """

    pool: KVPool
    attention: Attention
    base: Int[Tensor, " B"]
    num_tokens: int
    num_earlier: int = 0
    seen: Bool[Tensor, "B n t"] | None = None
    depth: Int[Tensor, "B t"] | None = None
    view_tokens: int
    "largest base + t"
    _rows: Tensor = field(init=False)
    _bias: dict[int | None, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._rows = self.pool.tree_rows(self.base + self.num_earlier, self.num_tokens)
        self.view_tokens = min(round_up(self.view_tokens), self.pool.capacity)

    def store(self, layer: int, qkv: Tensor) -> None:
        """See `ForwardPlan.store`."""
        self.pool.write(layer, self._rows, qkv[: self.base.shape[0] * self.num_tokens, :, -2:])

    def attend(
        self, layer: int, qkv: Tensor, *, scaling: float, softcap: float | None, sliding_window: int | None
    ) -> Tensor:
        """See `ForwardPlan.attend`."""
        batch, n = self.base.shape[0], self.num_tokens
        self.store(layer, qkv)
        keys, values = self.pool.view(layer, 0, batch, self.view_tokens)
        out = self.attention(
            pack_queries(qkv[: batch * n], batch).to(keys.dtype),
            keys,
            values,
            self._bias_for(sliding_window, qkv.shape[2] - 2),
            rows=n * (qkv.shape[2] - 2),
            scaling=scaling,
            softcap=softcap,
        )
        return unpack_queries(out, batch, n, qkv.shape[0])

    def _bias_for(self, window: int | None, group: int) -> Tensor:
        if window not in self._bias:
            seen = self._visible(window)
            self._bias[window] = as_bias(seen, heads=self.pool.shape.num_kv_heads, group=group)
        return self._bias[window]

    def _visible(self, window: int | None) -> Bool[Tensor, "B n C"]:
        if self.seen is None or self.depth is None:
            return chain_visibility(
                self.base + self.num_earlier, self.num_tokens, self.view_tokens, window=window
            )
        return tree_visibility(self.base, self.seen, self.depth, self.view_tokens, window=window)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPiece:
    """A run of one sample's tokens inside a packed prefill."""

    slot: int
    start: int
    "position of the first token"
    length: int


@dataclass(slots=True, kw_only=True)
class PrefillPlan:
    """Runs of several samples' tokens, packed one behind the other; each run is causal."""

    pool: KVPool
    attention: Attention
    pieces: list[PrefillPiece]
    _rows: Tensor = field(init=False)
    _num_tokens: int = field(init=False)
    _attended: dict[int | None, list[AttendedRun]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        device = self.pool.device
        slots = torch.cat([torch.full((p.length,), p.slot) for p in self.pieces])
        positions = torch.cat([torch.arange(p.start, p.start + p.length) for p in self.pieces])
        self._num_tokens = len(slots)
        self._rows = self.pool.rows(slots.to(device), positions.to(device))

    def store(self, layer: int, qkv: Tensor) -> None:
        """See `ForwardPlan.store`."""
        self.pool.write(layer, self._rows, qkv[: self._num_tokens, :, -2:])

    def attend(
        self, layer: int, qkv: Tensor, *, scaling: float, softcap: float | None, sliding_window: int | None
    ) -> Tensor:
        """See `ForwardPlan.attend`; runs of neighbouring slots attend together while that stays small."""
        self.store(layer, qkv)
        group = qkv.shape[2] - 2
        out = self.pool.cells.new_zeros(len(qkv), qkv.shape[1] * group * qkv.shape[3])
        for part in self._runs_for(sliding_window, group):
            keys, values = self.pool.view(layer, part.first_slot, part.num_slots, part.view)
            attended = self.attention(
                pack_queries(qkv[part.tokens], part.num_slots).to(keys.dtype),
                keys,
                values,
                part.bias,
                rows=part.length * group,
                scaling=scaling,
                softcap=softcap,
            )
            attended = unpack_queries(attended, part.num_slots, part.length, len(part.tokens))
            out[part.real_tokens] = attended if part.real is None else attended[part.real]
        return out

    def _runs_for(self, window: int | None, group: int) -> list[AttendedRun]:
        if window not in self._attended:
            self._attended[window] = list(self._make_runs(window, group))
        return self._attended[window]

    def _make_runs(self, window: int | None, group: int) -> Iterator[AttendedRun]:
        heads, device = self.pool.shape.num_kv_heads, self.pool.device
        first_token = 0
        for run in neighbours(self.pieces, heads * group):
            length = max(piece.length for piece in run)
            view = min(round_up(max(p.start + p.length for p in run)), self.pool.capacity)
            lengths = torch.tensor([piece.length for piece in run], device=device)
            begins = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]]) + first_token
            step = torch.arange(length, device=device)
            real = (step < lengths[:, None]).flatten()
            # the padding of a shorter run repeats its last token
            tokens = (begins[:, None] + torch.minimum(step, lengths[:, None] - 1)).flatten()
            starts = torch.tensor([piece.start for piece in run], device=device)
            seen = chain_visibility(starts, length, view, window=window)
            yield AttendedRun(
                first_slot=run[0].slot,
                num_slots=len(run),
                length=length,
                view=view,
                tokens=tokens,
                real_tokens=tokens[real],
                real=None if bool(real.all()) else real.nonzero()[:, 0],
                bias=as_bias(seen, heads=heads, group=group),
            )
            first_token += int(lengths.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendedRun:
    """Runs of neighbouring slots that attend together, padded to the longest."""

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


def neighbours(pieces: list[PrefillPiece], heads: int) -> Iterator[list[PrefillPiece]]:
    """Cut the pieces into runs of neighbouring slots with at most MAX_RUN_SCORES scores (or one piece)."""
    run: list[PrefillPiece] = []
    for piece in pieces:
        longer = [*run, piece]
        length = max(p.length for p in longer)
        view = round_up(max(p.start + p.length for p in longer))
        small = len(longer) * heads * length * view <= MAX_RUN_SCORES
        if run and not (small and piece.slot == run[-1].slot + 1):
            yield run
            longer = [piece]
        run = longer
    yield run


def pack_queries(qkv: Float[Tensor, "M Hkv G E"], batch: int) -> Float[Tensor, "N R E"]:
    """Return the queries by (sample, KV head), rows token by token, padded to MIN_ROWS rows.

    A single token's are taken as they lie where key and value suffice as padding rows.
    """
    heads, lanes, size = qkv.shape[1:]
    group, n = lanes - 2, qkv.shape[0] // batch
    if n == 1 and lanes >= MIN_ROWS:
        return qkv.view(batch * heads, lanes, size)[:, : max(group, MIN_ROWS)]
    queries = qkv[:, :, :group].view(batch, n, heads, group, size).transpose(1, 2)
    queries = queries.reshape(batch * heads, n * group, size)
    missing = MIN_ROWS - n * group
    return queries if missing <= 0 else torch.nn.functional.pad(queries, (0, 0, 0, missing))


def unpack_queries(
    out: Float[Tensor, "N rows E"], batch: int, n: int, num_tokens: int
) -> Float[Tensor, "M HE"]:
    """Return attention outputs token by token, heads behind one another; zeros up to `num_tokens` tokens."""
    heads = out.shape[0] // batch
    packed = out.view(batch, heads, n, -1).transpose(1, 2).reshape(batch * n, -1)
    missing = num_tokens - batch * n
    return packed if missing == 0 else torch.nn.functional.pad(packed, (0, 0, 0, missing))
