"""Attention by xformers' memory-efficient kernel, for CUDA (docs/decisions/0003). Not run so far: no GPU at hand.

One call a layer: the queries that share a KV head are its rows, the bias says what each of them sees. Trees
need no shape of their own, and the call has fixed shapes, as recordings want.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...core.errors import ConfigError
from .backends import SHARE_BIAS, reference_attention

VERSION = "0.0.35"


def xformers_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    *,
    rows: int,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Attend with `xformers.ops.memory_efficient_attention`; equal to `ordered` up to rounding.

    See `engine.attention.Attention`. It has no softcap: such models take the reference.
    """
    if softcap is not None:
        return reference_attention(q, keys, values, bias, rows=rows, scaling=scaling, softcap=softcap)
    samples, heads = len(bias), len(q) // len(bias)
    seen = bias[:, None, :rows].expand(samples, heads, rows, keys.shape[1])
    # it wants [samples, rows, heads, E]
    q, keys, values = (x.unflatten(0, (samples, heads)).transpose(1, 2) for x in (q[:, :rows], keys, values))
    out = _operators().memory_efficient_attention(q, keys, values, attn_bias=seen, scale=scaling)
    return out.transpose(1, 2).flatten(0, 1)


SHARE_BIAS.add(xformers_attention)


def require_xformers(device: torch.device) -> None:
    """Raise ConfigError where the kernel cannot serve, naming what is missing."""
    if find_spec("xformers") is None:
        raise ConfigError(
            "engine.attention xformers: the package is not installed; "
            f"pip install xformers=={VERSION} beside a CUDA build of torch, or use auto or sdpa"
        )
    if device.type != "cuda":
        raise ConfigError(
            f"engine.attention xformers needs engine.device cuda, got {device.type} "
            f"(torch sees CUDA: {torch.cuda.is_available()}); use auto, ordered or sdpa"
        )
    cutlass: Any = import_module("xformers.ops.fmha.cutlass")
    if not cutlass.FwOp.is_available():
        raise ConfigError(
            f"engine.attention xformers: its kernel does not go with torch {torch.__version__}; "
            f"xformers {VERSION} is what this version was written for; use auto or sdpa"
        )


def _operators() -> Any:
    return import_module("xformers.ops")
