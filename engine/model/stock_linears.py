"""A stock module that multiplies by the compute back end's products: a copy that shares all but the linears' weights.

Library products round by the number of rows: on AVX2 below 4 of them, on AVX-512 below 16, or by no rule at all (all
measured). Those of `engine.cpu.products` do not, and are faster with few rows. The module given stays as it is.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhfspec.engine.model.linears import LayOut, Rows

_READ = (torch.float32, torch.bfloat16)
"Types of weights that products read."


class OwnProduct(nn.Module):
    """In the place of a linear or of a GPT-2 `Conv1D`, which is a linear with its weight transposed."""

    def __init__(self, linear: nn.Linear | Conv1D, lay_out: LayOut) -> None:
        super().__init__()
        # a submodule would be copied and moved with the others
        self._of: tuple[Any] = (linear,)
        self._lay_out = lay_out
        self._product = lay_out(*self._present())

    def lay_out(self) -> None:
        """Copy the linear's present weight for products."""
        weight, bias = self._present()
        self._product.take(Rows((weight,)), bias)

    def is_current(self) -> bool:
        """Whether the copy is the linear's present weight and bias, bit for bit."""
        weight, bias = self._present()
        return bool(self._product.holds(Rows((weight,)), bias))

    @property
    def weight(self) -> Tensor:
        """Of the linear: some models ask for its type or device."""
        return self._of[0].weight

    @property
    def bias(self) -> Tensor | None:
        """Of the linear."""
        return self._of[0].bias

    def _present(self) -> tuple[Tensor, Tensor | None]:
        linear = self._of[0]
        weight = linear.weight.t() if isinstance(linear, Conv1D) else linear.weight
        weight = weight.detach()
        return weight if weight.dtype in _READ else weight.float(), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b in x's type; the sum is float32."""
        out = self._product(x.reshape(-1, x.shape[-1]).float())
        return out.reshape(*x.shape[:-1], out.shape[-1]).to(x.dtype)


def with_own_products(model: PreTrainedModel, lay_out: LayOut) -> PreTrainedModel:
    """Return the copy; parameters and buffers are the model's own."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    linears = {
        id(module): OwnProduct(module, lay_out)  # type: ignore[arg-type]
        for module in model.modules()
        if _is_linear(module)
    }
    return copy.deepcopy(model, shared | linears)


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward in (nn.Linear.forward, Conv1D.forward)
