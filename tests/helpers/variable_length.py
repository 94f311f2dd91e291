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
    assert max(end - begin for begin, end in bounds) == max_q == max_k
    for begin, end in bounds:
        scores = torch.einsum("qhe,khe->hqk", query[begin:end].float(), key[begin:end])
        scores = scores * (1 / math.sqrt(query.shape[2]) if scale is None else scale)
        back = torch.arange(end - begin)[:, None] - torch.arange(end - begin)[None]
        seen = (back >= 0) & ((back <= window_size[0]) | (window_size[0] < 0))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khe->qhe", weights, value[begin:end]))
    return torch.cat(outs).to(query.dtype)
