"""Attention over the KV pool: `ordered` (bitwise invariant), `sdpa` (fast), `reference` (the oracle).

All take one row of the batch dimension for each (sample, KV head), with the queries that share the head packed
behind one another, so KV heads are never repeated:
    q [N, R, E], keys [N, C, E], values [N, C, E], additive bias [N or 1, R or 1, C] of 0 and -inf;
    those in SHARE_BIAS also take one bias for all heads of a sample, [samples, R or 1, C].
Only the first `rows` of the R queries count; the others are padding (any finite values) and do not come back.

**Ordered attention.** A token's output must not depend on its neighbours: not on decoy nodes stored between its
ancestors, not on the view length C, not on the number of rows. On one CPU thread code of our own computes it so
(`engine.cpu.pool_attention`); elsewhere library products are arranged to. They break it in three ways, all measured on
CPU: a row's sum of weights runs in vector lanes, so that a decoy shifts the lanes; a matrix product splits its inner
dimension by a rule that depends on its length (192 < C < 384); and products of fewer than MIN_ROWS rows take another
path. So
- every reduction over positions runs in chunks of CHUNK positions, in order, one matrix product each;
- the sum of weights is a product with ones, so it too runs in order of position, and masked positions add exact
  zeros;
- weights are powers of two of the scaled scores: `exp2` has no slow path at -inf.
What is left to respect is that a node and its canonical (dense) position lie in one chunk: `engine.decoding.draft_tree`
drops the few nodes that do not. The start-up probe (`engine.model.invariance_probe`) proves the result for the machine
at hand.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

LOG2_E = math.log2(math.e)
CHUNK = 128
SUM_COLUMNS = 16
"Columns of the ones. One would take another path; 16 cost half of what 8 do (measured)."
MIN_ROWS = 4


@runtime_checkable
class Attention(Protocol):
    """One attention back end."""

    def __call__(
        self,
        q: Float[Tensor, "N R E"],
        keys: Float[Tensor, "N C E"],
        values: Float[Tensor, "N C E"],
        bias: Float[Tensor, "N1 R1 C"],
        *,
        rows: int,
        scaling: float,
        softcap: float | None,
    ) -> Float[Tensor, "N rows E"]:
        """Attend. `softcap` bounds scores by cap * tanh(score / cap)."""
        ...


def plan_attention_once() -> None:
    """Keep cuDNN out of torch's attention in this process: it plans anew for each shape, 0.8 ms a call on an H100."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def ordered_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    *,
    rows: int,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Attend with reductions in order of position: bitwise the same alone, in a batch, in a tree."""
    view = keys.shape[1]
    keys = keys.transpose(1, 2)
    if softcap is None:
        scores = torch.baddbmm(bias, q, keys, alpha=scaling * LOG2_E)
    else:
        scores = torch.bmm(q, keys).mul_(scaling / softcap).tanh_().mul_(softcap * LOG2_E).add_(bias)
    weights = scores[:, :rows]
    weights.sub_(weights.amax(-1, keepdim=True)).exp2_()
    # all R rows go into the products: fewer than MIN_ROWS would round differently
    flat = scores.view(-1, view)
    if view <= CHUNK:
        out = torch.bmm(scores, values)
        total = torch.mm(flat, _ones(view, flat))
    else:
        out = torch.bmm(scores[:, :, :CHUNK], values[:, :CHUNK])
        total = torch.mm(flat[:, :CHUNK], _ones(CHUNK, flat))
        for start in range(CHUNK, view, CHUNK):
            out.baddbmm_(scores[:, :, start : start + CHUNK], values[:, start : start + CHUNK])
            total.addmm_(flat[:, start : start + CHUNK], _ones(min(view - start, CHUNK), flat))
    return out[:, :rows] / total.view(*out.shape[:2], SUM_COLUMNS)[:, :rows, :1]


_ONES: dict[int, Tensor] = {}


def _ones(length: int, like: Tensor) -> Tensor:
    """Ones [length, SUM_COLUMNS], kept: this is asked for in every layer."""
    ones = _ONES.get(length)
    if ones is None or ones.dtype != like.dtype or ones.device != like.device:
        ones = _ONES[length] = like.new_ones(length, SUM_COLUMNS)
    return ones


def sdpa_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    *,
    rows: int,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Attend with torch's scaled_dot_product_attention; equal to `ordered` up to rounding."""
    if softcap is not None:
        return reference_attention(q, keys, values, bias, rows=rows, scaling=scaling, softcap=softcap)
    # the heads that share a bias lie behind one another; expanded, it is read where it lies
    samples, heads = len(bias), len(q) // len(bias)
    out = F.scaled_dot_product_attention(
        q[:, :rows].unflatten(0, (samples, heads)),
        keys.unflatten(0, (samples, heads)),
        values.unflatten(0, (samples, heads)),
        attn_mask=bias[:, None, :rows].expand(samples, heads, rows, -1),
        scale=scaling,
    )
    return out.flatten(0, 1)


def reference_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    *,
    rows: int,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Attend as the formula reads, in float64: the oracle of the others."""
    scores = torch.matmul(q.double(), keys.double().transpose(-1, -2)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.unflatten(0, (len(bias), -1)) + bias[:, None]
    weights = torch.softmax(scores.flatten(0, 1)[:, :rows], dim=-1)
    return torch.matmul(weights, values.double()).to(q.dtype)


ATTENTION: dict[str, Attention] = {
    "ordered": ordered_attention,
    "sdpa": sdpa_attention,
    "reference": reference_attention,
}
SHARE_BIAS: set[Attention] = {sdpa_attention, reference_attention}
"Those that read one bias for all heads of a sample: a copy for each head would be read anew in every layer."


def num_biases(attention: object, num_kv_heads: int) -> int:
    """Return how many copies of its bias each sample needs: one for every KV head, or one for all of them."""
    return 1 if attention in SHARE_BIAS else num_kv_heads


def variable_length_attention(dtype: torch.dtype, head_size: int) -> Callable[..., Tensor] | None:
    """Return causal attention of q [T, H, E], k and v [T, Hkv, E] over sequences that begin at `starts` [S + 1].

    `seen_starts`: where the keys of each begin, of whose queries the last stands at the last; None: at its queries.
    None: torch's takes 16 bits alone, heads up to 256, a GPU of compute capability 8 or later.
    """
    short = dtype in (torch.bfloat16, torch.float16)
    return _variable_length() if short and head_size % 8 == 0 and head_size <= 256 else None


@lru_cache(maxsize=1)
def _variable_length() -> Callable[..., Tensor] | None:
    """None where this torch has none that takes a scale and a window: 2.11 and later do."""
    try:
        flash = import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    takes = inspect.signature(flash).parameters
    if not {"scale", "window_size"} <= takes.keys():
        return None
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return None
    shares_heads = "enable_gqa" in takes

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        starts: Tensor,
        longest: int,
        seen_starts: Tensor | None = None,
        seen_longest: int | None = None,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        if not shares_heads and (groups := q.shape[1] // k.shape[1]) > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        further = {"enable_gqa": True} if shares_heads else {}
        # a window counts the token itself
        back = -1 if window is None else window - 1
        seen = starts if seen_starts is None else seen_starts
        most = longest if seen_longest is None else seen_longest
        return flash(q, k, v, starts, seen, longest, most, scale=scale, window_size=(back, 0), **further)

    return attention
