"""The noise of `engine.noise` in one pass over the vocabulary, for CUDA (Triton). Not run on a GPU so far.

Hash and logarithms of a value are computed where the value is written; torch makes some thirty passes over memory. The
32 hash bits are those of `engine.noise`, bit by bit; of the logarithms the last bits may differ from torch's. Imported
only where Triton is: it comes with CUDA builds of torch.
"""

# pyright: reportMissingImports=false
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


@triton.jit
def _mix32(x):
    """lowbias32 on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(first, second, noise, vocab_size, block: tl.constexpr):
    """One row's ids of one block: `engine.noise.noise_bits` and `gumbel_from_bits`."""
    row = tl.program_id(0)
    ids = tl.program_id(1) * block + tl.arange(0, block)
    one = tl.load(first + row).to(tl.uint32, bitcast=True)
    two = tl.load(second + row).to(tl.uint32, bitcast=True)
    bits = _mix32(ids.to(tl.uint32) * 0x9E3779B1)
    bits = _mix32(_mix32(bits + one) ^ two)
    w = ((bits & 0xFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    w = tl.minimum(w + (bits >> 16).to(tl.float32) * 1.52587890625e-05, 0.9999999403953552)
    # log1p(-w) that keeps small w: log(u), corrected by what rounding took from u = 1 - w
    u = 1.0 - w
    log1p = tl.where(u == 1.0, -w, tl.log(u) * (-w / (u - 1.0)))
    place = noise + row.to(tl.int64) * vocab_size + ids
    tl.store(place, -tl.log(-log1p), mask=ids < vocab_size)
