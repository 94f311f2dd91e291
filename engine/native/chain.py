"""Drafts a chain: a level's forward and the choice of the next tokens are one call."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from engine.kv import KVPool
from engine.native.forward import NativeForward
from engine.native.program import Program, native_code
from engine.native.sampling import leaders_name
from engine.native.spans import Spans

LEADERS = 2
"The next token, and the one that it leads: by how much tells how likely it is accepted."


class NativeChain:
    """One model's chains over one pool."""

    def __init__(
        self,
        forward: NativeForward,
        embedding: Float[Tensor, "V H"],
        turns: Complex[Tensor, "T E2"],
        pool: KVPool,
        *,
        vocab_size: int,
    ) -> None:
        """Take over a forward's weights.

        Args:
            forward: of the model.
            embedding: float32 or bfloat16.
            turns: every position's rotation.
            pool: keys and values.
            vocab_size: token ids to choose from.
        """
        self._forward = forward
        self._embedding = embedding.contiguous()
        self._table = turns.contiguous()
        self._pool = pool
        self._vocab_size = vocab_size
        self._x = torch.empty(0)
        self._program: Program | None = None

    def onward(
        self,
        token_ids: Int[Tensor, "B k"],
        spans: Spans,
        noise: Float[Tensor, "B D V"],
        level: int,
        divisors: Float[Tensor, " B"],
        factors: Float[Tensor, " B"],
    ) -> tuple[Int[Tensor, "B 1 2"], np.ndarray, np.ndarray]:
        """Compute the forward of the first ids; return the LEADERS best tokens behind them.

        Args:
            token_ids: known ids, one or more a sample.
            spans: one token of each sample, where its keys and values go: its position in the conversation too.
            noise: of the levels.
            level: of noise, by which the tokens behind are chosen.
            divisors: of the logits.
            factors: of the noise.

        Returns:
            Ids; scores and log-probabilities, float32 [B, 1, 2], as of `engine.native.tokens.best_tokens`.
        """
        num = len(spans)
        x, turns = self._forward.inputs(num, self._pool)
        if self._program is None or x.data_ptr() != self._x.data_ptr():
            self._program = self._build(x, turns)
        ids, numbers = (
            torch.empty(num, 1, LEADERS, dtype=torch.int64),
            np.empty((2, num, 1, LEADERS), np.float32),
        )
        scores, logprobs = numbers
        address = numbers.ctypes.data
        self._program.run(
            ids=token_ids.data_ptr(),
            id_stride=token_ids.stride(0),
            tokens=num,
            head_tokens=num * self._forward.kv_heads,
            spans=spans.ctypes.data,
            num_spans=num,
            logits=self._logits.data_ptr(),
            found=ids.data_ptr(),
            scores=address,
            logprobs=address + scores.nbytes,
            # the level is in the address: all samples' is the same
            noise=noise.data_ptr() + level * noise.stride(1) * noise.element_size(),
            noise_stride=noise.stride(0),
            divisors=divisors.data_ptr(),
            factors=factors.data_ptr(),
        )
        return ids, scores, logprobs

    def _build(self, x: Tensor, turns: Tensor) -> Program:
        self._x = x
        self._logits = torch.empty(self._pool.num_slots, self._forward.head_columns)
        self._level = torch.zeros(self._pool.num_slots, dtype=torch.int64)
        program = Program(native_code(self._pool.shape.head_size))
        program.add(
            "embed_bfloat16" if self._embedding.dtype == torch.bfloat16 else "embed",
            out=x.data_ptr(),
            ids="ids",
            table=self._embedding.data_ptr(),
            rows="tokens",
            id_stride="id_stride",
            size=self._embedding.shape[1],
        )
        program.add(
            "turn",
            out=turns.data_ptr(),
            spans="spans",
            table=self._table.data_ptr(),
            num="num_spans",
            size=2 * self._table.shape[1],
        )
        self._forward.add_layers(program, self._pool)
        self._forward.add_head(program)
        program.add(
            leaders_name(LEADERS),
            best="scores",
            ids="found",
            logprobs="logprobs",
            logits=self._logits.data_ptr(),
            noise="noise",
            levels=self._level.data_ptr(),
            divisors="divisors",
            factors="factors",
            samples="tokens",
            nodes=1,
            vocabulary=self._vocab_size,
            sample_stride=self._forward.head_columns,
            node_stride=0,
            noise_stride="noise_stride",
            level_stride=0,
            share=0.0,
        )
        program.close()
        return program
