"""Runs a stock Hugging Face causal LM over our KV pool, without patching it (design 3.7).

An attention function registered under our name receives the forward plan as a keyword argument, writes keys and
values into the pool and attends there; no mask function is registered, so the model builds no mask. Tokens of
all samples are packed into one row: linears see real tokens only. Fewer than MIN_TOKENS tokens are padded with
dummies, because smaller matrix products round differently (measured; `engine.probe`).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import PreTrainedModel

from core.errors import ModelError
from engine.attention import Attention
from engine.forward_plan import ForwardPlan, PrefillPiece, PrefillPlan
from engine.kv import KVPool, KVShape
from engine.support import COMPARED_TOKENS, plain_logits, refuse_unsupported, require_equal

ATTENTION_NAME = "rlhfspec"
MIN_TOKENS = 4


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
    out = forward_plan.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0],
        key[0],
        value[0],
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sliding_window=sliding_window,
    )
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, _attend)


class ModelRunner:
    """A model, its KV pool, and the forward that joins them."""

    def __init__(
        self, model: PreTrainedModel, *, num_slots: int, capacity: int, attention: Attention, vocab_size: int
    ) -> None:
        refuse_unsupported(model, capacity)
        self.model = model
        self.attention = attention
        self.vocab_size = vocab_size
        self.device = next(model.parameters()).device
        # CPU attention runs in float32: bfloat16 products sum in pairs, which decoys would split
        dtype = torch.float32 if self.device.type == "cpu" else model.dtype
        self.pool = KVPool(
            KVShape.of(model.config), num_slots=num_slots, capacity=capacity, dtype=dtype, device=self.device
        )
        self._compare_with_plain_forward()

    @torch.inference_mode()
    def logits(
        self, input_ids: Int[Tensor, " M"], position_ids: Int[Tensor, " M"], plan: ForwardPlan
    ) -> Float[Tensor, "M V"]:
        """Run the packed tokens and return each one's next-token logits, padded ids cut off."""
        out = self._forward(input_ids, position_ids, plan, logits_to_keep=0)
        return out[0, : len(input_ids), : self.vocab_size]

    @torch.inference_mode()
    def fill(self, input_ids: Int[Tensor, " M"], position_ids: Int[Tensor, " M"], plan: ForwardPlan) -> None:
        """Run the packed tokens for their keys and values only."""
        self._forward(input_ids, position_ids, plan, logits_to_keep=1)

    def _forward(
        self, input_ids: Tensor, position_ids: Tensor, plan: ForwardPlan, *, logits_to_keep: int
    ) -> Tensor:
        missing = max(MIN_TOKENS - len(input_ids), 0)
        if missing:
            input_ids = torch.cat([input_ids, input_ids.new_zeros(missing)])
            position_ids = torch.cat([position_ids, position_ids.new_zeros(missing)])
        return self.model(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            forward_plan=plan,
            logits_to_keep=MIN_TOKENS if logits_to_keep else 0,
        ).logits

    def _compare_with_plain_forward(self) -> None:
        """Switch the model to our attention; require the logits it had before. Leaves junk in slot 0."""
        length = min(COMPARED_TOKENS, self.pool.capacity)
        positions = torch.arange(length, device=self.device)
        ids = positions * 31 % self.vocab_size
        plain = plain_logits(self.model, ids)[:, : self.vocab_size]
        self.model.set_attn_implementation(ATTENTION_NAME)
        piece = PrefillPiece(slot=0, start=0, length=length)
        plan = PrefillPlan(pool=self.pool, attention=self.attention, pieces=[piece])
        require_equal(self.model, plain, self.logits(ids, positions, plan))
