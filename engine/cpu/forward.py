"""A Llama's forward in one call (`engine.model.llama_forward` describes its arithmetic and lays its weights out)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from ..attention.backends import LOG2_E
from ..cache.kv_pool import KVPool
from ..cache.segments import Segments
from ..model.compute_backend import SeesHidden
from ..model.linears import Decoder, Layer, Linear, ReducedLinear, same_bits
from .pool_attention import block_tokens
from .products import PANEL
from .program import Program, native_code
from .streamed_linear import StreamedLinear

MIN_TOKENS = 64
"Room for fewer is not made."


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLayer:
    """One layer's weights; a gain is multiplied by sqrt(size), since our own norms divide by the length."""

    attention_gain: Tensor | None
    "None: multiplied into the weights behind it"
    qkv: StreamedLinear
    head_gain: Tensor | None
    "[queries + 1, E]: of queries and key"
    out: StreamedLinear
    mlp_gain: Tensor | None
    gate_up: StreamedLinear
    down: StreamedLinear
    sliding_window: int | None
    out_ranks: ReducedLinear | None
    "how results are added up over the ranks of a group; None: they are whole"
    down_ranks: ReducedLinear | None

    @staticmethod
    def of(layer: Layer) -> NativeLayer | None:
        """Return a layer as a program takes it; None where a product is not our own, in whole panels."""
        qkv, gate_up = layer.qkv, layer.gate_up
        out, down = (one.linear if isinstance(one, ReducedLinear) else one for one in (layer.out, layer.down))
        added = _whole(out, biased=False) and _whole(down, biased=False)
        if not (_whole(qkv) and _whole(gate_up) and added):
            return None
        return NativeLayer(
            attention_gain=_scaled(layer.attention_gain),
            qkv=qkv,
            head_gain=_scaled(layer.head_gain),
            out=out,  # type: ignore[arg-type]
            mlp_gain=_scaled(layer.mlp_gain),
            gate_up=gate_up,
            down=down,  # type: ignore[arg-type]
            sliding_window=layer.sliding_window,
            out_ranks=layer.out if isinstance(layer.out, ReducedLinear) else None,
            down_ranks=layer.down if isinstance(layer.down, ReducedLinear) else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Operations of a program, from 0."""

    layers: tuple[int, ...]
    "with which each layer begins, and what follows the last one: the input lies in `x` before it"
    stored: int
    "before which the last layer's keys and values are stored"
    reduced: Mapping[int, ReducedLinear]
    "before which the rows of `part` are added up over the ranks, into `x`"


class NativeForward:
    """Layers and head as one program over buffers that stay where they are."""

    def __init__(self, layers: Sequence[NativeLayer], head: StreamedLinear, decoder: Decoder) -> None:
        """Take over the weights: layers and head as a program takes them, the rest from the decoder."""
        self._layers = list(layers)
        self._final_gain = _scaled(decoder.final_gain)
        self._head = head
        self._heads, self._queries, self._size = decoder.heads, decoder.queries, decoder.size
        self._eps = decoder.eps
        self._scale = decoder.size**-0.5 * LOG2_E
        self._code = native_code(decoder.size)
        self._pool: KVPool | None = None
        self._room = 0

    def inputs(self, num_tokens: int, pool: KVPool) -> tuple[Float[Tensor, "M H"], Complex[Tensor, "M E2"]]:
        """Return where to write the tokens' embeddings and rotations before `logits` or `fill`."""
        if num_tokens > self._room or pool is not self._pool:
            self._build(max(MIN_TOKENS, 1 << (num_tokens - 1).bit_length()), pool)
        return self._x[:num_tokens], self._rope[:num_tokens]

    def logits(
        self, num_tokens: int, segments: Segments, taps: SeesHidden | None = None
    ) -> Float[Tensor, "M V"]:
        """Return every token's next-token logits; a view where V is no multiple of PANEL."""
        out = self._x.new_empty(num_tokens, self.head_columns)
        self._run(len(self._program), num_tokens, segments, out.data_ptr(), taps)
        return out[:, : self._head.columns]

    def fill(self, num_tokens: int, segments: Segments, taps: SeesHidden | None = None) -> None:
        """Compute keys and values only; the last layer's output too where `taps` wants it of prefills."""
        whole = taps is not None and taps.whole_prefills
        # what follows the last layer begins with its output in `x`
        until = self._marks.layers[-1] + 1 if whole else self._marks.stored
        self._run(until, num_tokens, segments, 0, taps)

    def _run(
        self, until: int, num_tokens: int, segments: Segments, logits: int, taps: SeesHidden | None
    ) -> None:
        self._program.set(
            tokens=num_tokens,
            head_tokens=num_tokens * self._heads,
            segments=segments.ctypes.data,
            num_segments=len(segments),
            logits=logits,
        )
        seen = {} if taps is None else {self._marks.layers[layer]: layer for layer in taps.layers}
        done = 0
        for pause in sorted({*seen, *self._marks.reduced}):
            if pause >= until:
                break
            if pause > done:
                self._program.run(done, pause - done)
                done = pause
            if pause in self._marks.reduced:
                self._add_up(self._marks.reduced[pause], num_tokens)
            if pause in seen and taps is not None:
                taps.see(seen[pause], self._x[:num_tokens])
        self._program.run(done, until - done)

    def _add_up(self, over: ReducedLinear, num_tokens: int) -> None:
        part = self._part[:num_tokens]
        if not over.counts:
            part.fill_(-0.0)
        over.ranks.add_up(self._x[:num_tokens], part)

    def _build(self, room: int, pool: KVPool) -> None:
        """Make the buffers, and the program over them."""
        first = self._layers[0]
        hidden, inner = first.qkv.depth, first.down.depth
        attended = self._heads * self._queries * self._size
        self._x, self._normed = _floats(2, room, hidden)
        self._part = _floats(0 if first.down_ranks is None else room, hidden)
        self._rope = torch.empty(room, self._size // 2, dtype=torch.complex64)
        self._qkv = _floats(room, attended + 2 * self._heads * self._size)
        self._attended = _floats(room, attended)
        self._both, self._gated = _floats(room, 2 * inner), _floats(room, inner)
        self._weights = _floats(block_tokens(self._queries) * self._queries, pool.capacity)
        self._pool, self._room = pool, room
        self._program = Program(self._code)
        self._marks = self.add_layers(self._program, pool)
        self.add_head(self._program)
        self._program.close()

    def altered_gain(self, decoder: Decoder) -> str | None:
        """See `FusedForward.altered_gain`."""
        for index, (layer, served) in enumerate(zip(decoder.layers, self._layers, strict=True)):
            for name in ("attention_gain", "head_gain", "mlp_gain"):
                if not same_bits(getattr(served, name), _scaled(getattr(layer, name))):
                    return f"layer {index} {name}"
        return None if same_bits(self._final_gain, _scaled(decoder.final_gain)) else "the last norm's gain"

    def add_layers(self, program: Program, pool: KVPool) -> Marks:
        """Append everything between the embeddings and the head's product, over the buffers of `inputs`.

        Arguments to be set: tokens, head_tokens (tokens times KV heads), segments, num_segments.
        Returns where in the program what is.
        """
        stored, begins = 0, []
        reduced: dict[int, ReducedLinear] = {}
        for index, layer in enumerate(self._layers):
            begins.append(len(program))
            self._norm(program, layer.attention_gain)
            stored = len(program)
            if layer.out_ranks is None or layer.out_ranks.counts:
                stored = self._add_attention(program, layer, pool, pool.cells[index])
            self._add(program, layer.out, self._attended, layer.out_ranks, reduced)
            self._norm(program, layer.mlp_gain)
            self._product(program, layer.gate_up, self._normed, self._both)
            program.add(
                "gate",
                out=self._gated.data_ptr(),
                both=self._both.data_ptr(),
                rows="tokens",
                size=layer.down.depth,
            )
            self._add(program, layer.down, self._gated, layer.down_ranks, reduced)
        begins.append(len(program))
        self._norm(program, self._final_gain)
        return Marks(layers=tuple(begins), stored=stored, reduced=reduced)

    def _add_attention(self, program: Program, layer: NativeLayer, pool: KVPool, of_layer: Tensor) -> int:
        """Append what lies before the product behind attention; return before which operation cells are stored."""
        lanes, normed, qkv = self._queries + 2, self._normed, self._qkv
        cells = of_layer.data_ptr()
        self._product(program, layer.qkv, normed, qkv)
        if layer.head_gain is not None:
            self._norm_heads(program, layer.head_gain)
        program.add(
            "rotate",
            x=qkv.data_ptr(),
            rope=self._rope.data_ptr(),
            tokens="tokens",
            heads=self._heads,
            turned=lanes - 1,
            lanes=lanes,
            size=self._size,
        )
        program.add(
            "store",
            cells=cells,
            qkv=qkv.data_ptr(),
            segments="segments",
            num="num_segments",
            slots=pool.num_slots,
            slot_heads=pool.shape.num_kv_heads,
            heads=self._heads,
            lanes=lanes,
            capacity=pool.capacity,
        )
        stored = len(program)
        program.add(
            "attend",
            out=self._attended.data_ptr(),
            qkv=qkv.data_ptr(),
            cells=cells,
            segments="segments",
            weights=self._weights.data_ptr(),
            num="num_segments",
            slots=pool.num_slots,
            slot_heads=pool.shape.num_kv_heads,
            heads=self._heads,
            queries=self._queries,
            capacity=pool.capacity,
            block=block_tokens(self._queries),
            window=layer.sliding_window or 0,
            scale=self._scale,
            cap=0.0,
        )
        return stored

    def add_head(self, program: Program) -> None:
        """Append the head's product. Argument to be set: logits, the address of [tokens, head columns]."""
        self._product(program, self._head, self._normed, None)

    def _add(
        self,
        program: Program,
        linear: StreamedLinear,
        inputs: Tensor,
        over: ReducedLinear | None,
        reduced: dict[int, ReducedLinear],
    ) -> None:
        """Add a product to `x`, or note where ranks' parts of it are added up."""
        if over is None:
            self._product(program, linear, inputs, self._x, added=True)
        else:
            if over.counts:
                self._product(program, linear, inputs, self._part)
            reduced[len(program)] = over

    @property
    def head_columns(self) -> int:
        """Columns of the logits, the padding to whole panels included."""
        return self._head.num_panels * PANEL

    @property
    def is_reduced(self) -> bool:
        """Whether a group computes it: no program runs without a pause."""
        return any(layer.down_ranks is not None for layer in self._layers)

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return self._heads

    def _norm(self, program: Program, gain: Tensor | None) -> None:
        size = self._x.shape[1]
        program.add(
            "norms" if gain is None else "norms_gained",
            out=self._normed.data_ptr(),
            x=self._x.data_ptr(),
            gains=0 if gain is None else gain.data_ptr(),
            groups="tokens",
            lanes=1,
            size=size,
            group_stride=size,
            lane_stride=0,
            floor=size * self._eps,
        )

    def _norm_heads(self, program: Program, gain: Tensor) -> None:
        program.add(
            "norms_gained",
            out=self._qkv.data_ptr(),
            x=self._qkv.data_ptr(),
            gains=gain.data_ptr(),
            groups="head_tokens",
            lanes=self._queries + 1,
            size=self._size,
            group_stride=(self._queries + 2) * self._size,
            lane_stride=self._size,
            floor=self._size * self._eps,
        )

    @staticmethod
    def _product(
        program: Program, linear: StreamedLinear, x: Tensor, out: Tensor | None, *, added: bool = False
    ) -> None:
        """Append x W^T + b, written to the logits without `out`, or added to what `out` holds."""
        width = linear.num_panels * PANEL
        bias = 0 if linear.bias is None else linear.bias.data_ptr()
        program.add(
            linear.operation(added=added or bias != 0),
            out="logits" if out is None else out.data_ptr(),
            x=x.data_ptr(),
            weights=linear.address,
            added=out.data_ptr() if added and out is not None else bias,
            ends=linear.ends.ctypes.data,
            parts=len(linear.ends),
            rows="tokens",
            depth=linear.depth,
            panels=linear.num_panels,
            out_stride=width,
            x_stride=x.shape[1],
            added_stride=width if added else 0,
        )


def _floats(*shape: int) -> Tensor:
    """Room for float32, whatever torch's default type is at the moment."""
    return torch.empty(*shape, dtype=torch.float32, device="cpu")


def _whole(linear: Linear, *, biased: bool = True) -> TypeGuard[StreamedLinear]:
    """Whether a program can multiply by it: our own product, whole panels, a bias only where none is added to."""
    return (
        isinstance(linear, StreamedLinear) and linear.columns % PANEL == 0 and (biased or linear.bias is None)
    )


def _scaled(gain: Tensor | None) -> Tensor | None:
    return None if gain is None else (gain * gain.shape[-1] ** 0.5).contiguous()
