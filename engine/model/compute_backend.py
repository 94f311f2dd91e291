"""What computes a model's parts: library calls, or code of our own for the processor at hand.

Chosen once, in `engine.build`, and handed down: forwards, attention and sampling ask it and know no other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from ..attention.backends import Attention, ordered_attention
from ..cache.kv_pool import KVPool
from ..cache.segments import Segments
from ..decoding.noise import NoiseSource, noise_source
from .linears import Decoder, LayOut, Linear, MatrixLinear, PrepackedLinear, can_prepack, has_bfloat16

PREPACKED_MIN_ELEMENTS = 1 << 19


class PoolAttention(ABC):
    """Attention that works inside the pool, segment by segment: nothing is unpacked, no mask is made."""

    @abstractmethod
    def store(self, pool: KVPool, layer: int, qkv: Float[Tensor, "M Hkv G E"], segments: Segments) -> None:
        """Write the tokens' keys and values. Raises ModelError when they are not of the pool's shape."""

    @abstractmethod
    def attend(
        self,
        pool: KVPool,
        layer: int,
        qkv: Float[Tensor, "M Hkv G E"],
        segments: Segments,
        *,
        scaling: float,
        softcap: float | None,
        sliding_window: int | None,
    ) -> Float[Tensor, "M HE"]:
        """Store the tokens' keys and values, return what their queries attend to.

        Args:
            pool: where keys and values are.
            layer: whose cells.
            qkv: queries that share a KV head, its key and value; tokens behind the segments' are padding.
            segments: from `engine.cache.segments.segments_of`.
            scaling: of the scores.
            softcap: bounds scores by cap * tanh(score / cap); None: they are not bounded.
            sliding_window: how many tokens back a token sees, itself included; None: all.
        """


@runtime_checkable
class FusedChain(Protocol):
    """Drafts a chain in few calls: forwards, and the choices between them."""

    def start(
        self,
        logits: Float[Tensor, "B V"],
        lengths: np.ndarray,
        noise: Float[Tensor, "B D V"],
        divisors: Float[Tensor, " B"],
        factors: Float[Tensor, " B"],
    ) -> None:
        """Begin behind the committed tokens of slots 0..B-1. What is passed must stay until the chain is drafted.

        Args:
            logits: behind the last committed token.
            lengths: committed tokens, int64 [B].
            noise: of D levels; one fewer are forwarded.
            divisors: of the logits.
            factors: of the noise.

        Raises:
            IndexError: the slots have no room for D - 1 tokens more.
        """
        ...

    def draft(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Draft levels from `begin`, where the last call ended, to before `end`.

        Returns:
            Scores and log-probabilities of each level's two best, [B, end - begin, 2], as of
            `engine.decoding.sampling_rule.TopK`; views until the next draft.
        """
        ...

    def token_ids(self, levels: int) -> Int[Tensor, "B levels"]:
        """Return the first levels' tokens."""
        ...


@runtime_checkable
class SeesHidden(Protocol):
    """Sets hidden states aside (`engine.model.hidden_taps`)."""

    layers: tuple[int, ...]
    "whose inputs it wants; the number of layers: the last one's output"
    whole_prefills: bool
    "whether it wants that of prefills too"

    def see(self, layer: int, x: Float[Tensor, "M H"]) -> None:
        """Take a layer's input."""
        ...


@runtime_checkable
class FusedForward(Protocol):
    """A whole forward in one call, over weights laid out by this back end."""

    def inputs(self, num_tokens: int, pool: KVPool) -> tuple[Float[Tensor, "M H"], Complex[Tensor, "M E2"]]:
        """Return where to write the tokens' embeddings and rotations before `logits` or `fill`."""
        ...

    def logits(
        self, num_tokens: int, segments: Segments, taps: SeesHidden | None = None
    ) -> Float[Tensor, "M V"]:
        """Return every token's next-token logits; `taps` sees the hidden states that it wants on the way."""
        ...

    def fill(self, num_tokens: int, segments: Segments, taps: SeesHidden | None = None) -> None:
        """Compute keys and values only."""
        ...

    def altered_gain(self, decoder: Decoder) -> str | None:
        """Name a gain of the decoder that is not held bit for bit; None: all are."""
        ...


