"""A linear layer over our own product (`engine.cpu.products`): every row rounds alike, alone or among many."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..model.linears import Rows, same_bits, with_rows
from .products import PANEL, product_name
from .program import common_code
from .weight_panels import DIFFER_BYTES, panels_name


class StreamedLinear:
    """Our own product: the weights are read once, front to back, for up to a few dozen rows.

    bfloat16 weights stay so and are widened as they are loaded; x and the result are float32.
    """

    def __init__(
        self,
        weight: Float[Tensor, "N K"],
        bias: Float[Tensor, " N"] | None,
        ends: tuple[int, ...] | None = None,
    ) -> None:
        """`ends`: of the parts of K that are added up by themselves (`engine.parts`); one by default."""
        self.columns, self.depth = weight.shape
        rows = self.columns + -self.columns % PANEL
        self.num_panels = rows // PANEL
        self._panels = weight.new_empty(self.num_panels, self.depth, PANEL)
        self.bias = None if bias is None else with_rows(bias.float(), rows)
        self.ends = np.array(ends or [self.depth], dtype=np.int64)
        self._code = common_code()
        # one number for all stands for weights that are still to come: nothing is written before them
        if any(weight.stride()):
            self._over_panels(Rows((weight,)), compares=False)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`. The result is a view where N is no multiple of PANEL."""
        return self._run(x, self.bias, 0)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear`."""
        if self.columns % PANEL or residual.stride(-1) != 1 or self.bias is not None:
            return residual.add_(self(x))
        return self._run(x, residual, residual.stride(0))

    def take(self, rows: Rows, bias: Tensor | None) -> None:
        """See `Linear`."""
        self._over_panels(rows, compares=False)
        if self.bias is not None and bias is not None:
            self.bias[: self.columns].copy_(bias)

    def holds(self, rows: Rows, bias: Tensor | None) -> bool:
        """See `Linear`."""
        padded = None if bias is None else with_rows(bias.float(), self.num_panels * PANEL)
        return not self._over_panels(rows, compares=True) and bool(same_bits(self.bias, padded))

    @property
    def tensors(self) -> list[Tensor]:
        """All that is written when weights are taken (`LlamaModel.share`)."""
        return [self._panels] if self.bias is None else [self._panels, self.bias]

    def unpacked(self) -> tuple[Tensor, Tensor | None]:
        """See `Linear`."""
        weight = self._panels.transpose(1, 2).reshape(-1, self.depth)[: self.columns]
        return weight, None if self.bias is None else self.bias[: self.columns]

    def _over_panels(self, rows: Rows, *, compares: bool) -> bool:
        """Write the rows into the panels, or say whether any bit there differs from them."""
        dtype = self._panels.dtype
        parts = [part.to(dtype).contiguous() for part in rows.parts]
        zeros, differ = torch.zeros(self.depth, dtype=dtype), np.zeros(DIFFER_BYTES, np.uint8)
        size = self.depth * dtype.itemsize
        if any(part.shape[1] != self.depth for part in parts):
            raise ValueError(f"expected rows of {self.depth}, got {[tuple(part.shape) for part in parts]}")
        places = np.concatenate([part.data_ptr() + size * np.arange(len(part)) for part in parts])
        places = places if rows.order is None else places[rows.order.numpy()]
        padding = np.full(self.num_panels * PANEL - self.columns, zeros.data_ptr(), dtype=np.int64)
        addresses = np.concatenate([places, padding])
        if len(places) != self.columns:
            raise ValueError(f"expected {self.columns} rows, got {len(places)}")
        gain = None if rows.gain is None else rows.gain.to(dtype).contiguous()
        name = panels_name(compares=compares, gained=gain is not None, bfloat16=dtype == torch.bfloat16)
        self._code.operations[name](
            panels=self.address,
            rows=addresses.ctypes.data,
            gains=0 if gain is None else gain.data_ptr(),
            differ=differ.ctypes.data,
            num=self.num_panels,
            depth=self.depth,
        )
        return bool(differ.any())

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
                out=out.data_ptr(),
                x=x.data_ptr(),
                weights=self.address,
                added=0 if added is None else added.data_ptr(),
                ends=self.ends.ctypes.data,
                parts=len(self.ends),
                rows=rows,
                depth=self.depth,
                panels=self.num_panels,
                out_stride=self.num_panels * PANEL,
                x_stride=x.stride(0),
                added_stride=added_stride,
            )
        return out if out.shape[1] == self.columns else out[:, : self.columns]
