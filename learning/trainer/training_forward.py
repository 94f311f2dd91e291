"""One training forward: logits and last hidden states of packed sequences, at chosen positions only.

Works on any Hugging Face causal LM that takes a registered attention function: a hook before the output head keeps
just the rows that are asked for, so the [tokens, vocabulary] matrix is never larger than the responses, and what the
model does behind its head (soft-capping, scaling) stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhfspec.core.errors import ModelError
from rlhfspec.engine.attention.backends import plan_attention_once
from rlhfspec.engine.model.support import switch_attention
from rlhfspec.learning.trainer.batching import PackedSequences
from rlhfspec.learning.trainer.forward_count import note_forward
from rlhfspec.learning.trainer.packed_attention import ATTENTION_NAME
from rlhfspec.learning.trainer.precision import autocast


def response_logits(
    model: PreTrainedModel,
    packed: PackedSequences,
    vocab_size: int,
    *,
    compute_dtype: torch.dtype = torch.float32,
    with_logits: bool = True,
    keeps_casts: bool = True,
) -> tuple[Float[Tensor, "L V"], Float[Tensor, "M H"]]:
    """Return logits and hidden states that predict `packed.targets`, in their order.

    Logits are those of the first `vocab_size` ids, as in the engine: padded ids take no part. L is M, and 0 without
    `with_logits`: the head computes nothing then. Products are computed in `compute_dtype` (`keeps_casts`: see
    `learning.trainer.precision.autocast`). A model whose attention is not ours (`prepare_for_training`) builds a mask
    of its own from the position ids, and gives the same.
    Raises ModelError when the model has no output head to be asked.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise ModelError(f"{type(model).__name__} has no output head; expected a causal language model")
    kept: list[Tensor] = []
    before_targets = packed.before_targets.to(model.device)

    def keep_rows(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        kept.append(args[0][0, before_targets])
        return (kept[0][None] if with_logits else kept[0][None, :0],)

    handle = head.register_forward_pre_hook(keep_rows)
    try:
        with autocast(model.device, compute_dtype, keeps_casts=keeps_casts):
            logits = model(
                input_ids=packed.ids[None].to(model.device),
                position_ids=packed.position_ids[None].to(model.device),
                sequence_lengths=packed.lengths,
                sequence_starts=packed.starts.to(model.device) if model.device.type == "cuda" else None,
                use_cache=False,
            ).logits
    finally:
        handle.remove()
    note_forward()
    return logits[0, :, :vocab_size], kept[0]


def prepare_for_training(model: PreTrainedModel, *, gradient_checkpointing: bool) -> None:
    """Attend to packed sequences, switch gradients on and dropout off: the ratio at the first minibatch must be 1."""
    switch_attention(model, ATTENTION_NAME)
    plan_attention_once()
    model.requires_grad_(True)
    model.eval()
    _switch_dropout_off(model)
    if gradient_checkpointing:
        # transformers checkpoints in training mode only
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})


def _switch_dropout_off(model: PreTrainedModel) -> None:
    """Set every dropout of the model to 0: modules, what modules hand to functions, and the config's fields.

    Evaluation mode is not enough: checkpointed layers run in training mode.
    """
    for holder in (model.config, model.config.get_text_config(), *model.modules()):
        if isinstance(holder, nn.Dropout):
            holder.p = 0.0
        for name, value in vars(holder).items():
            if "drop" in name and isinstance(value, float):
                setattr(holder, name, 0.0)
