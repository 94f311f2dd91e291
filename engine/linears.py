"""Linear layers of the inference copy: weights laid out for products with few rows.

Three layouts, chosen by shape and type, so that instances on machines of one kind round alike:
- `StreamedLinear`: our own product (`engine.product_code`) for float32 on one CPU thread. Every row rounds alike,
  alone or among many;
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

from engine.machine_code import can_make_code
from engine.product_code import PANEL, Product, product_code

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


class StreamedLinear:
    """Our own product: the weights are read once, front to back, for up to a few dozen rows."""

    def __init__(self, weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None) -> None:
        self._columns, self._depth = weight.shape
        padded = F.pad(weight, (0, 0, 0, -self._columns % PANEL))
        self._panels = padded.view(-1, PANEL, self._depth).transpose(1, 2).contiguous()
        self._address = self._panels.data_ptr()
        self._bias = None if bias is None else F.pad(bias, (0, -self._columns % PANEL))
        self._code = product_code()

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`. The result is a view where N is no multiple of PANEL."""
        if self._bias is None:
            return self._run(self._code.product, x, None, 0)
        return self._run(self._code.product_added, x, self._bias, 0)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear`."""
        if self._columns % PANEL or residual.stride(-1) != 1 or self._bias is not None:
            return residual.add_(self(x))
        return self._run(self._code.product_added, x, residual, residual.stride(0))

    def _run(self, product: Product, x: Tensor, added: Tensor | None, added_stride: int) -> Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        rows, panels = x.shape[0], self._panels.shape[0]
        out = x.new_empty(rows, panels * PANEL)
        if rows:
            product(
                out.data_ptr(),
                x.data_ptr(),
                self._address,
                None if added is None else added.data_ptr(),
                rows,
                self._depth,
                panels,
                panels * PANEL,
                x.stride(0),
                added_stride,
            )
        return out if out.shape[1] == self._columns else out[:, : self._columns]


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


def _with_rows(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, rows - x.shape[0]))


def make_linear(weight: Float[Tensor, "N K"], bias: Tensor | None = None, *, prepack: bool) -> Linear:
    """Lay a weight out; `prepack` allows layouts other than a plain matrix."""
    if prepack and weight.device.type == "cpu":
        if weight.dtype == torch.float32 and torch.get_num_threads() == 1 and can_make_code():
            return StreamedLinear(weight, bias)
        if weight.numel() >= PREPACKED_MIN_ELEMENTS and can_prepack():
            return PrepackedLinear(weight, bias)
    return MatrixLinear(weight, bias)


def can_prepack() -> bool:
    """Whether this torch has oneDNN and its private operators."""
    try:
        operators = (torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise.binary)
    except AttributeError:
        return False
    return torch.backends.mkldnn.is_available() and all(operators)


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type to compute in: bfloat16 weights run in float32 on a CPU without bfloat16 instructions.

    There bfloat16 products are emulated and several times slower than float32 (measured), and less exact.
    """
    if device.type == "cpu" and dtype == torch.bfloat16 and not _has_bfloat16():
        return torch.float32
    return dtype


def _has_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
