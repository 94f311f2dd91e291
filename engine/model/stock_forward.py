"""A Hugging Face causal LM as it is, attending through our KV pool without a patch (design 3.7).

An attention function registered under our name receives the forward plan as a keyword argument; no mask function
is registered, so the model builds no mask. Tokens of all samples are packed into one row: linears see real
tokens only. The linears are the compute back end's products, where it has any.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..cache.kv_pool import KVShape, cell_size
from ..weights.chunks import copy_over, require_names, unique_tensors
from .compute_backend import ComputeBackend
from .forward_plan import ForwardPlan
from .hidden_taps import HiddenTaps
from .linears import LayOut, Rows, Same, first_altered, same_bits
from .support import switch_attention, unsupported

_READ = (torch.float32, torch.bfloat16)
"Types of weights that products read."


class OwnProduct(nn.Module):
    """In the place of a linear or of a GPT-2 `Conv1D`, which is a linear with its weight transposed."""

    def __init__(self, linear: nn.Linear | Conv1D, lay_out: LayOut) -> None:
        super().__init__()
        # a submodule would be copied and moved with the others
        self._of: tuple[Any] = (linear,)
        self._lay_out = lay_out
        self._product = lay_out(*self._present())

    def lay_out(self) -> None:
        """Copy the linear's present weight for products."""
        weight, bias = self._present()
        self._product.take(Rows((weight,)), bias)

    def is_current(self) -> bool:
        """Whether the copy is the linear's present weight and bias, bit for bit."""
        weight, bias = self._present()
        return bool(self._product.holds(Rows((weight,)), bias))

    @property
    def weight(self) -> Tensor:
        """Of the linear: some models ask for its type or device."""
        return self._of[0].weight

    @property
    def bias(self) -> Tensor | None:
        """Of the linear."""
        return self._of[0].bias

    def _present(self) -> tuple[Tensor, Tensor | None]:
        linear = self._of[0]
        weight = linear.weight.t() if isinstance(linear, Conv1D) else linear.weight
        weight = weight.detach()
        return weight if weight.dtype in _READ else weight.float(), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b in x's type; the sum is float32."""
        out = self._product(x.reshape(-1, x.shape[-1]).float())
        return out.reshape(*x.shape[:-1], out.shape[-1]).to(x.dtype)


