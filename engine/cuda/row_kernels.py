"""What lies between the products of a decoder layer, one kernel each (Triton, CUDA).

Each program computes one row, or a part of one element by element, in an order that its width alone decides: a row's
bits depend on no other row. Arithmetic is float32, rounded once. `engine.cuda.row_operators` says in torch what each
one computes. Imported only where Triton is. Kernels are marked `no_type_check`: Triton reads their source.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

GATED_BLOCK = 1024
"Elements of one program."


def norm(x: Float[Tensor, "M H"], gain: Float[Tensor, " H"] | None, eps: float) -> Float[Tensor, "M H"]:
    """See `engine.cuda.row_operators.norm`."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    _norm[(rows,)](
        x,
        x if gain is None else gain,
        out,
        x.stride(0),
        width,
        width * eps if gain is None else eps,
        has_gain=gain is not None,
        block=block,
        num_warps=min(max(block // 256, 1), 16),
    )
    return out


def gated(gate_up: Float[Tensor, "M I2"]) -> Float[Tensor, "M I"]:
    """See `engine.cuda.row_operators.gated`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _gated[(rows, triton.cdiv(width, GATED_BLOCK))](
        gate_up, out, gate_up.stride(0), width, block=GATED_BLOCK, num_warps=4
    )
    return out


def turn(
    qkv: Float[Tensor, "M W"],
    positions: Int[Tensor, " M"],
    cells: Float[Tensor, "cells E"],
    rows: Int[Tensor, " R"],
    num_tokens: int,
    rope: Float[Tensor, "T E2 2"],
    head_gain: Float[Tensor, "G1 E"] | None,
    eps: float,
    heads: int,
) -> Float[Tensor, "N rows E"]:
    """See `engine.cuda.row_operators.turn`."""
    size = cells.shape[1]
    lanes = qkv.shape[1] // (heads * size)
    count = rows.shape[0] // (2 * heads)
    queries = torch.empty(
        count // num_tokens * heads, num_tokens * (lanes - 2), size, dtype=cells.dtype, device=cells.device
    )
    _turn[(count, heads)](
        qkv,
        rope,
        positions,
        rope if head_gain is None else head_gain,
        cells,
        rows,
        queries,
        qkv.stride(0),
        num_tokens,
        eps,
        heads=heads,
        lanes=lanes,
        size=size,
        has_gain=head_gain is not None,
        block_lanes=triton.next_power_of_2(lanes),
        block=triton.next_power_of_2(size),
        num_warps=4,
    )
    return queries


@triton.jit
@no_type_check
def _norm(x, gain, out, stride, width, floor, has_gain: tl.constexpr, block: tl.constexpr):
    """One row over its root mean square; without a gain over its length, which the weights behind it expect."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    values = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(values * values, 0)
    if has_gain:
        values = values * tl.rsqrt(total / width + floor)
        values = values * tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    else:
        values = values * tl.rsqrt(total + floor)
    tl.store(out + row * width + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _gated(gate_up, out, stride, width, block: tl.constexpr):
    """silu(gate) * up of one part of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + at, mask=inside, other=0.0).to(tl.float32)
    values = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("num_tokens",))
@no_type_check
def _turn(
    qkv,
    rope,
    positions,
    head_gain,
    cells,
    rows,
    queries,
    stride,
    num_tokens,
    eps,
    heads: tl.constexpr,
    lanes: tl.constexpr,
    size: tl.constexpr,
    has_gain: tl.constexpr,
    block_lanes: tl.constexpr,
    block: tl.constexpr,
):
    """One token's queries, key and value of one KV head: normed, turned, handed on or stored."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.arange(0, block_lanes)[:, None]
    at = tl.arange(0, block)[None, :]
    inside = (lane < lanes) & (at < size)
    is_turned = lane < lanes - 1
    place = lane * size + at
    x = tl.load(qkv + token * stride + head * lanes * size + place, mask=inside, other=0.0).to(tl.float32)
    if has_gain:
        mean = tl.sum(x * x, 1)[:, None] / size
        gain = tl.load(head_gain + place, mask=is_turned & (at < size), other=1.0).to(tl.float32)
        x = tl.where(is_turned, x * tl.rsqrt(mean + eps) * gain, x)
    # neighbours are the two parts of a complex number
    column = tl.arange(0, block)
    position = tl.load(positions + token)
    angle = tl.load(rope + position * size + column, mask=column < size, other=0.0)
    cos, sin = tl.split(tl.reshape(angle, (block // 2, 2)))
    real, imaginary = tl.split(tl.reshape(x, (block_lanes, block // 2, 2)))
    turned = tl.join(
        real * cos[None, :] - imaginary * sin[None, :], real * sin[None, :] + imaginary * cos[None, :]
    )
    x = tl.where(is_turned, tl.reshape(turned, (block_lanes, block)), x).to(queries.dtype.element_ty)
    sample = token // num_tokens
    first = ((sample * heads + head) * num_tokens + token % num_tokens) * (lanes - 2) * size
    tl.store(queries + first + place, x, mask=(lane < lanes - 2) & (at < size))
    is_stored = (lane >= lanes - 2) & (lane < lanes)
    row = tl.load(rows + (token * heads + head) * 2 + lane - (lanes - 2), mask=is_stored, other=0)
    tl.store(cells + row * size + at, x, mask=is_stored & (at < size))
