"""The weights of a Llama, Mistral, Qwen2 or Qwen3 in the layout that decodes: there is no other copy of them.

A version comes tensor by tensor, as it is published (`engine.weights.chunks`). What is multiplied together is laid out
once all of it is there, in the memory of the version before (recorded graphs stay right), and is read back at once:
unpacked, it must be bit for bit what came. In float32 a norm's gain is multiplied into the weights behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ...core.errors import ModelError
from ..cache.kv_pool import KVShape, cell_size
from ..parts import Ranks, Share
from ..weights.chunks import require_fit, require_names, unique_tensors
from ..weights.llama_config import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LlamaConfig,
    head_size,
    sliding_window,
    weight_shapes,
)
from ..weights.shared_weights import SharedWeights
from .compute_backend import ComputeBackend
from .linears import (
    Decoder,
    HeldProduct,
    HeldVector,
    Layer,
    Linear,
    MatrixLinear,
    Part,
    Published,
    ReducedLinear,
    Rows,
    Same,
    by_head,
    first_altered,
    pairs_together,
)

INNER_STEP = 32
"The inner size is padded to a multiple of it."

_ALL = slice(None)


class LlamaModel:
    """Owns the weights; `engine.model.llama_forward` computes with them."""

    def __init__(
        self,
        config: LlamaConfig,
        dtype: torch.dtype,
        backend: ComputeBackend,
        *,
        keeps_head: bool = False,
        ranks: Ranks | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Make room for weights published in `dtype`, as this back end's products read them.

        Args:
            config: of the whole model.
            dtype: that weights are published in.
            backend: what computes.
            keeps_head: `output_weight` is asked for.
            ranks: the group that the model is dealt to; heads, inner columns and token ids are then this rank's. The
                leader's lets the others make theirs.
            vocab_size: token ids that are dealt; all by default.
        """
        self.config, self.dtype, self.backend = config, dtype, backend
        self.device = backend.device
        self.shapes = weight_shapes(config)
        self.checksum = ""
        "of the weights that were loaded, as their manifest has it, where who loads them knows it"
        self.compute_dtype = backend.compute_dtype(dtype)
        self._held_dtype = dtype if backend.widens_bfloat16 else self.compute_dtype
        self._folds = self._held_dtype == torch.float32
        self.ranks, self._share = ranks, Share() if ranks is None else ranks.share
        if ranks is not None:
            ranks.order("model", config=config, dtype=dtype, backend=type(backend), vocab_size=vocab_size)
        heads = self._share.of(config.num_key_value_heads)
        self.attends = len(heads) > 0
        "whether this rank has KV heads; one without holds the first's weights, and adds nothing"
        self._heads = heads if self.attends else range(1)
        self._inner = self._share.of(config.intermediate_size, INNER_STEP)
        self._ids = range(self.shapes[HEAD][0])
        if ranks is not None:
            self._ids = self._share.of_vocabulary(vocab_size or config.vocab_size)
        self.kv_heads: int = len(self._heads)
        self.queries: int = config.num_attention_heads // config.num_key_value_heads
        self.size = head_size(config)
        self._pad = -len(self._inner) % INNER_STEP
        self._by_head, self._gates_and_ups = self._orders()
        self.embedding: Float[Tensor, "V H"] = self._zeros(config.vocab_size, config.hidden_size)
        self.layers = [self._layer(index) for index in range(config.num_hidden_layers)]
        self.final_norm: Float[Tensor, " H"] = self._zeros(config.hidden_size, dtype=dtype)
        "gain of the last norm, as it is published"
        self.final_gain = self._gain(config.hidden_size)
        "the same in the type to compute in; None: multiplied into the head"
        self.head = self._linear(len(self._ids), config.hidden_size, biased=False)
        is_lost = keeps_head and self._folds and not config.tie_word_embeddings
        self._kept_head = self._zeros(*self.shapes[HEAD], dtype=dtype) if is_lost else None
        self._laid_out = list(self._all_laid_out())
        self._shared: SharedWeights | None = None

    @staticmethod
    def of(model: Any, backend: ComputeBackend, **changes: Any) -> LlamaModel:
        """Copy a Hugging Face module's weights. Raises ModelError: `can_serve` says no.

        `changes` are made to its config.
        """
        config = LlamaConfig.of(model.config.to_json_string(use_diff=False), **changes)
        own = LlamaModel(config, model.dtype, backend)
        tensors = dict(unique_tensors(model))
        altered = own.load(tensors, [tensors])
        if altered is not None:
            raise ModelError(f"the copy of {altered} that decodes does not hold the module's weights")
        return own

    @property
    def output_weight(self) -> Float[Tensor, "V H"]:
        """The head as it is published. Raises ModelError where it is held folded and was not kept."""
        if self.config.tie_word_embeddings:
            return self.embedding
        if self._kept_head is not None:
            return self._kept_head
        if self._folds:
            raise ModelError(
                "the head is held with a norm's gain multiplied into it, and nobody asked to keep it"
            )
        return self.head.unpacked()[0]

    @property
    def vectors(self) -> dict[str, Tensor]:
        """What is held as it is published, by name."""
        return {EMBEDDING: self.embedding, FINAL_NORM: self.final_norm}

    @property
    def kv_shape(self) -> KVShape:
        """What the layers write."""
        return KVShape(
            num_layers=len(self.layers),
            num_kv_heads=self.kv_heads,
            num_heads=self.kv_heads * self.queries,
            head_size=self.size,
        )

    @property
    def decoder(self) -> Decoder:
        """Layers and head as they are laid out."""
        return Decoder(
            layers=self.layers,
            final_gain=self.final_gain,
            head=self.head,
            heads=self.kv_heads,
            queries=self.queries,
            size=self.size,
            eps=self.config.rms_norm_eps,
        )

    @property
    def prepacked(self) -> bool:
        """Whether any weight lies in another layout than a plain matrix."""
        return any(not isinstance(linear, MatrixLinear) for linear, _ in self._linears())

    def num_parameters(self) -> int:
        """Numbers that are published."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    @torch.no_grad()
    def plain(self) -> LlamaModel:
        """Return these weights laid out for the library's plain products."""
        other = LlamaModel(
            self.config, self.dtype, self.backend.plain(), keeps_head=self._kept_head is not None
        )
        for (mine, gain), (theirs, _) in zip(self._linears(), other._linears(), strict=True):
            weight, bias = mine.unpacked()
            folded = None if gain is None or not other._folds else gain * gain.numel() ** 0.5
            theirs.take(Rows((weight.to(other._held_dtype),), None, folded), bias)
        for mine, theirs in zip(self._vectors(), other._vectors(), strict=True):
            if mine is not None and theirs is not None:
                theirs.copy_(mine)
        return other

    def share(self, memory: SharedWeights) -> None:
        """Lie in memory that other processes share, where products allow it."""
        tensors = list[Tensor]()
        for into in (one.into for one in self._laid_out):
            held = [into] if isinstance(into, Tensor) else getattr(into, "tensors", None)
            if held is None:
                return
            tensors += held
        memory.hold(tensors)
        self._shared = memory

    @torch.no_grad()
    def load(self, names: Collection[str], parts: Iterable[Published]) -> str | None:
        """Take the next version, part by part as it comes; what raises on the way leaves weights of two versions.

        Returns:
            The name of a laid-out copy that is not bit for bit what came; None: all are.

        Raises:
            WeightsError: names or a part do not fit, or the parts end before all of it has come.
        """
        require_names(self.shapes, names)
        parts = self._fitting(parts)
        if self.ranks is None:
            return self._take(parts)
        with closing(self.ranks.hand_on(names, parts)) as shown:
            return self._take(shown)

    def _fitting(self, parts: Iterable[Published]) -> Generator[Published]:
        for part in parts:
            require_names(self.shapes, self.shapes.keys() | part.keys())
            for name, tensor in part.items():
                require_fit(name, tensor, self.shapes[name], self.dtype)
            yield part

    def _take(self, parts: Iterable[Published]) -> str | None:
        """Lay out this rank's share of each part as it comes, and read it back."""
        waiting, left, held = dict[str, Tensor](), self._laid_out, list[tuple[str, Same]]()
        is_there = False
        if self._shared is not None:
            parts, is_there = self._in_common(self._shared, iter(parts))
        for part in parts:
            waiting |= part
            ready = [one for one in left if all(name in waiting for name in one.names)]
            for one in ready:
                got = self._got(one, waiting)
                if not is_there:
                    one.take(got)
                if any(waiting[name].device != self.embedding.device for name in one.names):
                    # brought here once more: the way to the device may have damaged what was laid out
                    got = self._got(one, waiting)
                held.append((one.what, one.holds(got)))
            left = [one for one in left if one not in ready]
            awaited = {name for one in left for name in one.names}
            waiting = {name: self._outliving(name, part, waiting) for name in waiting if name in awaited}
        require_names({name for one in left for name in one.names}, waiting, "weights ended early")
        altered = first_altered(held)
        if self._shared is not None and altered is not None:
            self._shared.give_up()
        return altered

    def _in_common(
        self, shared: SharedWeights, parts: Iterator[Published]
    ) -> tuple[Iterable[Published], bool]:
        """Let the version lie where others find it, all at once: they compare it side by side with this process.

        Returns:
            The parts, which are still to be compared, and whether all is laid out.
        """
        first = next(parts, {})
        is_there = shared.begin()
        if not shared.coming:
            return chain([first], parts), False
        whole = dict(first)
        for part in parts:
            whole |= part
        if not is_there:
            require_names(
                {name for one in self._laid_out for name in one.names}, whole, "weights ended early"
            )
            for one in self._laid_out:
                one.take(self._got(one, whole))
        shared.end()
        return [whole], True

    @torch.no_grad()
    def altered_copy(self, tensors: Published) -> str | None:
        """Compare all that is laid out with a whole version; the result is that of `load`."""
        return first_altered((one.what, one.holds(self._got(one, tensors))) for one in self._laid_out)

    def _outliving(self, name: str, part: Published, waiting: Published) -> Tensor:
        """What waits for others of its group, where the part's memory is written over."""
        if name == HEAD and self.config.tie_word_embeddings and self._held_dtype == self.dtype:
            return self.embedding
        return waiting[name].clone() if name in part else waiting[name]

    def _got(self, one: HeldVector | HeldProduct, tensors: Published) -> dict[str, Tensor]:
        """This rank's share of what is laid out as one."""
        return {name: self._read(tensors[name], part) for name, part in one.names.items()}

    def _read(self, tensor: Tensor, part: Part) -> Tensor:
        """A part of a published tensor, where and in the type it is held in; it is rounded as it is published first."""
        return tensor[part].to(self.device, self.dtype).to(self._held_dtype)

    def _all_laid_out(self) -> Iterator[HeldVector | HeldProduct]:
        embedding = HEAD if self.config.tie_word_embeddings else EMBEDDING
        yield self._vector("embed_tokens", embedding, self.embedding)
        yield self._vector("the last norm", FINAL_NORM, self.final_norm)
        yield from self._behind_norm(
            "lm_head", self.head, {"lm_head": _slice(self._ids)}, FINAL_NORM, self.final_gain
        )
        if self._kept_head is not None:
            yield self._vector("the published head", HEAD, self._kept_head)
        for index, layer in enumerate(self.layers):
            at, called = f"model.layers.{index}.", f"layer {index} "
            attention, mlp = f"{at}self_attn.", f"{at}mlp."
            queries, keys = (_slice(self._heads, each) for each in (self.queries * self.size, self.size))
            of = {f"{attention}q_proj": queries, f"{attention}k_proj": keys, f"{attention}v_proj": keys}
            norm, gain = f"{at}input_layernorm.weight", layer.attention_gain
            yield from self._behind_norm(called + "qkv", layer.qkv, of, norm, gain, self._by_head)
            if layer.head_gain is not None:
                names: dict[str, Part] = {f"{attention}q_norm.weight": (), f"{attention}k_norm.weight": ()}
                yield HeldVector(
                    called + "head_gain", names, layer.head_gain, partial(self._head_gains, names)
                )
            attended = _slice(self._heads, self.queries * self.size)
            yield self._product(called + "out", layer.out, {f"{attention}o_proj": _ALL}, columns=attended)
            inner, norm = _slice(self._inner), f"{at}post_attention_layernorm.weight"
            of = {f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}
            gate_up = layer.gate_up
            yield from self._behind_norm(
                called + "gate_up", gate_up, of, norm, layer.mlp_gain, self._gates_and_ups
            )
            yield self._product(
                called + "down", layer.down, {f"{mlp}down_proj": _ALL}, columns=inner, pad=self._pad
            )

    def _behind_norm(
        self,
        what: str,
        linear: Linear,
        of: Mapping[str, slice],
        norm: str,
        gain: Tensor | None,
        order: Tensor | None = None,
    ) -> Iterator[HeldVector | HeldProduct]:
        """A product of what a norm gives: the gain is multiplied into its weights, or held apart."""
        if gain is not None:
            yield self._vector(f"{what}'s gain", norm, gain)
        yield self._product(what, linear, of, order, norm=norm if gain is None else "")

    def _product(
        self,
        what: str,
        linear: Linear,
        of: Mapping[str, slice],
        order: Tensor | None = None,
        *,
        norm: str = "",
        columns: slice = _ALL,
        pad: int = 0,
    ) -> HeldProduct:
        """Weights that are multiplied by at once: these rows of each, in `order`; columns, and `pad` of zeros."""
        weights: dict[str, Part] = {f"{name}.weight": (rows, columns) for name, rows in of.items()}
        biases: dict[str, Part] = {
            name: (rows,) for one, rows in of.items() if (name := f"{one}.bias") in self.shapes
        }
        gains: dict[str, Part] = {norm: ()} if norm else {}

        def made(got: Published) -> tuple[Rows, Tensor | None]:
            rows = [F.pad(got[name], (0, pad)) if pad else got[name] for name in weights]
            gain = got[norm].to(self.compute_dtype) if norm else None
            folded = None if gain is None else gain * gain.numel() ** 0.5
            bias = [got[name] for name in biases]
            if order is not None:
                # row -1 of all parts: what a size is padded with
                rows = [*rows, rows[0].new_zeros(1, rows[0].shape[1])]
                bias = [torch.cat([*bias, bias[0].new_zeros(1)]).index_select(0, order)] if bias else []
            return Rows(tuple(rows), order, folded), bias[0].to(self.compute_dtype) if bias else None

        return HeldProduct(what, weights | biases | gains, linear, made)

    def _vector(self, what: str, name: str, into: Tensor) -> HeldVector:
        return HeldVector(what, {name: ()}, into, lambda got: got[name].to(into.dtype))

    def _head_gains(self, names: Iterable[str], got: Published) -> Tensor:
        """Qwen3's norms of queries and key."""
        query, key = (pairs_together(got[name].float(), dim=0) for name in names)
        return torch.cat([query.expand(self.queries, -1), key[None]])

    def _layer(self, index: int) -> Layer:
        at, config = f"model.layers.{index}.", self.config
        hidden, inner = config.hidden_size, len(self._inner) + self._pad
        heads = self.kv_heads * self.size
        attended = heads * self.queries
        # parts of heads and of inner columns; zeros that pad belong to the last
        head_ends = [end * self.queries * self.size for end in self._share.ends(config.num_key_value_heads)]
        inner_ends = [*self._share.ends(config.intermediate_size, INNER_STEP)[:-1], inner]
        biased = {name: f"{at}{name}.bias" in self.shapes for name in _PROJECTIONS}
        return Layer(
            attention_gain=self._gain(hidden),
            qkv=self._linear(attended + 2 * heads, hidden, biased=biased["self_attn.q_proj"]),
            head_gain=self._zeros(self.queries + 1, self.size, dtype=torch.float32)
            if config.model_type == "qwen3"
            else None,
            out=self._reduced(
                hidden, attended, biased["self_attn.o_proj"], head_ends or [attended], counts=self.attends
            ),
            mlp_gain=self._gain(hidden),
            gate_up=self._linear(2 * inner, hidden, biased=biased["mlp.gate_proj"]),
            down=self._reduced(hidden, inner, biased["mlp.down_proj"], inner_ends),
            sliding_window=sliding_window(config, index),
        )

    def _linears(self) -> Iterator[tuple[Linear, Tensor | None]]:
        """Every product, with the gain of the norm before it where that is held apart."""
        yield self.head, self.final_gain
        for layer in self.layers:
            yield layer.qkv, layer.attention_gain
            yield layer.out, None
            yield layer.gate_up, layer.mlp_gain
            yield layer.down, None

    def _vectors(self) -> Iterator[Tensor | None]:
        """All that is no product."""
        yield from (self.embedding, self.final_norm, self.final_gain, self._kept_head)
        for layer in self.layers:
            yield from (layer.attention_gain, layer.head_gain, layer.mlp_gain)

    def _linear(
        self, outputs: int, inputs: int, *, biased: bool, ends: tuple[int, ...] | None = None
    ) -> Linear:
        weight = self._zeros(1, 1).expand(outputs, inputs)  # takes no memory
        bias = self._zeros(outputs, dtype=self.compute_dtype) if biased else None
        return self.backend.linear(weight, bias, self.compute_dtype, ends)

    def _reduced(
        self, outputs: int, inputs: int, biased: bool, ends: list[int], *, counts: bool = True
    ) -> Linear:
        """A product whose sums go on over the ranks."""
        linear = self._linear(outputs, inputs, biased=biased, ends=tuple(ends))
        return linear if self.ranks is None else ReducedLinear(linear, self.ranks, counts=counts)

    def _gain(self, size: int) -> Tensor | None:
        """Room for a norm's gain that is not multiplied into the weights behind it: in bfloat16 that would round."""
        return None if self._folds else self._zeros(size, dtype=self.compute_dtype)

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self._held_dtype, device=self.device)

    def _orders(self) -> tuple[Tensor, Tensor]:
        """Order of this rank's rows of queries, keys and values, and of gates and ups.

        Each is padded with the row behind all.
        """
        keys, inner = self.kv_heads * self.size, len(self._inner)
        queries = keys * self.queries
        numbers = torch.arange(queries + 2 * keys, device=self.device)
        both = torch.arange(2 * inner, device=self.device).view(2, inner)
        return (
            by_head(numbers[:queries], numbers[queries:-keys], numbers[-keys:], self.kv_heads, self.size),
            F.pad(both, (0, self._pad), value=2 * inner).reshape(-1),
        )


def _slice(of: range, times: int = 1) -> slice:
    return slice(of.start * times, of.stop * times)


_PROJECTIONS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


def can_serve(model: Any, **changes: Any) -> bool:
    """Whether a Hugging Face module is one that `LlamaModel` holds; what that is wrong about, the comparison finds."""
    is_known = config_of(model, **changes) is not None
    return is_known and {tensor.dtype for _, tensor in unique_tensors(model)} == {model.dtype}


def config_of(model: Any, **changes: Any) -> LlamaConfig | None:
    """Return the `known_config` of a Hugging Face module, which may have no numbers."""
    shapes = {name: tuple(tensor.shape) for name, tensor in unique_tensors(model)}
    return known_config(model.config.to_json_string(use_diff=False), shapes, **changes)


def known_config(
    hf_config_json: str, shapes: Mapping[str, tuple[int, ...]], **changes: Any
) -> LlamaConfig | None:
    """The config of a model of these weights, where `LlamaModel` holds such: heads are whole vectors of the cache."""
    try:
        config = LlamaConfig.of(hf_config_json, **changes)
    except ModelError:
        return None
    size = head_size(config)
    is_whole = cell_size(size) == size == KVShape.of(config).head_size
    return config if is_whole and weight_shapes(config) == shapes else None
