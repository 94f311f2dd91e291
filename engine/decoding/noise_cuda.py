"""The noise of `engine.decoding.noise`, and the choice that it decides, in one pass over the vocabulary (Triton, CUDA).

Hash and logarithms of a value are computed where the value is used; torch makes some thirty passes over memory. A
choice reads the logits once and writes one token a block of the vocabulary: its noise is never in memory. The 32 hash
bits are those of `engine.decoding.noise`, bit by bit; of the logarithms the last bits may differ from torch's, but
not between the two kernels. Imported only where Triton is: it comes with CUDA builds of
torch.
Kernels are marked `no_type_check`: Triton reads their source, and could not read a checked function's.
"""

# pyright: reportMissingImports=false, reportArgumentType=false
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

BLOCK = 1024
"Token ids of one program."


def fused_gumbel(words: Int[Tensor, "2 B D"], vocab_size: int) -> Float[Tensor, "B D V"]:
    """Return the noise of every token id.

    Args:
        words: two hash words of each (sample, position), int32, on the device.
        vocab_size: V.
    """
    first, second = words.flatten(1)
    noise = torch.empty(*words.shape[1:], vocab_size, dtype=torch.float32, device=words.device)
    grid = (len(first), triton.cdiv(vocab_size, BLOCK))
    _gumbel[grid](first, second, noise, vocab_size, block=BLOCK)  # pyright: ignore[reportIndexIssue]
    return noise


def fused_choice(
    logits: Float[Tensor, "B R V"],
    words: Int[Tensor, "2 B D"],
    levels: Int[Tensor, "B R"],
    divisors: Float[Tensor, " B"],
    factors: Float[Tensor, " B"],
) -> Int[Tensor, "B R"]:
    """Return the argmax of logits / divisor + factor * noise of every row; ties go to the smaller id.

    Args:
        logits: of any float type; each row in one piece.
        words: two hash words of each (sample, position), int32.
        levels: the position of each row.
        divisors: temperatures, 1 where greedy.
        factors: 1, 0 where greedy.
    """
    batch, rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    best = torch.empty(batch * rows, num_blocks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(batch * rows, num_blocks, dtype=torch.int64, device=logits.device)
    first, second = words.contiguous()
    _choices[(batch * rows, num_blocks)](  # pyright: ignore[reportIndexIssue]
        logits,
        first,
        second,
        levels.contiguous(),
        divisors,
        factors,
        best,
        ids,
        rows,
        words.shape[2],
        vocab_size,
        logits.stride(0),
        logits.stride(1),
        num_blocks,
        block=BLOCK,
    )
    # blocks lie in the order of ids: the first of equal ones has the smallest
    return ids.gather(1, best.argmax(1, keepdim=True)).view(batch, rows)


@triton.jit
@no_type_check
def _mix32(x):
    """lowbias32 on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
@no_type_check
def _gumbel(first, second, noise, vocab_size, block: tl.constexpr):
    """One row's noise of one block of ids."""
    row = tl.program_id(0)
    ids = tl.program_id(1) * block + tl.arange(0, block)
    place = noise + row.to(tl.int64) * vocab_size + ids
    tl.store(place, _noise_of(first, second, row, ids), mask=ids < vocab_size)


@triton.jit
@no_type_check
def _choices(
    logits,
    first,
    second,
    levels,
    divisors,
    factors,
    best,
    best_ids,
    rows,
    num_levels,
    vocab_size,
    sample_stride,
    row_stride,
    num_blocks,
    block: tl.constexpr,
):
    """The best id of one block for one row: `engine.decoding.sampling_rule.perturb` and its argmax."""
    place = tl.program_id(0)
    sample, row = place // rows, place % rows
    ids = tl.program_id(1) * block + tl.arange(0, block)
    inside = ids < vocab_size
    start = logits + sample.to(tl.int64) * sample_stride + row.to(tl.int64) * row_stride
    scaled = tl.div_rn(
        tl.load(start + ids, mask=inside, other=0.0).to(tl.float32), tl.load(divisors + sample)
    )
    noise = _noise_of(first, second, sample * num_levels + tl.load(levels + place), ids)
    perturbed = scaled + noise * tl.load(factors + sample)
    perturbed = tl.where(inside, perturbed, float("-inf"))
    value, index = tl.max(perturbed, 0, return_indices=True, return_indices_tie_break_left=True)
    out = place * num_blocks + tl.program_id(1)
    tl.store(best + out, value)
    tl.store(best_ids + out, (tl.program_id(1) * block + index).to(tl.int64))


@triton.jit
@no_type_check
def _noise_of(first, second, row, ids):
    """`engine.decoding.noise.noise_bits` and `gumbel_from_bits` of one row's ids."""
    one = tl.load(first + row).to(tl.uint32, bitcast=True)
    two = tl.load(second + row).to(tl.uint32, bitcast=True)
    bits = _mix32(ids.to(tl.uint32) * 0x9E3779B1)
    bits = _mix32(_mix32(bits + one) ^ two)
    w = ((bits & 0xFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    w = tl.minimum(w + (bits >> 16).to(tl.float32) * 1.52587890625e-05, 0.9999999403953552)
    # log1p(-w) that keeps small w: log(u), corrected by what rounding took from u = 1 - w
    u = 1.0 - w
    log1p = tl.where(u == 1.0, -w, tl.log(u) * (-w / (u - 1.0)))
    return -tl.log(-log1p)
