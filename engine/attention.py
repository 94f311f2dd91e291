"""Attention over the KV pool: `ordered` (bitwise invariant), `sdpa` (fast), `reference` (the oracle).

All take queries packed by KV head, so KV heads are never repeated:
    q [B, Hkv, R, E] with R = group * n rows, keys [B, Hkv, C, E], values [B, Hkv, C, E + VALUE_PAD]
and an additive bias [B, 1, R, C] that holds 0 or -inf.

**Ordered attention.** A token's output must not depend on its neighbours: not on decoy nodes stored between its
ancestors, not on the view length C, not on the number of rows. Library kernels break this in two ways, both
measured on CPU: a row's sum of weights runs in vector lanes, so that a decoy shifts the lanes; and a matrix
product splits its inner dimension by a rule that depends on its length (192 < C < 384). Here
- every reduction over positions runs in chunks of CHUNK positions, in order, one matrix product each;
- the sum of weights is a column of ones in the values, so it is summed as the values are, in order of position,
  and masked positions add exact zeros;
- weights are powers of two of the scaled scores: `exp2` has no slow path at -inf.
What is left to respect is that a node and its canonical (dense) position lie in one chunk: `engine.tree`
drops the few nodes that do not. The start-up probe (`engine.probe`) proves the result for the machine at hand.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

CHUNK = 128
VALUE_PAD = 8
MIN_ROWS = 4
LOG2_E = math.log2(math.e)


@runtime_checkable
class Attention(Protocol):
    """One attention back end."""

    def __call__(
        self,
        q: Float[Tensor, "B Hkv R E"],
        keys: Float[Tensor, "B Hkv C E"],
        values: Float[Tensor, "B Hkv C EV"],
        bias: Float[Tensor, "B 1 R C"],
        *,
        scaling: float,
        softcap: float | None,
    ) -> Float[Tensor, "B Hkv R E"]:
        """Attend. `softcap` bounds scores by cap * tanh(score / cap)."""
        ...


def ordered_attention(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, *, scaling: float, softcap: float | None
) -> Tensor:
    """Attend with reductions in order of position: bitwise the same alone, in a batch, in a tree."""
    batch, heads, rows, size = q.shape
    view = keys.shape[2]
    merged = batch * heads
    if softcap is None:
        q = q * (scaling * LOG2_E)
    scores = torch.bmm(q.reshape(merged, rows, size), _merge(keys).transpose(1, 2))
    if softcap is not None:
        scores = scores.mul_(scaling / softcap).tanh_().mul_(softcap * LOG2_E)
    scores.view(batch, heads, rows, view).add_(bias)
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp2_()
    values = _merge(values)
    out = torch.bmm(weights[:, :, :CHUNK], values[:, :CHUNK])
    for start in range(CHUNK, view, CHUNK):
        out.baddbmm_(weights[:, :, start : start + CHUNK], values[:, start : start + CHUNK])
    return (out[..., :size] / out[..., size : size + 1]).view(batch, heads, rows, size)


def sdpa_attention(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, *, scaling: float, softcap: float | None
) -> Tensor:
    """Attend with torch's scaled_dot_product_attention; equal to `ordered` up to rounding."""
    if softcap is not None:
        return reference_attention(q, keys, values, bias, scaling=scaling, softcap=softcap)
    return F.scaled_dot_product_attention(
        q, keys, values[..., : q.shape[-1]], attn_mask=bias.to(q.dtype), scale=scaling
    )


def reference_attention(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, *, scaling: float, softcap: float | None
) -> Tensor:
    """Attend as the formula reads, in float64: the oracle of the others."""
    scores = torch.matmul(q.double(), keys.double().transpose(-1, -2)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores + bias, dim=-1)
    return torch.matmul(weights, values[..., : q.shape[-1]].double()).to(q.dtype)


ATTENTION: dict[str, Attention] = {
    "ordered": ordered_attention,
    "sdpa": sdpa_attention,
    "reference": reference_attention,
}


def _merge(x: Tensor) -> Tensor:
    """[B, H, C, E] -> [B * H, C, E] without a copy: slots and heads lie behind one another in the pool."""
    return x.flatten(0, 1)
