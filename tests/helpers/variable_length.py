"""Torch's variable-length attention by its docstring: the CPU has no kernel for it."""

import math
from itertools import pairwise

import torch
from torch import Tensor


def as_documented(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """(-1, 0): causal; (W, 0): causal, W tokens back."""
    groups = query.shape[1] // key.shape[1]
    assert groups == 1 or enable_gqa
    key, value = (part.repeat_interleave(groups, dim=1).float() for part in (key, value))
    bounds, outs = list(pairwise(cu_seq_q.tolist())), []
    seen_bounds = list(pairwise(cu_seq_k.tolist()))
    assert max(end - begin for begin, end in bounds) == max_q
    assert max(end - begin for begin, end in seen_bounds) == max_k
    for (begin, end), (first, last) in zip(bounds, seen_bounds, strict=True):
        scores = torch.einsum("qhe,khe->hqk", query[begin:end].float(), key[first:last])
        scores = scores * (1 / math.sqrt(query.shape[2]) if scale is None else scale)
        # the last query stands at the last key
        back = torch.arange(last - first - (end - begin), last - first)[:, None] - torch.arange(last - first)
        seen = (back >= 0) & ((back <= window_size[0]) | (window_size[0] < 0))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khe->qhe", weights, value[first:last]))
    return torch.cat(outs).to(query.dtype)