class RowOperators:
    """The parts of a decoder layer between its products, one launch each. A row's result depends on no other row.

    Operators of torch, which `engine.cuda.row_operators` defines.
    """

    def norm(
        self, x: Float[Tensor, "M H"], gain: Float[Tensor, " H"] | None, eps: float
    ) -> Float[Tensor, "M H"]:
        """Return x over its root mean square, times the gain; without a gain x / sqrt(|x|^2 + H eps)."""
        return torch.ops.rlhfspec.norm(x, gain, eps)

    def gated(self, gate_up: Float[Tensor, "M I2"]) -> Float[Tensor, "M I"]:
        """Return silu(gate) * up of [gate, up]."""
        return torch.ops.rlhfspec.gated(gate_up)

    def turn(
        self,
        qkv: Float[Tensor, "M W"],
        positions: Int[Tensor, " M"],
        cells: Float[Tensor, "cells E"],
        rows: Int[Tensor, " R"],
        num_tokens: int,
        *,
        rope: Float[Tensor, "T E2 2"],
        head_gain: Float[Tensor, "G1 E"] | None,
        eps: float,
        heads: int,
    ) -> Float[Tensor, "N rows E"]:
        """Norm and turn queries and keys, store keys and values, return the queries as attention takes them.

        Args:
            qkv: products, head by head [Hkv, queries + 2, E]; tokens behind those of `rows` are padding.
            positions: of the tokens.
            cells: of one layer (`KVPool.writable`).
            rows: where each (token, KV head, key or value) goes.
            num_tokens: n, of each sample.
            rope: every position's rotation, real and imaginary part.
            head_gain: Qwen3's norms of queries and key; None: they are not normed.
            eps: of that norm.
            heads: KV heads.

        Returns:
            Queries by (sample, KV head), [Hkv * tokens / n, n * queries, E], in the cells' type.
        """
        return torch.ops.rlhfspec.turn(qkv, positions, cells, rows, num_tokens, rope, head_gain, eps, heads)


class ComputeBackend:
    """Library calls (torch): serves every device and number of threads."""

    name = "torch"
    widens_bfloat16 = False
    "whether products read bfloat16 weights and compute in float32"

    def __init__(self, device: torch.device, *, prepack: bool = True) -> None:
        """`prepack` allows other layouts of a weight than a plain matrix."""
        self.device = device
        self.attention: Attention | PoolAttention = ordered_attention
        "bitwise invariant"
        self.noise: NoiseSource = noise_source(device)
        self.stock_linear: LayOut | None = None
        "lays a stock module's weights out for float32 products; None: the module multiplies by itself"
        self.rows: RowOperators | None = None
        "parts of a layer in one launch each, where attention takes rows as they are; None: library calls"
        self._prepack = prepack

    def plain(self) -> ComputeBackend:
        """Return the back end that lays every weight out as a plain matrix: where other layouts round otherwise."""
        return ComputeBackend(self.device, prepack=False)

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type to compute in for weights of one.

        On a processor without bfloat16 instructions library products emulate them, several times slower than float32,
        which is also more exact.
        """
        emulated = self.device.type == "cpu" and dtype == torch.bfloat16 and not has_bfloat16()
        return torch.float32 if emulated else dtype

    def linear(
        self,
        weight: Float[Tensor, "N K"],
        bias: Float[Tensor, " N"] | None,
        dtype: torch.dtype,
        ends: tuple[int, ...] | None = None,
    ) -> Linear:
        """Lay a weight out for products in `dtype`.

        `ends`: of the parts of K that are added up by themselves, where products have an order of their own
        (`engine.parts`); the library's have none.
        """
        bias = None if bias is None else bias.to(dtype)
        large = weight.numel() >= PREPACKED_MIN_ELEMENTS
        if self._prepack and self.device.type == "cpu" and large and can_prepack():
            return PrepackedLinear(weight.to(dtype), bias)
        return MatrixLinear(weight.to(dtype), bias)

    def fuse(self, decoder: Decoder) -> FusedForward | None:
        """Return a forward in one call, of layers laid out by `linear`; None: they run call by call."""
        return None

    def chain(
        self,
        forward: FusedForward,
        embedding: Float[Tensor, "V H"],
        rope: Complex[Tensor, "T E2"],
        pool: KVPool,
        *,
        vocab_size: int,
    ) -> FusedChain | None:
        """Return what drafts chains by a fused forward; None: drafts are made level by level.

        Args:
            forward: from `fuse`.
            embedding: of the model, as its forward reads it.
            rope: every position's rotation.
            pool: keys and values.
            vocab_size: token ids to choose from.
        """
        return None
