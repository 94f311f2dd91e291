"""A linear layer over our own product (`engine.cpu.products`): every row rounds alike, alone or among many."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rlhfspec.engine.cpu.products import PANEL, product_name
from rlhfspec.engine.cpu.program import common_code
from rlhfspec.engine.model.linears import same_bits, with_rows


class StreamedLinear:
    """Our own product: the weights are read once, front to back, for up to a few dozen rows.

    bfloat16 weights stay so and are widened as they are loaded; x and the result are float32.
    """

    def __init__(self, weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None) -> None:
        self.columns, self.depth = weight.shape
        rows = self.columns + -self.columns % PANEL
        self._panels = with_rows(weight, rows).view(-1, PANEL, self.depth).transpose(1, 2).contiguous()
        self.num_panels = self._panels.shape[0]
        self.bias = None if bias is None else with_rows(bias.float(), rows)
        self._code = common_code()

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`. The result is a view where N is no multiple of PANEL."""
        return self._run(x, self.bias, 0)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear`."""
        if self.columns % PANEL or residual.stride(-1) != 1 or self.bias is not None:
            return residual.add_(self(x))
        return self._run(x, residual, residual.stride(0))

    def take(self, weight: Tensor, bias: Tensor | None) -> None:
        """See `Linear`."""
        self.take_rows(0, weight)
        if self.bias is not None and bias is not None:
            self.bias[: self.columns].copy_(bias)

    def holds(self, weight: Tensor, bias: Tensor | None) -> bool:
        """See `Linear`."""
        padded = None if bias is None else with_rows(bias.float(), self.num_panels * PANEL)
        return self.holds_rows(0, weight) and bool(same_bits(self.bias, padded))

    def take_rows(self, start: int, rows: Tensor) -> None:
        """See `ByRows`."""
        whole, panels = self._panels_at(start, rows)
        panels[: len(whole)].copy_(whole)
        if len(last := rows[len(whole) * PANEL :]):
            panels[len(whole)].copy_(with_rows(last, PANEL))

    def holds_rows(self, start: int, rows: Tensor) -> bool:
        """See `ByRows`."""
        whole, panels = self._panels_at(start, rows)
        last = rows[len(whole) * PANEL :]
        good = same_bits(panels[: len(whole)], whole)
        return bool(good) and (not len(last) or bool(same_bits(panels[len(whole)], with_rows(last, PANEL))))

    def _panels_at(self, start: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows in whole panels [p, PANEL, K], and the panels from theirs on, turned as the rows are."""
        whole, first = len(rows) // PANEL, start // PANEL
        return rows[: whole * PANEL].reshape(whole, PANEL, self.depth), self._panels[first:].transpose(1, 2)

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
                rows=rows,
                depth=self.depth,
                panels=self.num_panels,
                out_stride=self.num_panels * PANEL,
                x_stride=x.stride(0),
                added_stride=added_stride,
            )
        return out if out.shape[1] == self.columns else out[:, : self.columns]
