"""What one forward does with the KV pool: where tokens are written, what each of them sees.

A plan travels to every layer's attention as a keyword argument (see `engine.runner`). Two kinds:
`TreePlan` for a decode step (the same number of tokens for each sample: the root and its draft nodes) and
`PrefillPlan` for prompts of different lengths. Linears see the packed tokens; only attention unpacks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from engine.attention import MIN_ROWS, Attention
from engine.kv import KVPool, round_up

NEG_INF = float("-inf")


@runtime_checkable
class ForwardPlan(Protocol):
    """One forward's view of the pool."""

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "H M E"],
        k: Float[Tensor, "Hkv M E"],
        v: Float[Tensor, "Hkv M E"],
        *,
        scaling: float,
        softcap: float | None,
        sliding_window: int | None,
    ) -> Float[Tensor, "M H E"]:
        """Store the tokens' keys and values, return what they attend to."""
        ...


@dataclass(slots=True, kw_only=True)
class TreePlan:
    """`n` tree tokens for each of the samples in slots 0..B-1, behind `base` cached tokens each.

    The tree may grow level by level: its columns are `t = first + n`, of which `first` were written by earlier
    forwards and the last `n` are this forward's tokens. Each token sees its sample's first `base` tokens and the
    columns marked in `seen` (itself too). `depth` is each column's distance from the first `base` tokens.
    """

    pool: KVPool
    attention: Attention
    base: Int[Tensor, " B"]
    seen: Bool[Tensor, "B n t"]
    depth: Int[Tensor, "B t"]
    view_tokens: int
    "largest base + t"
    _rows: Tensor = field(init=False)
    _bias: dict[int | None, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        batch, n, columns = self.seen.shape
        device = self.base.device
        slots = torch.arange(batch, device=device)[:, None].expand(batch, n)
        positions = self.base[:, None] + torch.arange(columns - n, columns, device=device)
        self._rows = self.pool.row_index(slots.reshape(-1), positions.reshape(-1))
        self.view_tokens = min(round_up(self.view_tokens), self.pool.capacity)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        softcap: float | None,
        sliding_window: int | None,
    ) -> Tensor:
        """See `ForwardPlan.attend`; rows beyond B * n (padding) come back as zeros."""
        batch, n, _ = self.seen.shape
        real, total = batch * n, q.shape[1]
        shape = self.pool.shape
        group = shape.num_heads // shape.num_kv_heads
        self.pool.write(layer, self._rows, k[:, :real].transpose(0, 1), v[:, :real].transpose(0, 1))
        keys, values = self.pool.view(layer, slice(0, batch), self.view_tokens)
        packed = q[:, :real].reshape(shape.num_kv_heads, group, batch, n, -1).permute(2, 0, 1, 3, 4)
        packed = pad_rows(packed.reshape(batch, shape.num_kv_heads, group * n, -1).to(keys.dtype))
        out = self.attention(
            packed, keys, values, self._bias_for(sliding_window, group), scaling=scaling, softcap=softcap
        )
        out = out[:, :, : group * n].to(q.dtype)
        out = out.reshape(batch, shape.num_kv_heads, group, n, -1).permute(0, 3, 1, 2, 4)
        out = out.reshape(real, shape.num_heads, -1)
        return out if total == real else torch.cat([out, out.new_zeros(total - real, *out.shape[1:])])

    def _bias_for(self, window: int | None, group: int) -> Tensor:
        if window not in self._bias:
            self._bias[window] = self._build_bias(window, group)
        return self._bias[window]

    def _build_bias(self, window: int | None, group: int) -> Tensor:
        """Return [B, 1, R, C]: 0 where seen, -inf elsewhere; group-major rows, padding repeats row 0."""
        batch, n, columns = self.seen.shape
        offset = torch.arange(self.view_tokens, device=self.base.device) - self.base[:, None]
        inside = (offset >= 0) & (offset < columns)
        column = offset.clamp(0, columns - 1)
        index = column[:, None].expand(batch, n, -1)
        seen = torch.where(inside[:, None], self.seen.gather(2, index), (offset < 0)[:, None])
        if window is not None:
            column_depth = torch.where(offset < 0, offset, self.depth.gather(1, column))
            seen &= self.depth[:, columns - n :, None] - column_depth[:, None] < window
        rows = seen.repeat(1, group, 1)
        rows = torch.cat([rows, rows[:, :1].expand(-1, -rows.shape[1] % MIN_ROWS, -1)], dim=1)
        return torch.zeros(rows.shape, device=rows.device).masked_fill_(~rows, NEG_INF)[:, None]


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
    _bias: dict[tuple[int, int | None], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        device = self.pool.keys.device
        slots = torch.cat([torch.full((p.length,), p.slot) for p in self.pieces])
        positions = torch.cat([torch.arange(p.start, p.start + p.length) for p in self.pieces])
        self._rows = self.pool.row_index(slots.to(device), positions.to(device))

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        softcap: float | None,
        sliding_window: int | None,
    ) -> Tensor:
        """See `ForwardPlan.attend`; attention runs sample by sample, padding comes back as zeros."""
        shape = self.pool.shape
        group = shape.num_heads // shape.num_kv_heads
        real = sum(piece.length for piece in self.pieces)
        self.pool.write(layer, self._rows, k[:, :real].transpose(0, 1), v[:, :real].transpose(0, 1))
        out = q.new_zeros(q.shape[1], shape.num_heads, q.shape[2])
        first = 0
        for index, piece in enumerate(self.pieces):
            stop = first + piece.length
            view = min(round_up(piece.start + piece.length), self.pool.capacity)
            keys, values = self.pool.view(layer, slice(piece.slot, piece.slot + 1), view)
            packed = q[:, first:stop].reshape(1, shape.num_kv_heads, group * piece.length, -1)
            attended = self.attention(
                pad_rows(packed.to(keys.dtype)),
                keys,
                values,
                self._bias_for(index, view, group, sliding_window),
                scaling=scaling,
                softcap=softcap,
            )[0, :, : group * piece.length]
            attended = attended.reshape(shape.num_heads, piece.length, -1).transpose(0, 1)
            out[first:stop] = attended.to(q.dtype)
            first = stop
        return out

    def _bias_for(self, index: int, view: int, group: int, window: int | None) -> Tensor:
        if (index, window) not in self._bias:
            piece = self.pieces[index]
            device = self.pool.keys.device
            row = torch.arange(piece.start, piece.start + piece.length, device=device)[:, None]
            column = torch.arange(view, device=device)
            seen = column <= row
            if window is not None:
                seen &= row - column < window
            rows = seen.repeat(group, 1)
            rows = torch.cat([rows, rows[:1].expand(-rows.shape[0] % MIN_ROWS, -1)])
            bias = torch.zeros(rows.shape, device=device).masked_fill_(~rows, NEG_INF)
            self._bias[index, window] = bias[None, None]
        return self._bias[index, window]


def pad_rows(q: Float[Tensor, "B Hkv R E"]) -> Float[Tensor, "B Hkv P E"]:
    """Pad query rows to a multiple of MIN_ROWS: fewer take another kernel path with other rounding."""
    missing = -q.shape[2] % MIN_ROWS
    return q if missing == 0 else torch.nn.functional.pad(q, (0, 0, 0, missing))
