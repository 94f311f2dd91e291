"""Any Hugging Face causal LM as it is, attending through our KV pool without a patch (design 3.7).

An attention function registered under our name receives the forward plan as a keyword argument; no mask function
is registered, so the model builds no mask. Tokens of all samples are packed into one row: linears see real
tokens only. On one CPU thread the linears are our own products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import PreTrainedModel

from core.errors import ModelError
from engine.forward_plan import ForwardPlan
from engine.native.serving import serves_thread
from engine.stock_linears import OwnProduct, with_own_products

ATTENTION_NAME = "rlhfspec"


class StockForward:
    """The model's own forward. See `engine.runner.Forward`."""

    min_tokens = 4

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = with_own_products(model) if serves_thread(model.device) else model
        self._model.set_attn_implementation(ATTENTION_NAME)

    def __call__(self, input_ids: Tensor, position_ids: Tensor, plan: ForwardPlan) -> Tensor:
        """See `engine.runner.Forward`."""
        return self._run(input_ids, position_ids, plan, logits_to_keep=0)

    def fill(self, input_ids: Tensor, position_ids: Tensor, plan: ForwardPlan) -> None:
        """See `engine.runner.Forward`."""
        self._run(input_ids, position_ids, plan, logits_to_keep=1)

    def reload(self) -> None:
        """Lay the linears' weights out anew; the others are the module's own."""
        for module in self._model.modules():
            if isinstance(module, OwnProduct):
                module.lay_out()

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


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forward_plan: ForwardPlan,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query [1, H, M, E], key and value [1, Hkv, M, E].

    Raises ModelError for attention sinks (`s_aux`), which no back end here adds.
    """
    if s_aux is not None:
        raise ModelError(f"{type(module).__name__} is not supported: it has attention sinks")
    heads, tokens, size = query.shape[1:]
    queries = query[0].view(key.shape[1], -1, tokens, size).permute(2, 0, 1, 3)
    qkv = torch.cat(
        [queries, key[0].transpose(0, 1)[:, :, None], value[0].transpose(0, 1)[:, :, None]], dim=2
    )
    layer: Any = module.layer_idx
    out = forward_plan.attend(
        layer,
        qkv,
        scaling=size**-0.5 if scaling is None else scaling,
        softcap=softcap,
        sliding_window=sliding_window,
    )
    return out.view(1, tokens, heads, size).to(query.dtype), None


AttentionInterface.register(ATTENTION_NAME, _attend)
