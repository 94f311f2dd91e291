"""The compute back end of one CPU thread: products, attention, whole forwards and choices by code of our own.

Where each operation serves, and what it is worth: `docs/decisions/0009-own-code.md`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.kv_pool import KVPool
from ..model.compute_backend import ComputeBackend, FusedForward
from ..model.linears import Decoder, Linear
from .chain import NativeChain
from .forward import NativeForward, NativeLayer
from .noise_on_demand import CpuNoiseSource
from .pool_attention import CpuAttention
from .sampling import LEAST_VOCABULARY
from .streamed_linear import StreamedLinear


class CpuBackend(ComputeBackend):
    """Code of our own, compiled for this processor; what it has no operation for is the library's."""

    name = "cpu"
    widens_bfloat16 = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.attention = CpuAttention()
        self.noise = CpuNoiseSource(device)
        self.stock_linear = StreamedLinear

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return float32 for bfloat16 weights: they are widened as they are read.

        1.1 to 2 times as fast as library products even where there are bfloat16 instructions (measured, batches of 1
        to 32), and more exact.
        """
        return torch.float32 if dtype == torch.bfloat16 else dtype

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        ends: tuple[int, ...] | None = None,
    ) -> Linear:
        """See `ComputeBackend.linear`."""
        if dtype != torch.float32:
            return super().linear(weight, bias, dtype)
        return StreamedLinear(weight, bias, ends)

    def fuse(self, decoder: Decoder) -> NativeForward | None:
        """See `ComputeBackend.fuse`; every product must be our own, in whole panels."""
        layers = [fused for layer in decoder.layers if (fused := NativeLayer.of(layer)) is not None]
        if len(layers) < len(decoder.layers) or not isinstance(decoder.head, StreamedLinear):
            return None
        return NativeForward(layers, decoder.head, decoder)

    def chain(
        self, forward: FusedForward, embedding: Tensor, rope: Tensor, pool: KVPool, *, vocab_size: int
    ) -> NativeChain | None:
        """See `ComputeBackend.chain`."""
        if not isinstance(forward, NativeForward) or vocab_size < LEAST_VOCABULARY or forward.is_reduced:
            return None
        return NativeChain(forward, embedding, rope, pool, vocab_size=vocab_size)
