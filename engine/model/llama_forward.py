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
Hugging Face's module stays the oracle: tests compare the two, and whoever has such a module in hand does at start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from ..cache.kv_pool import KVPool
from ..weights.llama_config import Rotary
from .compute_backend import FusedChain, FusedForward, PoolAttention
from .forward_plan import ForwardPlan
from .hidden_taps import HiddenTaps
from .linears import Layer, same_bits
from .llama_model import LlamaModel

MAX_ROTATION_BYTES = 8 << 20
"A table of every position's rotation for all heads is kept up to this size; beyond, one for each pair."
WHOLE_VECTORS = 8
"Complex values in the widest vector register. Heads of whole vectors round alike in long loops and in short ones."


class LlamaForward:
    """The arithmetic over a model's weights as they are laid out. See `engine.model.runner.Forward`."""

    min_tokens = 1
    "linears pad where they must"
    library_product = None
    "every product is the back end's"

    def __init__(self, model: LlamaModel, *, capacity: int) -> None:
        """Compute positions below `capacity`."""
        self.model = model
        self._rows = model.backend.rows
        self._dtype = model.compute_dtype
        self._kv_heads, self._queries, self._size = model.kv_heads, model.queries, model.size
        self._eps: float = model.config.rms_norm_eps
        self._scaling = self._size**-0.5
        root = (model.config.hidden_size * self._eps) ** 0.5
        self._norm_floor = torch.tensor(root, dtype=torch.float32, device=model.device)
        self._rope = _rotations(model, capacity)
        self._taps: HiddenTaps | None = None
        self.fused: FusedForward | None = model.backend.fuse(model.decoder)
        "the whole forward in one call, where the back end has it and attention works inside the pool"

    def load(self, names: Collection[str], parts: Iterable[Mapping[str, Tensor]]) -> str | None:
        """See `engine.model.runner.Forward`."""
        altered = self.model.load(names, parts)
        self.fused = self.model.backend.fuse(self.model.decoder)
        return altered or self.altered_copy()

    def altered_copy(self) -> str | None:
        """Name of what is made of the weights or the config beside the model, and no longer is; None: all is."""
        rope = _rotations(self.model, len(self._rope))
        if not same_bits(self._rope, rope) or not same_bits(self._rotations, self._rotation_table()):
            return "rotary_emb"
        return None if self.fused is None else self.fused.altered_gain(self.model.decoder)

    @property
    def embedding(self) -> Float[Tensor, "V H"]:
        """See `engine.model.runner.Forward`."""
        return self.model.embedding

    def __call__(
        self, input_ids: Int[Tensor, " M"], position_ids: Int[Tensor, " M"], plan: ForwardPlan
    ) -> Float[Tensor, "M V"]:
        """See `engine.model.runner.Forward`."""
        if self.fused is not None and isinstance(plan.attention, PoolAttention):
            self._write_inputs(self.fused, input_ids, position_ids, plan)
            return self.fused.logits(len(input_ids), plan.segments(), self._taps)
        x = self._embedded(input_ids)
        attention = self._attention(position_ids, plan)
        for index, layer in enumerate(self.model.layers):
            self._show(index, x)
            x = self._after_layer(index, layer, x, attention)
        self._show(len(self.model.layers), x)
        return self.model.head(self._norm(x, self.model.final_gain))

    def fill(self, input_ids: Tensor, position_ids: Tensor, plan: ForwardPlan) -> None:
        """See `engine.model.runner.Forward`."""
        if self.fused is not None and isinstance(plan.attention, PoolAttention):
            self._write_inputs(self.fused, input_ids, position_ids, plan)
            self.fused.fill(len(input_ids), plan.segments(), self._taps)
            return
        x = self._embedded(input_ids)
        attention = self._attention(position_ids, plan)
        last = len(self.model.layers) - 1
        for index, layer in enumerate(self.model.layers):
            self._show(index, x)
            if index == last and not (self._taps is not None and self._taps.whole_prefills):
                attention.store(index, layer, self._product(layer, x))
                return
            x = self._after_layer(index, layer, x, attention)
        self._show(len(self.model.layers), x)

    def output(self, x: Tensor) -> Tensor:
        """See `engine.model.runner.Forward`."""
        x, model = x.to(self._dtype), self.model
        if model.final_gain is None:
            # the last norm's gain is multiplied into the head, and is divided out here; 0 for a gain of 0
            gain = model.final_norm.to(self._dtype)
            x = x * (torch.where(gain == 0.0, gain, 1.0 / gain) / gain.numel() ** 0.5)
        return model.head(x)

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
        return self.model.backend.chain(
            self.fused, self.model.embedding, self._rope, pool, vocab_size=vocab_size
        )

    def _write_inputs(
        self, fused: FusedForward, input_ids: Tensor, position_ids: Tensor, plan: ForwardPlan
    ) -> None:
        x, rope = fused.inputs(len(input_ids), plan.pool)
        x.copy_(self.model.embedding.index_select(0, input_ids))
        rope.copy_(self._rope.index_select(0, position_ids))

    def _embedded(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.model.embedding).to(self._dtype)

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


_Attention = _LibraryAttention | _RowAttention
"One forward's attention over products that are not turned yet."


def _rotations(model: LlamaModel, capacity: int) -> Tensor:
    """Complex [capacity, E/2]: every position's rotation, as the stock module computes it."""
    rotary = Rotary(model.config)
    frequencies = rotary.inv_freq.to(model.device)
    angles = torch.arange(capacity, device=model.device)[:, None].float() * frequencies
    scale = rotary.attention_scaling
    return torch.complex(angles.cos() * scale, angles.sin() * scale)
