"""The compute back end of a GPU: products by the library, what lies between them by kernels of our own."""

from __future__ import annotations

import torch
from torch import Tensor

from ..model.compute_backend import ComputeBackend, RowOperators
from ..model.linears import Linear, MatrixLinear, Rows, Same, same_bits, together
from . import row_operators  # noqa: F401 (defines them)


class CudaLinear(MatrixLinear):
    """Laid out and read back in a pass each; transposed: 2 to 7% faster than as stored (H100, 8B, 1 to 72 rows)."""

    def take(self, rows: Rows, bias: Tensor | None) -> None:
        """See `Linear`."""
        if not self._is_moved(rows):
            super().take(rows, bias)
            return
        torch.ops.rlhfspec.lay_rows(rows.parts, rows.order, self._matrix)
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)

    def holds(self, rows: Rows, bias: Tensor | None) -> Same:
        """See `Linear`."""
        if not self._is_moved(rows):
            return super().holds(rows, bias)
        held = torch.ops.rlhfspec.hold_rows(rows.parts, rows.order, self._matrix)
        return together(held, same_bits(self._bias, bias))

    def _is_moved(self, rows: Rows) -> bool:
        """Whether bits are only moved: nothing is multiplied, converted or brought here."""
        into = self._matrix
        alike = all((one.dtype, one.device) == (into.dtype, into.device) for one in rows.parts)
        # a row in one piece, wherever it lies
        return alike and rows.gain is None and all(one.stride(1) == 1 for one in rows.parts)


class CudaBackend(ComputeBackend):
    """Fused rows between products that take as many rows as there are: for numerics that promise no more."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.rows = RowOperators()

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        ends: tuple[int, ...] | None = None,
    ) -> Linear:
        """See `ComputeBackend.linear`."""
        return CudaLinear(weight.to(dtype), None if bias is None else bias.to(dtype), min_rows=1)
