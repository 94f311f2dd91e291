"""Drafts a chain: forwards and the choices between them, any number of levels in one call."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from ..cache.kv_pool import KVPool
from ..cache.segments import segments_of
from .forward import NativeForward
from .program import Program, native_code
from .sampling import leaders_name

LEADERS = 2
"The next token, and the one that it leads: by how much tells how likely it is accepted."
LEAST_LEVELS = 16
"Room for fewer is not made."


class NativeChain:
    """See `engine.model.compute_backend.FusedChain`: one model's chains over one pool.

    Level 0 is chosen by logits that are known, each other one by a forward.
    """

    def __init__(
        self,
        forward: NativeForward,
        embedding: Float[Tensor, "V H"],
        rope: Complex[Tensor, "T E2"],
        pool: KVPool,
        *,
        vocab_size: int,
    ) -> None:
        """Take over a forward's weights.

        Args:
            forward: of the model.
            embedding: float32 or bfloat16.
            rope: every position's rotation.
            pool: keys and values.
            vocab_size: token ids to choose from.
        """
        self._forward = forward
        self._embedding = embedding.contiguous()
        self._table = rope.contiguous()
        self._pool = pool
        self._vocab_size = vocab_size
        self._max_levels = 0
        self._x = torch.empty(0)
        self._live = 0

    def start(
        self,
        logits: Float[Tensor, "B V"],
        lengths: np.ndarray,
        noise: Float[Tensor, "B D V"],
        divisors: Float[Tensor, " B"],
        factors: Float[Tensor, " B"],
    ) -> None:
        """See `FusedChain.start`."""
        live, levels = len(lengths), noise.shape[1]
        x, rope = self._forward.inputs(live, self._pool)
        if levels > self._max_levels or x.data_ptr() != self._x.data_ptr():
            self._build(x, rope, max(LEAST_LEVELS, levels))
        self._segments = segments_of(
            self._pool,
            slots=np.arange(live),
            counts=np.full(live, max(levels - 1, 1)),
            starts=lengths,
        )
        # one token a level, at its own position; a level begins with a step forward
        first, count, start = self._segments[:, 1:4].T
        first[:], count[:], start[:] = np.arange(live), 1, lengths - 1
        self._given = (logits, noise, divisors, factors)
        self._live = live
        level = np.minimum(np.arange(self._max_levels), levels - 1)
        step = noise.stride(1) * noise.element_size()
        self._program.set(
            tokens=live,
            head_tokens=live * self._forward.kv_heads,
            segments=self._segments.ctypes.data,
            num_segments=live,
            first_logits=logits.data_ptr(),
            first_stride=logits.stride(0),
            logits=self._logits.data_ptr(),
            noise=noise.data_ptr() + level * step,
            noise_stride=noise.stride(0),
            divisors=divisors.data_ptr(),
            factors=factors.data_ptr(),
        )

    def draft(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """See `FusedChain.draft`."""
        first = self._first_operation(begin)
        self._program.run(first, self._first_operation(end) - first)
        scores, logprobs = self._numbers[:, begin:end, : self._live].swapaxes(1, 2)
        return scores, logprobs

    def token_ids(self, levels: int) -> Int[Tensor, "B levels"]:
        """See `FusedChain.token_ids`."""
        return self._ids[:levels, : self._live, 0].t().clone(memory_format=torch.contiguous_format)

    def _first_operation(self, level: int) -> int:
        return 0 if level == 0 else 1 + (level - 1) * self._operations

    def _build(self, x: Tensor, rope: Tensor, levels: int) -> None:
        """Make the buffers and the program: the choice of level 0, then a forward and a choice for each level."""
        slots = self._pool.num_slots
        self._x, self._max_levels = x, levels
        self._logits = torch.empty(slots, self._forward.head_columns, dtype=torch.float32)
        self._no_level = torch.zeros(slots, dtype=torch.int64)
        self._ids = torch.zeros(levels, slots, LEADERS, dtype=torch.int64)
        self._numbers = np.zeros((2, levels, slots, LEADERS), dtype=np.float32)
        self._program = Program(native_code(self._pool.shape.head_size))
        self._choose(0, "first_logits", "first_stride")
        for level in range(1, levels):
            before = len(self._program)
            self._program.add("advance", segments="segments", num="num_segments")
            self._program.add(
                "embed_bfloat16" if self._embedding.dtype == torch.bfloat16 else "embed",
                out=x.data_ptr(),
                ids=self._ids[level - 1].data_ptr(),
                table=self._embedding.data_ptr(),
                rows="tokens",
                id_stride=LEADERS,
                size=self._embedding.shape[1],
            )
            self._program.add(
                "turn",
                out=rope.data_ptr(),
                segments="segments",
                table=self._table.data_ptr(),
                num="num_segments",
                size=2 * self._table.shape[1],
            )
            self._forward.add_layers(self._program, self._pool)
            self._forward.add_head(self._program)
            self._choose(level, self._logits.data_ptr(), self._forward.head_columns)
            self._operations = len(self._program) - before
        self._program.close()

    def _choose(self, level: int, logits: int | str, stride: int | str) -> None:
        scores, logprobs = self._numbers[:, level]
        self._program.add(
            leaders_name(LEADERS),
            best=scores.ctypes.data,
            ids=self._ids[level].data_ptr(),
            logprobs=logprobs.ctypes.data,
            logits=logits,
            # the level is in the address: all samples' is the same
            noise="noise",
            levels=self._no_level.data_ptr(),
            divisors="divisors",
            factors="factors",
            samples="tokens",
            nodes=1,
            vocabulary=self._vocab_size,
            sample_stride=stride,
            node_stride=0,
            noise_stride="noise_stride",
            level_stride=0,
            share=0.0,
        )
