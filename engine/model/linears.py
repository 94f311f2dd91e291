"""Linear layers of the inference copy: weights laid out for products with few rows.

Layouts are chosen by shape and type (`engine.model.compute_backend`), so that instances on machines of one kind round
alike. `engine.cpu.streamed_linear` is a third one, for one CPU thread:
- `PrepackedLinear`: oneDNN's blocked layout, for other types and several threads; its call costs some 30 us more than
  a plain product, so that small matrices lose;
- `MatrixLinear`: the transposed matrix and a plain product, of MIN_ROWS rows at least: fewer round differently.
The operators behind the first are private to torch: where they are missing, the second serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from ..parts import Ranks

Same = bool | Tensor
"Whether bits are the same; of a GPU's as a tensor, bool [], that nobody has waited for."
Published = Mapping[str, Tensor]
"Weights by their published names."
Part = tuple[slice, ...]
"Rows, or rows and columns, of a published tensor that this rank takes; () is all of it."
MIN_ROWS = 4
ROW_BLOCK = 4096
"Rows of a weight that are made at once: a few MB, which stay in the processor's cache."
PACKED_FOR_ROWS = 16
"The number of rows that the blocked layout is made for; 5 to 15% over none named (measured for 1 to 16 rows)."


@dataclass(frozen=True, slots=True)
class Rows:
    """A weight [N, K] as it is published: rows of some tensors in another order, times a gain. Nothing is copied."""

    parts: tuple[Float[Tensor, "_ K"], ...]
    order: Int[Tensor, " N"] | None = None
    "of all parts' rows; None: the first part's as they stand"
    gain: Float[Tensor, " K"] | None = None

    def blocks(self) -> Iterator[tuple[int, Float[Tensor, "n K"]]]:
        """Make the rows, each block with the number of its first: a vocabulary's matrix is never there twice."""
        if self.order is not None:
            yield 0, self._gained(torch.cat(self.parts).index_select(0, self.order))
            return
        for start in range(0, len(self.parts[0]), ROW_BLOCK):
            yield start, self._gained(self.parts[0][start : start + ROW_BLOCK])

    def dense(self) -> Float[Tensor, "N K"]:
        """Make all rows."""
        blocks = [block for _, block in self.blocks()]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def _gained(self, rows: Tensor) -> Tensor:
        return rows if self.gain is None else rows * self.gain


@runtime_checkable
class Linear(Protocol):
    """x W^T + b."""

    def __call__(self, x: Float[Tensor, "M K"]) -> Float[Tensor, "M N"]:
        """Return the product."""
        ...

    def add_to(self, residual: Float[Tensor, "M N"], x: Float[Tensor, "M K"]) -> Float[Tensor, "M N"]:
        """Return residual + product; the residual may be overwritten."""
        ...

    def take(self, rows: Rows, bias: Float[Tensor, " N"] | None) -> None:
        """Hold another weight and bias of the same shape, in the same memory where the layout is this module's own."""
        ...

    def holds(self, rows: Rows, bias: Float[Tensor, " N"] | None) -> Same:
        """Whether what it reads, unpacked, is bit for bit that weight and bias, and zeros where it is padded."""
        ...

    def unpacked(self) -> tuple[Float[Tensor, "N K"], Float[Tensor, " N"] | None]:
        """Return weight and bias as they were taken."""
        ...


LayOut = Callable[[Tensor, Tensor | None], Linear]
"Weight [N, K] and bias [N] to what multiplies by them."


