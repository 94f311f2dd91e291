"""Results of torch's attention in the layout that its CUDA kernels give them: heads behind rows in memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional as F


def heads_behind_rows(out: torch.Tensor) -> torch.Tensor:
    """Return [samples, heads, rows, size] laid out as [samples, rows, heads, size]; the same values."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


@contextmanager
def cuda_attention_layout() -> Iterator[None]:
    """In the block `scaled_dot_product_attention` gives on every device what it gives on CUDA, but for rounding."""
    of_torch = F.scaled_dot_product_attention

    @functools.wraps(of_torch)
    def attend(*args: Any, **settings: Any) -> torch.Tensor:
        out = of_torch(*args, **settings)
        return heads_behind_rows(out) if out.dim() == 4 else out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attend)
        yield
