"""Linear layers of the inference copy: weights laid out for products with few rows.

Two layouts, chosen by shape, so that instances on machines of one kind round alike:
- `PrepackedLinear`: oneDNN's blocked layout, 1.2 to 2 times as fast for 2 to 32 rows of a large matrix, and one
  row rounds as many do; its call costs some 30 us more than a plain product, so that small matrices lose;
- `MatrixLinear`: the transposed matrix and a plain product, of MIN_ROWS rows at least: fewer round differently.
All this is measured on CPU. The operators behind the first are private to torch: where they are missing, the
second serves.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

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
    """Lay a weight out; `prepack` allows the blocked layout where it pays."""
    large = weight.numel() >= PREPACKED_MIN_ELEMENTS
    if prepack and large and weight.device.type == "cpu" and can_prepack():
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
