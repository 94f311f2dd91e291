"""Lays a Llama's weights out for `engine.model.llama_forward`, and finds copies that are not what they are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rlhfspec.engine.model.compute_backend import ComputeBackend
from rlhfspec.engine.model.linears import ROW_BLOCK, ByRows, Layer, Linear, Same, same_bits, taken, with_rows
from rlhfspec.engine.weights.causal_lm import CausalLM

INNER_STEP = 32


class Weights(NamedTuple):
    """Of one product."""

    weight: Tensor
    bias: Tensor | None


class HeadBlock(NamedTuple):
    """Some rows of the head, and the last norm's gain where it is not multiplied into them."""

    gain: Tensor | None
    weight: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLayer:
    """One decoder layer's weights as its norms and products take them: what `Layer` is made of."""

    attention_gain: Tensor | None
    "None: multiplied into the weights"
    qkv: Weights
    head_gain: Tensor | None
    "[queries + 1, E]: Qwen3's norms of queries and key"
    out: Weights
    mlp_gain: Tensor | None
    gate_up: Weights
    down: Weights


class LlamaLayout:
    """How the present weights of a stock module are laid out. Everything it returns is a copy, unless types agree."""

    def __init__(self, model: CausalLM, backend: ComputeBackend) -> None:
        config = model.config
        self._model = model
        self._base: Any = model.base_model
        self._backend = backend
        self.dtype = backend.compute_dtype(model.dtype)
        "to compute in"
        self._weight_dtype = model.dtype if backend.widens_bfloat16 else self.dtype
        self.kv_heads: int = config.num_key_value_heads
        self.queries: int = config.num_attention_heads // config.num_key_value_heads
        self.size = head_size(model)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self._base.layers)

    def embedding(self) -> Tensor:
        """[V, H]; the module's own where its type serves."""
        return self._base.embed_tokens.weight.to(self._weight_dtype)

    def layer(self, index: int) -> Layer:
        """Lay one layer out."""
        layer = self._base.layers[index]
        fused = self._fused(layer)
        return Layer(
            attention_gain=fused.attention_gain,
            qkv=self._linear(fused.qkv),
            head_gain=fused.head_gain,
            out=self._linear(fused.out),
            mlp_gain=fused.mlp_gain,
            gate_up=self._linear(fused.gate_up),
            down=self._linear(fused.down),
            sliding_window=_sliding_window(self._model.config, layer.self_attn),
        )

    def refresh(self, index: int, served: Layer) -> Layer:
        """Lay the layer's present weights out where the earlier ones lie."""
        fused = self._fused(self._base.layers[index])
        for name in ("qkv", "out", "gate_up", "down"):
            getattr(served, name).take(*getattr(fused, name))
        gains = {
            name: taken(getattr(served, name), getattr(fused, name))
            for name in ("attention_gain", "head_gain", "mlp_gain")
        }
        return replace(served, **gains)

    def refresh_head(self, gain: Tensor | None, head: Linear) -> Tensor | None:
        """As `refresh`, for what `head` returned; the gain."""
        if not isinstance(head, ByRows):
            fused_gain, fused_head = self._fused_head()
            head.take(*fused_head)
            return taken(gain, fused_gain)
        for start, block in self._head_blocks():
            head.take_rows(start, block.weight)
            gain = taken(gain, block.gain)
        return gain

    def head(self) -> tuple[Tensor | None, Linear]:
        """Lay the last norm's gain and the head out."""
        gain, head = self._fused_head()
        return gain, self._linear(head)

    def inverse_final_gain(self) -> Tensor:
        """One over what is multiplied into the head where its gain is not kept apart, [H]; 0 for a gain of 0."""
        gain = self._base.norm.weight.to(self.dtype)
        return torch.where(gain == 0.0, gain, 1.0 / gain) / gain.numel() ** 0.5

    def copies_in_layer(self, index: int, served: Layer) -> Iterator[tuple[str, Same]]:
        """What a laid-out layer is made of, and whether it holds the module's bits."""
        fused = self._fused(self._base.layers[index])
        for name in ("attention_gain", "head_gain", "mlp_gain"):
            yield f"layer {index} {name}", same_bits(getattr(served, name), getattr(fused, name))
        for name in ("qkv", "out", "gate_up", "down"):
            yield f"layer {index} {name}", getattr(served, name).holds(*getattr(fused, name))

    def copies_in_head(self, gain: Tensor | None, head: Linear) -> Iterator[tuple[str, Same]]:
        """As `copies_in_layer`, for what `head` returned."""
        if not isinstance(head, ByRows):
            fused_gain, fused_head = self._fused_head()
            yield "the last norm's gain", same_bits(gain, fused_gain)
            yield "lm_head", head.holds(*fused_head)
            return
        for start, block in self._head_blocks():
            yield "the last norm's gain", same_bits(gain, block.gain)
            yield "lm_head", head.holds_rows(start, block.weight)

    def _linear(self, weights: Weights) -> Linear:
        return self._backend.linear(*weights, self.dtype)

    def _head_blocks(self) -> Iterator[tuple[int, HeadBlock]]:
        """What `_fused_head` returns, so many rows at a time, each with the row that it starts at."""
        weight: Tensor = self._model.lm_head.weight  # type: ignore[assignment,union-attr]
        for start in range(0, len(weight), ROW_BLOCK):
            gain, (block,) = self._fold(self._base.norm, [weight[start : start + ROW_BLOCK]])
            yield start, HeadBlock(gain, block)

    def _fused_head(self) -> tuple[Tensor | None, Weights]:
        gain, (head,) = self._fold(self._base.norm, [self._model.lm_head.weight])  # type: ignore[union-attr]
        return gain, Weights(head, None)

    def _fused(self, layer: Any) -> FusedLayer:
        attention, mlp = layer.self_attn, layer.mlp
        attention_gain, (query, key, value) = self._fold(
            layer.input_layernorm,
            [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight],
        )
        mlp_gain, (gate, up) = self._fold(
            layer.post_attention_layernorm, [mlp.gate_proj.weight, mlp.up_proj.weight]
        )
        pad = -gate.shape[0] % INNER_STEP
        inner = gate.shape[0] + pad
        return FusedLayer(
            attention_gain=attention_gain,
            qkv=Weights(
                by_head(query, key, value, self.kv_heads, self.size),
                self._biases_by_head(attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias),
            ),
            head_gain=self._head_gain(attention),
            out=Weights(attention.o_proj.weight.to(self._weight_dtype), attention.o_proj.bias),
            mlp_gain=mlp_gain,
            gate_up=Weights(
                torch.cat([with_rows(gate, inner), with_rows(up, inner)]),
                None
                if mlp.gate_proj.bias is None
                else torch.cat([with_rows(mlp.gate_proj.bias, inner), with_rows(mlp.up_proj.bias, inner)]),
            ),
            down=Weights(F.pad(mlp.down_proj.weight, (0, pad)).to(self._weight_dtype), mlp.down_proj.bias),
        )

    def _fold(self, norm: Any, weights: list[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
        """Multiply a norm's gain into the weights behind it; bfloat16 would round, there it stays apart."""
        weights = [weight.to(self._weight_dtype) for weight in weights]
        gain = norm.weight.to(self.dtype)
        if self._weight_dtype != torch.float32:
            return gain, weights
        gain = gain * gain.numel() ** 0.5
        return None, [weight * gain for weight in weights]

    def _biases_by_head(
        self, query: Tensor | None, key: Tensor | None, value: Tensor | None
    ) -> Tensor | None:
        if query is None or key is None or value is None:
            return None
        return by_head(query, key, value, self.kv_heads, self.size)

    def _head_gain(self, attention: Any) -> Tensor | None:
        if self._model.config.model_type != "qwen3":
            return None
        query = _pairs_together(attention.q_norm.weight.float(), dim=0)
        key = _pairs_together(attention.k_norm.weight.float(), dim=0)
        return torch.cat([query.expand(self.queries, -1), key[None]])


def by_head(query: Tensor, key: Tensor, value: Tensor, kv_heads: int, size: int) -> Tensor:
    """Join rows [H * E, ...] of queries, keys and values KV head by KV head, rotary pairs made neighbours."""
    lead, tail = (kv_heads, -1, size), query.shape[1:]
    queries = _pairs_together(query.view(*lead, *tail), dim=2)
    keys = _pairs_together(key.view(*lead, *tail), dim=2)
    return torch.cat([queries, keys, value.view(*lead, *tail)], dim=1).reshape(-1, *tail)


def head_size(model: CausalLM) -> int:
    """A head's size, as the modules have it: a config may leave it out."""
    return model.base_model.layers[0].self_attn.head_dim  # type: ignore[index,union-attr,return-value]


def _sliding_window(config: Any, attention: Any) -> int | None:
    """The window as the stock module takes it: Llama never, Mistral from the config, Qwen layer by layer."""
    if config.model_type == "llama":
        return None
    return config.sliding_window if config.model_type == "mistral" else attention.sliding_window


def _pairs_together(x: Tensor, *, dim: int) -> Tensor:
    """Reorder an axis of E from (0, 1, .., E-1) to (0, E/2, 1, E/2 + 1, ..)."""
    half = x.shape[dim] // 2
    order = torch.arange(2 * half, device=x.device).view(2, half).t().reshape(-1)
    return x.index_select(dim, order)
