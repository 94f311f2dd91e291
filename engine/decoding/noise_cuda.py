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


def fused_leaders(
    logits: Float[Tensor, "B R V"],
    words: Int[Tensor, "2 B D"],
    divisors: Float[Tensor, " B"],
    factors: Float[Tensor, " B"],
    level: int,
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return of every row and block of the vocabulary the `count` best scores, their ids, and the sums of all.

    Arguments as of `fused_choice`; all rows take the noise of one level.

    Returns:
        Scores and ids [B, R, blocks, count]; maximum and sum of exponentials over it [2, B, R, blocks].
    """
    batch, rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    best = torch.empty(batch, rows, num_blocks, count, dtype=torch.float32, device=logits.device)
    ids = torch.empty(best.shape, dtype=torch.int64, device=logits.device)
    sums = torch.empty(2, batch, rows, num_blocks, dtype=torch.float32, device=logits.device)
    first, second = words.contiguous()
    _leaders[(batch * rows, num_blocks)](  # pyright: ignore[reportIndexIssue]
        logits,
        first,
        second,
        divisors,
        factors,
        best,
        ids,
        sums,
        rows,
        level,
        words.shape[2],
        vocab_size,
        logits.stride(0),
        logits.stride(1),
        num_blocks,
        sums[0].numel(),
        count=count,
        block=BLOCK,
    )
    return best, ids, sums


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


@triton.jit(do_not_specialize=("rows", "num_levels", "num_blocks"))
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
    start = logits + sample.to(tl.int64) * sample_stride + row.to(tl.int64) * row_stride
    level = sample * num_levels + tl.load(levels + place)
    perturbed = _perturbed(start, first, second, level, divisors + sample, factors + sample, ids, vocab_size)
    value, index = tl.max(perturbed, 0, return_indices=True, return_indices_tie_break_left=True)
    out = place * num_blocks + tl.program_id(1)
    tl.store(best + out, value)
    tl.store(best_ids + out, (tl.program_id(1) * block + index).to(tl.int64))


@triton.jit(do_not_specialize=("rows", "level", "num_levels", "num_blocks", "sums_stride"))
@no_type_check
def _leaders(
    logits,
    first,
    second,
    divisors,
    factors,
    best,
    best_ids,
    sums,
    rows,
    level,
    num_levels,
    vocab_size,
    sample_stride,
    row_stride,
    num_blocks,
    sums_stride,
    count: tl.constexpr,
    block: tl.constexpr,
):
    """The best ids of one block for one row, best first, its maximum and the sum of its exponentials over that."""
    place = tl.program_id(0)
    sample, row = place // rows, place % rows
    each = tl.arange(0, block)
    ids = tl.program_id(1) * block + each
    start = logits + sample.to(tl.int64) * sample_stride + row.to(tl.int64) * row_stride
    of_words = sample * num_levels + level
    perturbed = _perturbed(
        start, first, second, of_words, divisors + sample, factors + sample, ids, vocab_size
    )
    # what is no number comes last, and before what is behind the vocabulary
    perturbed = tl.where(perturbed == perturbed, perturbed, -1e30)
    out = place * num_blocks + tl.program_id(1)
    top = tl.max(perturbed, 0)
    tl.store(sums + out, top)
    tl.store(sums + sums_stride + out, tl.sum(tl.exp(perturbed - top), 0))
    for index in tl.static_range(count):
        value, at = tl.max(perturbed, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best + out * count + index, value)
        tl.store(best_ids + out * count + index, (tl.program_id(1) * block + at).to(tl.int64))
        perturbed = tl.where(each == at, float("-inf"), perturbed)


@triton.jit
@no_type_check
def _perturbed(logits, first, second, row, divisor, factor, ids, vocab_size):
    """`engine.decoding.sampling_rule.perturb` of some ids of a row; -inf behind the vocabulary."""
    inside = ids < vocab_size
    scaled = tl.div_rn(tl.load(logits + ids, mask=inside, other=0.0).to(tl.float32), tl.load(divisor))
    perturbed = scaled + _noise_of(first, second, row, ids) * tl.load(factor)
    return tl.where(inside, perturbed, float("-inf"))


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
