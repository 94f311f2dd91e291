"""One training forward: logits and last hidden states at chosen positions only.

Works on any Hugging Face causal LM: a hook before the output head keeps just the rows that are asked
for, so the [tokens, vocabulary] matrix is never larger than the responses, and what the model does
behind its head (soft-capping, scaling) stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from core.errors import ModelError
from learning.precision import autocast


def logits_where(
    model: PreTrainedModel,
    ids: Int[Tensor, "B T"],
    where: Bool[Tensor, "B S"],
    vocab_size: int,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, "M V"], Float[Tensor, "M H"]]:
    """Return logits and hidden states that predict ids[:, 1:][where], in row-major order.

    `ids` is padded on the right, so causal attention needs no mask. `where` is [B, T - 1]. Logits are those of
    the first `vocab_size` ids, as in the engine: padded ids take no part. Products are computed in
    `compute_dtype`.
    Raises ModelError when the model has no output head to be asked.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise ModelError(f"{type(model).__name__} has no output head; expected a causal language model")
    kept: list[Tensor] = []

    def keep_rows(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        kept.append(args[0][:, :-1][where])
        return (kept[0][None],)

    handle = head.register_forward_pre_hook(keep_rows)
    try:
        with autocast(model.device, compute_dtype):
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    return logits[0, :, :vocab_size], kept[0]


def prepare_for_training(model: PreTrainedModel, *, gradient_checkpointing: bool) -> None:
    """Switch gradients on and dropout off: the ratio at the first minibatch must be 1."""
    model.requires_grad_(True)
    model.eval()
    if gradient_checkpointing:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        # transformers checkpoints in training mode only
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
