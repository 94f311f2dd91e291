"""A forward of our own for Llama and its kin (Qwen2, Qwen3, Mistral): the same arithmetic in a third of the calls.

Small models and small batches spend most of a stock forward in dispatch. Here
- queries, keys and values come from one product, laid out head by head as attention and the pool want them;
- gate and up come from one product; residuals are added by the products that follow;
- the rotation of all heads is one complex product: pairs of the stock layout (i, i + E/2) are made neighbours by
  permuting the rows of the weights once, which no dot product of query and key sees;
- gains of the norms are multiplied into the weights behind them (float32), and the norm itself is three calls:
  x / hypot(|x|, sqrt(H eps)), with sqrt(H) in the gain;
- inner sizes are padded with zero rows to a multiple of 32, where products are seen to round alike;
- a prefill ends with the keys and values of the last layer.
Where the compute back end can, the whole forward is one call (`ComputeBackend.fuse`).
The stock module stays the oracle: `engine.model.runner` compares the two at start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from rlhfspec.engine.cache.kv_pool import KVPool, KVShape, cell_size
from rlhfspec.engine.model.compute_backend import ComputeBackend, FusedChain, FusedForward, PoolAttention
from rlhfspec.engine.model.forward_plan import ForwardPlan
from rlhfspec.engine.model.hidden_taps import HiddenTaps
from rlhfspec.engine.model.linears import Decoder, Layer, MatrixLinear, Same, first_altered, same_bits, taken
from rlhfspec.engine.model.llama_layout import LlamaLayout, head_size
from rlhfspec.engine.weights.bare_llama import MODEL_TYPES
from rlhfspec.engine.weights.causal_lm import CausalLM

MAX_ROTATION_BYTES = 8 << 20
"A table of every position's rotation for all heads is kept up to this size; beyond, one for each pair."
WHOLE_VECTORS = 8
"Complex values in the widest vector register. Heads of whole vectors round alike in long loops and in short ones."


class LlamaForward:
    """Our forward over a stock module's weights. See `engine.model.runner.Forward`.

    The weights are copied: call `reload` after they change.
    """

    min_tokens = 1
    "linears pad where they must"

    def __init__(self, model: CausalLM, *, capacity: int, backend: ComputeBackend) -> None:
        config = model.config
        self._model = model
        self._backend = backend
        self._rows = backend.rows
        self._layout = layout = LlamaLayout(model, backend)
        self._dtype = layout.dtype
        self._kv_heads, self._queries, self._size = layout.kv_heads, layout.queries, layout.size
        self._eps: float = config.rms_norm_eps
        self._scaling = self._size**-0.5
        root = (config.hidden_size * self._eps) ** 0.5
        self._norm_floor = torch.tensor(root, dtype=torch.float32, device=model.device)
        self._rope = _rotations(model, capacity)
        self._layers: list[Layer] = []
        self._taps: HiddenTaps | None = None
        self.fused: FusedForward | None = None
        "the whole forward in one call, where the back end has it and attention works inside the pool"
        self.reload()

    def reload(self) -> None:
        """Lay the module's present weights out in the memory of those before, layer by layer.

        No two copies of the model at any time, and what was recorded over their addresses (CUDA graphs) stays right.
        """
        layout, first = self._layout, not self._layers
        with torch.inference_mode():
            if first:
                self._embedding = layout.embedding()
                self._layers = [layout.layer(index) for index in range(layout.num_layers)]
                self._final_gain, self._head = layout.head()
            else:
                taken(self._embedding, layout.embedding())
                self._layers = [layout.refresh(index, layer) for index, layer in enumerate(self._layers)]
                self._final_gain = layout.refresh_head(self._final_gain, self._head)
            self.fused = self._backend.fuse(self._decoder)

    @property
    def _decoder(self) -> Decoder:
        return Decoder(
            layers=self._layers,
            final_gain=self._final_gain,
            head=self._head,
            heads=self._kv_heads,
            queries=self._queries,
            size=self._size,
            eps=self._eps,
        )

    def altered_copy(self) -> str | None:
        """See `engine.model.runner.Forward`."""
        with torch.inference_mode():
            return first_altered(self._copies())

    @property
    def library_product(self) -> str | None:
        """None: every product is the back end's. See `engine.model.runner.Forward`."""
        return None

    @property
    def kv_shape(self) -> KVShape:
        """What the layers write, as their weights say."""
        return KVShape(
            num_layers=len(self._layers),
            num_kv_heads=self._kv_heads,
            num_heads=self._kv_heads * self._queries,
            head_size=self._size,
        )

    @property
    def prepacked(self) -> bool:
        """Whether any weight lies in another layout than a plain matrix."""
        linears = [self._head]
        for layer in self._layers:
            linears += [layer.qkv, layer.out, layer.gate_up, layer.down]
        return any(not isinstance(linear, MatrixLinear) for linear in linears)

    def __call__(
        self, input_ids: Int[Tensor, " M"], position_ids: Int[Tensor, " M"], plan: ForwardPlan
    ) -> Float[Tensor, "M V"]:
        """See `engine.model.runner.Forward`."""
        if self.fused is not None and isinstance(plan.attention, PoolAttention):
            self._write_inputs(self.fused, input_ids, position_ids, plan)
            return self.fused.logits(len(input_ids), plan.segments(), self._taps)
        x = self._embedded(input_ids)
        attention = self._attention(position_ids, plan)
        for index, layer in enumerate(self._layers):
            self._show(index, x)
            x = self._after_layer(index, layer, x, attention)
        self._show(len(self._layers), x)
        return self._head(self._norm(x, self._final_gain))

    def fill(self, input_ids: Tensor, position_ids: Tensor, plan: ForwardPlan) -> None:
        """See `engine.model.runner.Forward`."""
        if self.fused is not None and isinstance(plan.attention, PoolAttention):
            self._write_inputs(self.fused, input_ids, position_ids, plan)
            self.fused.fill(len(input_ids), plan.segments(), self._taps)
            return
        x = self._embedded(input_ids)
        attention = self._attention(position_ids, plan)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            self._show(index, x)
            if index == last and not (self._taps is not None and self._taps.whole_prefills):
                attention.store(index, layer, self._product(layer, x))
                return
            x = self._after_layer(index, layer, x, attention)
        self._show(len(self._layers), x)

    def output(self, x: Tensor) -> Tensor:
        """See `engine.model.runner.Forward`."""
        x = x.to(self._dtype)
        # where the last norm's gain is multiplied into the head, it is divided out here
        return self._head(x if self._final_gain is not None else x * self._layout.inverse_final_gain())

    def tap(self, taps: HiddenTaps) -> None:
        """See `engine.model.runner.Forward`."""
        self._taps = taps

    def _show(self, layer: int, x: Tensor) -> None:
        if self._taps is not None:
            self._taps.see(layer, x)

    def chain(self, pool: KVPool, *, vocab_size: int) -> FusedChain | None:
        """Return what drafts chains with these weights in few calls, until they are laid out anew; None: nothing."""
        if self.fused is None:
            return None
        return self._backend.chain(self.fused, self._embedding, self._rope, pool, vocab_size=vocab_size)

    def _write_inputs(
        self, fused: FusedForward, input_ids: Tensor, position_ids: Tensor, plan: ForwardPlan
    ) -> None:
        x, rope = fused.inputs(len(input_ids), plan.pool)
        x.copy_(self._embedding.index_select(0, input_ids))
        rope.copy_(self._rope.index_select(0, position_ids))

    def _embedded(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self._embedding).to(self._dtype)

    def _after_layer(self, index: int, layer: Layer, x: Tensor, attention: _Attention) -> Tensor:
        """Attention and MLP: the layer's output. Overwrites `x`."""
        attended = attention(index, layer, self._product(layer, x))
        x = layer.out.add_to(x, attended.to(self._dtype))
        gate_up = layer.gate_up(self._norm(x, layer.mlp_gain))
        if self._rows is not None:
            return layer.down.add_to(x, self._rows.gated(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return layer.down.add_to(x, F.silu(gate).mul_(up))

    def _product(self, layer: Layer, x: Tensor) -> Float[Tensor, "M W"]:
        """Queries, key and value of every token and KV head, before they are turned."""
        return layer.qkv(self._norm(x, layer.attention_gain))

    def _attention(self, positions: Tensor, plan: ForwardPlan) -> _Attention:
        if self._rows is None or not plan.takes_products:
            return _LibraryAttention(plan, self._scaling, partial(self._turned, self._rotation(positions)))
        turn = partial(
            self._rows.turn, rope=torch.view_as_real(self._rope), eps=self._eps, heads=self._kv_heads
        )
        return _RowAttention(plan, self._scaling, turn, positions)

    def _turned(self, rotation: Tensor, layer: Layer, product: Tensor) -> Float[Tensor, "M Hkv G E"]:
        """Rotated queries and key, and the value, of every token and KV head."""
        packed = product.float()
        qkv = packed.view(product.shape[0], self._kv_heads, self._queries + 2, self._size)
        if layer.head_gain is not None:
            queries_key = qkv[:, :, :-1]
            queries_key.copy_(F.rms_norm(queries_key, (self._size,), None, self._eps).mul_(layer.head_gain))
        pairs = torch.view_as_complex(qkv.view(*qkv.shape[:3], -1, 2))
        # one rotation for all heads leaves out the values; a table for all heads turns them by one
        (pairs if rotation.shape[2] > 1 else pairs[:, :, :-1]).mul_(rotation)
        return qkv

    @cached_property
    def _rotations(self) -> Tensor:
        return self._rotation_table()

    def _rotation_table(self) -> Tensor:
        """Complex [T, Hkv, queries + 2, E/2], one for the values, where that is small and rounds alike.

        Else [T, 1, 1, E/2]: slower, and every head is a loop of its own, whatever the batch.
        """
        turned = self._rope[:, None, None]
        lanes = (self._kv_heads, self._queries + 2)
        small = turned.nbytes * lanes[0] * lanes[1] <= MAX_ROTATION_BYTES
        if not small or turned.shape[-1] % WHOLE_VECTORS:
            return turned
        table = turned.new_ones(turned.shape[0], *lanes, turned.shape[-1])
        table[:, :, :-1] = turned
        return table

    def _rotation(self, positions: Tensor) -> Tensor:
        return self._rotations.index_select(0, positions)

    def _norm(self, x: Tensor, gain: Tensor | None) -> Tensor:
        if self._rows is not None:
            return self._rows.norm(x, gain, self._eps)
        if gain is not None:
            return F.rms_norm(x, (x.shape[-1],), gain, self._eps)
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._norm_floor)

    def _copies(self) -> Iterator[tuple[str, Same]]:
        """Everything that decodes, and whether it is the module's."""
        yield "embed_tokens", same_bits(self._embedding, self._layout.embedding())
        for index, layer in enumerate(self._layers):
            yield from self._layout.copies_in_layer(index, layer)
        yield from self._layout.copies_in_head(self._final_gain, self._head)
        altered = None if self.fused is None else self.fused.altered_gain(self._decoder)
        if altered is not None:
            yield altered, False
        capacity = len(self._rope)
        yield "rotary_emb", same_bits(self._rope, _rotations(self._model, capacity))
        yield "rotary_emb", same_bits(self._rotations, self._rotation_table())


@runtime_checkable
class _Attention(Protocol):
    """One forward's attention over products that are not turned yet."""

    def __call__(self, index: int, layer: Layer, product: Float[Tensor, "M W"]) -> Float[Tensor, "M HE"]:
        """Store keys and values, return what the queries attend to."""
        ...

    def store(self, index: int, layer: Layer, product: Float[Tensor, "M W"]) -> None:
        """Store keys and values."""
        ...


@dataclass(frozen=True, slots=True)
class _LibraryAttention:
    """Turned by library calls, one after another."""

    plan: ForwardPlan
    scaling: float
    turned: Callable[[Layer, Tensor], Tensor]

    def __call__(self, index: int, layer: Layer, product: Tensor) -> Tensor:
        return self.plan.attend(
            index,
            self.turned(layer, product),
            scaling=self.scaling,
            softcap=None,
            sliding_window=layer.sliding_window,
        )

    def store(self, index: int, layer: Layer, product: Tensor) -> None:
        self.plan.store(index, self.turned(layer, product))


@dataclass(frozen=True, slots=True)
class _RowAttention:
    """Turned and stored by one operator."""

    plan: ForwardPlan
    scaling: float
    turn: Callable[..., Tensor]
    positions: Tensor

    def __call__(self, index: int, layer: Layer, product: Tensor) -> Tensor:
        return self.plan.attend_turned(
            index,
            partial(self.turn, head_gain=layer.head_gain),
            product,
            self.positions,
            scaling=self.scaling,
            sliding_window=layer.sliding_window,
        )

    def store(self, index: int, layer: Layer, product: Tensor) -> None:
        turn = partial(self.turn, head_gain=layer.head_gain)
        self.plan.store_turned(index, turn, product, self.positions)


def can_serve(model: CausalLM) -> bool:
    """Whether `LlamaForward` knows this architecture; what it is wrong about, the comparison finds."""
    config = model.config
    return (
        config.model_type in MODEL_TYPES
        and cell_size(head_size(model)) == head_size(model)
        and config.hidden_act == "silu"
        and isinstance(model.get_output_embeddings(), nn.Linear)
        and float((config.rope_parameters or {}).get("partial_rotary_factor", 1.0)) == 1.0
    )


def _rotations(model: CausalLM, capacity: int) -> Tensor:
    """Complex [capacity, E/2]: every position's rotation, as the stock module computes it."""
    rotary: Any = model.base_model.rotary_emb
    angles = torch.arange(capacity, device=model.device)[:, None].float() * rotary.inv_freq.float()
    scale = rotary.attention_scaling
    return torch.complex(angles.cos() * scale, angles.sin() * scale)
