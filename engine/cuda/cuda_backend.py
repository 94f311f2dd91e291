"""The compute back end of a GPU: products by the library, what lies between them by kernels of our own."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cuda.row_operators import FusedRows
from engine.model.compute_backend import ComputeBackend
from engine.model.linears import Linear, same_bits, taken


class CudaBackend(ComputeBackend):
    """Fused rows between products that take as many rows as there are: for numerics that promise no more."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.rows = FusedRows()

    def linear(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """See `ComputeBackend.linear`."""
        return StoredLinear(weight.to(dtype), None if bias is None else bias.to(dtype))


class StoredLinear:
    """A product by a weight as the module stores it: no copy where the types agree, no padded rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        if self._bias is None:
            return torch.mm(x, self._weight.t())
        return torch.addmm(self._bias, x, self._weight.t())

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear`."""
        residual.addmm_(x, self._weight.t())
        return residual if self._bias is None else residual.add_(self._bias)

    def take(self, weight: Tensor, bias: Tensor | None) -> None:
        """See `Linear`."""
        self.take_rows(0, weight)
        self._bias = taken(self._bias, bias)

    def take_rows(self, start: int, rows: Tensor) -> None:
        """See `ByRows`."""
        taken(self._weight[start : start + len(rows)], rows)

    def holds_rows(self, start: int, rows: Tensor) -> bool:
        """See `ByRows`."""
        return same_bits(self._weight[start : start + len(rows)], rows)

    def holds(self, weight: Tensor, bias: Tensor | None) -> bool:
        """See `Linear`."""
        return same_bits(self._weight, weight) and same_bits(self._bias, bias)