def with_own_products(model: PreTrainedModel, lay_out: LayOut) -> PreTrainedModel:
    """Return the copy; parameters and buffers are the model's own."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    linears = {
        id(module): OwnProduct(module, lay_out)  # type: ignore[arg-type]
        for module in model.modules()
        if _is_linear(module)
    }
    return copy.deepcopy(model, shared | linears)


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


ATTENTION_NAME = "rlhfspec"


class StockForward:
    """The model's own forward. See `engine.model.runner.Forward`."""

    min_tokens = 4

    def __init__(self, model: PreTrainedModel, backend: ComputeBackend) -> None:
        self._of = model
        lay_out = backend.stock_linear
        self._model = model if lay_out is None else with_own_products(model, lay_out)
        switch_attention(self._model, ATTENTION_NAME)

    def __call__(self, input_ids: Tensor, position_ids: Tensor, plan: ForwardPlan) -> Tensor:
        """See `engine.model.runner.Forward`."""
        return self._run(input_ids, position_ids, plan, logits_to_keep=0)

    def fill(self, input_ids: Tensor, position_ids: Tensor, plan: ForwardPlan) -> None:
        """See `engine.model.runner.Forward`."""
        self._run(input_ids, position_ids, plan, logits_to_keep=1)

    def tap(self, taps: HiddenTaps) -> None:
        """See `engine.model.runner.Forward`."""
        decoder: Any = self._model.get_decoder()
        layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
        if layers is None or norm is None:
            raise unsupported(self._model, "its decoder layers are not found, and a draft head reads them")

        def show(layer: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            taps.see(layer, (arguments[0] if arguments else named["hidden_states"])[0])

        for layer, module in enumerate((*layers, norm)):
            if taps.wants(layer):
                module.register_forward_pre_hook(
                    lambda _, arguments, named, layer=layer: show(layer, arguments, named), with_kwargs=True
                )

    def output(self, x: Tensor) -> Tensor:
        """See `engine.model.runner.Forward`."""
        head: Any = self._model.get_output_embeddings()
        return head(x.to(self._model.dtype)).float()

    @property
    def embedding(self) -> Tensor:
        """See `engine.model.runner.Forward`."""
        inputs: Any = self._of.get_input_embeddings()
        return inputs.weight

    def load(self, names: Collection[str], parts: Iterable[Mapping[str, Tensor]]) -> str | None:
        """See `engine.model.runner.Forward`. The module takes them first; its linears are laid out behind the last."""
        altered = load_module(self._of, names, parts)
        for module in self._model.modules():
            if isinstance(module, OwnProduct):
                module.lay_out()
        return altered or self.altered_copy()

    def altered_copy(self) -> str | None:
        """See `engine.model.runner.Forward`."""
        if self._model is self._of:
            return None
        with torch.inference_mode():
            return next(self._altered_copies(), None)

    def _altered_copies(self) -> Iterator[str]:
        for name, module in self._model.named_modules():
            if isinstance(module, OwnProduct) and not module.is_current():
                yield name
        own = dict(self._of.state_dict(keep_vars=True))
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            # shared with the module, and the same bits by that
            if tensor.data_ptr() != own[name].data_ptr() and not same_bits(tensor, own[name]):
                yield name

    @property
    def library_product(self) -> str | None:
        """Name of a weight that a library multiplies by while our own products serve, such as stacked experts."""
        # where all products are the library's, only stacked experts are known to depend on the mixture
        own = any(isinstance(module, OwnProduct) for module in self._model.modules())
        return next(
            (
                f"{path}.{name}"
                for path, module in _language_model(self._model).named_modules()
                # a norm's gain by head is no matrix
                if not isinstance(module, nn.Embedding) and "Norm" not in type(module).__name__
                for name, weight in module.named_parameters(recurse=False)
                if weight.dim() >= (2 if own else 3)
            ),
            None,
        )

    def _run(
        self, input_ids: Tensor, position_ids: Tensor, plan: ForwardPlan, *, logits_to_keep: int
    ) -> Tensor:
        return self._model(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            forward_plan=plan,
            logits_to_keep=logits_to_keep,
        ).logits[0]


def load_module(
    model: PreTrainedModel, names: Iterable[str], parts: Iterable[Mapping[str, Tensor]]
) -> str | None:
    """Copy a version into a module part by part, and compare; as `ModelRunner.load_parts` and `Forward.load`."""
    own, held = dict(unique_tensors(model)), list[tuple[str, Same]]()
    require_names(own, names)
    for part in parts:
        copy_over(own, part)
        held += [(name, same_bits(own[name], tensor.to(own[name].device))) for name, tensor in part.items()]
    require_names(own, {name for name, _ in held}, "weights ended early")
    return first_altered(held)


def _language_model(model: PreTrainedModel) -> nn.Module:
    """The model, or its decoder where models for images or sound stand beside it: no token passes those."""
    text = model.get_decoder()
    inside = set(text.modules())
    beside = any(
        isinstance(module, PreTrainedModel) and module not in inside and text not in set(module.modules())
        for module in model.modules()
    )
    return text if beside else model


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forward_plan: ForwardPlan | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query [1, H, M, E], key and value [1, Hkv, M, E].

    Raises ModelError for what no back end here serves: attention sinks (`s_aux`), keys and values of another shape
    than the pool's, layers without a number of their own.
    """
    if s_aux is not None:
        raise unsupported(module, "it has attention sinks")
    if forward_plan is None:
        raise unsupported(module, "it does not hand keyword arguments on to its attention")
    layer: Any = getattr(module, "layer_idx", None)
    _require_shape(module, layer, query, key, value, forward_plan.pool.shape)
    heads, tokens, size = query.shape[1:]
    queries = query[0].reshape(key.shape[1], -1, tokens, size).permute(2, 0, 1, 3)
    qkv = torch.cat(
        [queries, key[0].transpose(0, 1)[:, :, None], value[0].transpose(0, 1)[:, :, None]], dim=2
    )
    added = forward_plan.pool.shape.head_size - size
    out = forward_plan.attend(
        layer,
        # zeros change no score and no mean
        F.pad(qkv, (0, added)) if added else qkv,
        scaling=size**-0.5 if scaling is None else scaling,
        softcap=softcap,
        sliding_window=sliding_window,
    )
    return out.reshape(1, tokens, heads, size + added)[..., :size].to(query.dtype), None


def _require_shape(
    module: nn.Module, layer: Any, query: Tensor, key: Tensor, value: Tensor, shape: KVShape
) -> None:
    """Raise ModelError unless a layer attends as the pool is laid out for."""
    tokens, size = query.shape[2:]
    got = (query.shape[:2], key.shape, value.shape)
    key_shape = (1, shape.num_kv_heads, tokens, size)
    if got != ((1, shape.num_heads), key_shape, key_shape) or cell_size(size) != shape.head_size:
        raise unsupported(
            module,
            f"layer {layer} attends with queries {list(query.shape)}, keys {list(key.shape)}, values "
            f"{list(value.shape)}, but its config says {shape.num_heads} heads, {shape.num_kv_heads} KV heads, "
            f"size {shape.head_size} (after rounding up to a multiple of 8) in every layer",
        )
    if not isinstance(layer, int) or not 0 <= layer < shape.num_layers:
        raise unsupported(
            module, f"its attention has layer number {layer}, its config says {shape.num_layers} layers"
        )


AttentionInterface.register(ATTENTION_NAME, _attend)
