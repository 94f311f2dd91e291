"""Linear layers of the inference copy: weights laid out for products with few rows.

Three layouts, chosen by shape and type, so that instances on machines of one kind round alike:
- `StreamedLinear`: our own product (`engine.cpu.products`) in float32 on one CPU thread, of float32 or bfloat16
  weights. Every row rounds alike, alone or among many;
- `PrepackedLinear`: oneDNN's blocked layout, for other types and several threads; its call costs some 30 us more than
  a plain product, so that small matrices lose;
- `MatrixLinear`: the transposed matrix and a plain product, of MIN_ROWS rows at least: fewer round differently.
The operators behind the second are private to torch: where they are missing, the third serves.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from engine.cpu.products import PANEL, product_name
from engine.cpu.program import common_code
from engine.cpu.serving import serves_thread

PREPACKED_MIN_ELEMENTS = 1 << 19
MIN_ROWS = 4
PACKED_FOR_ROWS = 16
"The number of rows that the blocked layout is made for; 5 to 15% over none named (measured for 1 to 16 rows)."


@runtime_checkable
class Linear(Protocol):
    """x W^T + b."""

    def __call__(self, x: Float[Tensor, "M K"]) -> Float[Tensor, "M N"]:
        """Return the product."""
        ...

    def add_to(self, residual: Float[Tensor, "M N"], x: Float[Tensor, "M K"]) -> Float[Tensor, "M N"]:
        """Return residual + product; the residual may be overwritten."""
        ...

    def holds(self, weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None) -> bool:
        """Whether what it reads, unpacked, is bit for bit that weight and bias, and zeros where it is padded."""
        ...


class MatrixLinear:
    """A plain matrix product."""

    def __init__(self, weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None) -> None:
        self._matrix = weight.t().contiguous()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        rows = x.shape[0]
        if rows < MIN_ROWS:
            return self(_with_rows(x, MIN_ROWS))[:rows]
        if self._bias is None:
            return torch.mm(x, self._matrix)
        return torch.addmm(self._bias, x, self._matrix)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear`."""
        rows = x.shape[0]
        if rows < MIN_ROWS:
            return self.add_to(_with_rows(residual, MIN_ROWS), _with_rows(x, MIN_ROWS))[:rows]
        residual.addmm_(x, self._matrix)
        return residual if self._bias is None else residual.add_(self._bias)

    def holds(self, weight: Tensor, bias: Tensor | None) -> bool:
        """See `Linear`."""
        return same_bits(self._matrix.t(), weight) and same_bits(self._bias, bias)


class StreamedLinear:
    """Our own product: the weights are read once, front to back, for up to a few dozen rows.

    bfloat16 weights stay so and are widened as they are loaded; x and the result are float32.
    """

    def __init__(self, weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None) -> None:
        self.columns, self.depth = weight.shape
        padded = F.pad(weight, (0, 0, 0, -self.columns % PANEL))
        self._panels = padded.view(-1, PANEL, self.depth).transpose(1, 2).contiguous()
        self.num_panels = self._panels.shape[0]
        self.bias = None if bias is None else F.pad(bias.float(), (0, -self.columns % PANEL))
        self._code = common_code()

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`. The result is a view where N is no multiple of PANEL."""
        return self._run(x, self.bias, 0)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear`."""
        if self.columns % PANEL or residual.stride(-1) != 1 or self.bias is not None:
            return residual.add_(self(x))
        return self._run(x, residual, residual.stride(0))

    def holds(self, weight: Tensor, bias: Tensor | None) -> bool:
        """See `Linear`."""
        whole = self.columns // PANEL
        panels = self._panels.transpose(1, 2)
        last = panels[whole:].reshape(-1, self.depth)
        return (
            same_bits(panels[:whole], weight[: whole * PANEL].reshape(whole, PANEL, self.depth))
            and same_bits(last, _padded(weight[whole * PANEL :], len(last)))
            and same_bits(self.bias, None if bias is None else _padded(bias, self.num_panels * PANEL))
        )

    def operation(self, *, added: bool) -> str:
        """The name of the operation of a program that multiplies by this weight."""
        return product_name(added=added, bfloat16=self._panels.dtype == torch.bfloat16)

    @property
    def address(self) -> int:
        """Of the weights, as the operation takes them."""
        return self._panels.data_ptr()

    def _run(self, x: Tensor, added: Tensor | None, added_stride: int) -> Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        out = x.new_empty(rows, self.num_panels * PANEL)
        if rows:
            self._code.operations[self.operation(added=added is not None)](
                out.data_ptr(),
                x.data_ptr(),
                self.address,
                None if added is None else added.data_ptr(),
                rows,
                self.depth,
                self.num_panels,
                self.num_panels * PANEL,
                x.stride(0),
                added_stride,
            )
        return out if out.shape[1] == self.columns else out[:, : self.columns]


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

    def holds(self, weight: Tensor, bias: Tensor | None) -> bool:
        """See `Linear`."""
        return same_bits(self._packed.to_dense(), weight) and same_bits(self._bias, bias)


def _with_rows(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, rows - x.shape[0]))


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def same_bits(copy: Tensor | None, of: Tensor | None) -> bool:
    """Whether a copy holds another tensor bit for bit, in the copy's type: 0.0 is not -0.0, and a NaN is itself."""
    if copy is None or of is None:
        return copy is of
    of = of.to(copy.dtype)
    if copy.is_complex():
        copy, of = torch.view_as_real(copy), torch.view_as_real(of)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[copy.element_size()]
    return torch.equal(copy.view(bits), of.view(bits))


def make_linear(
    weight: Float[Tensor, "N K"],
    bias: Tensor | None = None,
    *,
    prepack: bool,
    dtype: torch.dtype | None = None,
) -> Linear:
    """Lay a weight out for products in `dtype` (its own by default); `prepack` allows other layouts than a matrix."""
    dtype = dtype or weight.dtype
    if prepack and weight.device.type == "cpu":
        if streams(dtype, weight.device):
            return StreamedLinear(weight, bias)
        if weight.numel() >= PREPACKED_MIN_ELEMENTS and can_prepack():
            return PrepackedLinear(weight.to(dtype), None if bias is None else bias.to(dtype))
    return MatrixLinear(weight.to(dtype), None if bias is None else bias.to(dtype))


def streams(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products in `dtype` on a device are our own."""
    return dtype == torch.float32 and serves_thread(device)


def can_prepack() -> bool:
    """Whether this torch has oneDNN and its private operators."""
    try:
        operators = (torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise.binary)
    except AttributeError:
        return False
    return torch.backends.mkldnn.is_available() and all(operators)


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type to compute in: on a CPU, bfloat16 weights run in float32 where that is faster; it is more exact.

    Our own products widen them as they are read: 1.1 to 2 times as fast as library products even where there are
    bfloat16 instructions (measured, batches of 1 to 32). Where there are none, library products emulate bfloat16,
    several times slower than float32.
    """
    if device.type != "cpu" or dtype != torch.bfloat16:
        return dtype
    return torch.float32 if serves_thread(device) or not _has_bfloat16() else dtype


def _has_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