class ReducedLinear:
    """A product over this rank's columns of a weight, whose results are added up over the ranks of its group."""

    def __init__(self, linear: Linear, ranks: Ranks, *, counts: bool = True) -> None:
        """`counts`: whether this rank has columns; else its results are left out."""
        self.linear, self.ranks, self.counts = linear, ranks, counts

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        whole = self.part(x)
        whole.zero_()
        return self.add_to(whole, x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear`."""
        self.ranks.add_up(residual, self.part(x))
        return residual

    def part(self, x: Tensor) -> Tensor:
        """This rank's part."""
        found = self.linear(x)
        # what adds nothing, to a zero of either sign
        return found if self.counts else found.fill_(-0.0)

    def take(self, rows: Rows, bias: Tensor | None) -> None:
        """See `Linear`."""
        self.linear.take(rows, bias)

    def holds(self, rows: Rows, bias: Tensor | None) -> Same:
        """See `Linear`."""
        return self.linear.holds(rows, bias)

    def unpacked(self) -> tuple[Tensor, Tensor | None]:
        """See `Linear`."""
        return self.linear.unpacked()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer's weights, laid out (`engine.model.llama_model`)."""

    attention_gain: Tensor | None
    "None: multiplied into the weights behind it"
    qkv: Linear
    head_gain: Tensor | None
    "[queries + 1, E]: Qwen3's norms of queries and key"
    out: Linear
    mlp_gain: Tensor | None
    gate_up: Linear
    down: Linear
    sliding_window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder's layers and head, laid out, with its sizes: what a whole forward is made of."""

    layers: list[Layer]
    final_gain: Tensor | None
    "of the last norm; None: multiplied into the head"
    head: Linear
    heads: int
    "KV heads"
    queries: int
    "that share one"
    size: int
    "of a head"
    eps: float
    "of the norms"


class MatrixLinear:
    """A plain matrix product, of so many rows at least."""

    def __init__(
        self, weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None, *, min_rows: int = MIN_ROWS
    ) -> None:
        self._matrix = weight.t().contiguous()
        self._bias = bias
        self._min_rows = min_rows

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        rows = x.shape[0]
        if rows < self._min_rows:
            return self(with_rows(x, self._min_rows))[:rows]
        if self._bias is None:
            return torch.mm(x, self._matrix)
        return torch.addmm(self._bias, x, self._matrix)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear`."""
        rows = x.shape[0]
        if rows < self._min_rows:
            return self.add_to(with_rows(residual, self._min_rows), with_rows(x, self._min_rows))[:rows]
        residual.addmm_(x, self._matrix)
        return residual if self._bias is None else residual.add_(self._bias)

    def take(self, rows: Rows, bias: Tensor | None) -> None:
        """See `Linear`."""
        for start, block in rows.blocks():
            self._matrix[:, start : start + len(block)].copy_(block.t())
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)

    def holds(self, rows: Rows, bias: Tensor | None) -> Same:
        """See `Linear`."""
        blocks = [
            same_bits(self._matrix[:, start : start + len(block)].t(), block)
            for start, block in rows.blocks()
        ]
        return together(*blocks, same_bits(self._bias, bias))

    def unpacked(self) -> tuple[Tensor, Tensor | None]:
        """See `Linear`; the weight is a view."""
        return self._matrix.t(), self._bias


class PrepackedLinear:
    """oneDNN's product over a weight in its own layout."""

    def __init__(self, weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear`."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self._bias, "add")

    def take(self, rows: Rows, bias: Tensor | None) -> None:
        """See `Linear`; oneDNN's layout is made anew."""
        weight = rows.dense().to(self._packed.dtype).contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)

    def holds(self, rows: Rows, bias: Tensor | None) -> Same:
        """See `Linear`."""
        return together(same_bits(self._packed.to_dense(), rows.dense()), same_bits(self._bias, bias))

    def unpacked(self) -> tuple[Tensor, Tensor | None]:
        """See `Linear`."""
        return self._packed.to_dense(), self._bias


def with_rows(x: Tensor, rows: int) -> Tensor:
    """Return x [n, ...] with zeros behind it, [rows, ...]."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows - x.shape[0]))


def by_head(query: Tensor, key: Tensor, value: Tensor, kv_heads: int, size: int) -> Tensor:
    """Join rows [H * E, ...] of queries, keys and values KV head by KV head, rotary pairs made neighbours."""
    lead, tail = (kv_heads, -1, size), query.shape[1:]
    queries = pairs_together(query.view(*lead, *tail), dim=2)
    keys = pairs_together(key.view(*lead, *tail), dim=2)
    return torch.cat([queries, keys, value.view(*lead, *tail)], dim=1).reshape(-1, *tail)


def pairs_together(x: Tensor, *, dim: int) -> Tensor:
    """Reorder an axis of E from (0, 1, .., E-1) to (0, E/2, 1, E/2 + 1, ..)."""
    half = x.shape[dim] // 2
    order = torch.arange(2 * half, device=x.device).view(2, half).t().reshape(-1)
    return x.index_select(dim, order)


def same_bits(copy: Tensor | None, of: Tensor | None) -> Same:
    """Whether a copy holds another tensor bit for bit, in the copy's type: 0.0 is not -0.0, and a NaN is itself."""
    if copy is None or of is None:
        return copy is of
    if copy.shape != of.shape:
        return False
    of = of.to(copy.dtype)
    if copy.data_ptr() == of.data_ptr() and copy.stride() == of.stride() and copy.device == of.device:
        return True
    if copy.is_complex():
        copy, of = torch.view_as_real(copy), torch.view_as_real(of)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[copy.element_size()]
    if copy.device.type == "cpu":
        return torch.equal(copy.view(bits), of.view(bits))
    return (copy.view(bits) == of.view(bits)).all()


def together(*same: Same) -> Same:
    """Whether all hold, still without a wait for a device."""
    if any(one is False for one in same):
        return False
    later = [one for one in same if isinstance(one, Tensor)]
    return torch.stack(later).all() if later else True


@dataclass(frozen=True, slots=True)
class HeldVector:
    """A tensor that is held as such, and the published ones that it is made of."""

    what: str
    names: Mapping[str, Part]
    into: Tensor
    made: Callable[[Published], Tensor]

    def take(self, got: Published) -> None:
        """Lay it out."""
        self.into.copy_(self.made(got))

    def holds(self, got: Published) -> Same:
        """Whether it is, bit for bit, what is made of these."""
        return same_bits(self.into, self.made(got))


@dataclass(frozen=True, slots=True)
class HeldProduct:
    """A product, and the published weights and biases that it is made of."""

    what: str
    names: Mapping[str, Part]
    into: Linear
    made: Callable[[Published], tuple[Rows, Tensor | None]]

    def take(self, got: Published) -> None:
        """Lay it out."""
        self.into.take(*self.made(got))

    def holds(self, got: Published) -> Same:
        """Whether it is, bit for bit, what is made of these."""
        return self.into.holds(*self.made(got))


def first_altered(copies: Iterable[tuple[str, Same]]) -> str | None:
    """Name of a copy that does not hold; None: all do. Waits for a device once."""
    later: list[tuple[str, Tensor]] = []
    for name, same in copies:
        if isinstance(same, Tensor):
            later.append((name, same))
        elif not same:
            return name
    hold = torch.stack([same for _, same in later]).tolist() if later else []
    return next((name for (name, _), good in zip(later, hold, strict=True) if not good), None)


def can_prepack() -> bool:
    """Whether this torch has oneDNN and its private operators."""
    try:
        operators = (torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise.binary)
    except AttributeError:
        return False
    return torch.backends.mkldnn.is_available() and all(operators)


def has_avx512() -> bool:
    """Whether this processor has AVX-512 and ATEN_CPU_CAPABILITY, torch's own variable, does not forbid it."""
    return torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "NO AVX", "AVX2")


def has_bfloat16() -> bool:
    """Whether this processor has instructions for bfloat16 products."""
    return has_avx512() and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
