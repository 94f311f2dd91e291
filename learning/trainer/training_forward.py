"""One training forward: logits and last hidden states of packed sequences, at chosen positions only, in which types.

Works on any Hugging Face causal LM that takes a registered attention function: a hook before the output head keeps
just the rows that are asked for, so the [tokens, vocabulary] matrix is never larger than the responses, and what the
model does behind its head (soft-capping, scaling) stays as it is.

A bfloat16 weight has 8 significant bits: a step of less than 1/512 of it rounds to nothing, so at usual learning
rates most weights would never move. The optimizer therefore steps float32 weights, and `torch.autocast` rounds
them for each product, on devices that compute in bfloat16.

Source: Micikevicius et al. 2018, 'Mixed precision training', section 3.1 (a float32 master copy of the weights).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhfspec.core.errors import ConfigError, ModelError
from rlhfspec.engine.attention.backends import plan_attention_once
from rlhfspec.engine.decoding.logprobs import scaled_logits
from rlhfspec.engine.model.support import switch_attention
from rlhfspec.learning.trainer.batching import PackedSequences
from rlhfspec.learning.trainer.packed_attention import ATTENTION_NAME


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
    `with_logits`: the head computes nothing then. Products are computed in `compute_dtype` (`keeps_casts`:
    see `autocast`). A model whose attention is not ours (`prepare_for_training`) builds a mask
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


_CPU_VALUES = 1 << 18
"Of logits at once: a megabyte of float32."
_GPU_VALUES = 1 << 26


def token_statistics(
    logits: Float[Tensor, "M V"],
    token_ids: Int[Tensor, " M"],
    temperature: float,
    *,
    entropy: bool,
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"] | None]:
    """Log-softmax(logits / T) at `token_ids`, and the entropy in nats of the same distribution; differentiable.

    Autograd would keep a log-softmax [M, V] for each of the two. Here the logits are kept alone, and the backward pass
    computes the softmax of a few rows again: a quarter of the memory, and the rows are still in the processor's cache.
    Values are those of `engine.decoding.logprobs.token_logprobs`, to the bit.
    Source of the entropy: Schulman et al. 2017, equation 9 (the bonus S). Without `entropy` it is None.
    """
    logprobs, entropies = _TokenStatistics.apply(logits, token_ids, temperature, entropy)
    return logprobs, entropies if entropy else None


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs = logits.new_empty(len(logits), dtype=torch.float32)
        entropies = torch.zeros_like(logprobs)
        for rows in _chunks(logits):
            whole = torch.log_softmax(scaled_logits(logits[rows], temperature), dim=-1)
            logprobs[rows] = whole.gather(-1, token_ids[rows, None]).squeeze(-1)
            if entropy:
                entropies[rows] = _entropy(whole)
        ctx.save_for_backward(logits, token_ids)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        of_logprob, of_entropy = grads
        logits, token_ids = ctx.saved_tensors
        out = torch.zeros_like(logits)
        for rows in _chunks(logits):
            whole = torch.log_softmax(scaled_logits(logits[rows], ctx.temperature), dim=-1)
            probs = whole.exp()
            grad = torch.zeros_like(probs)
            if of_entropy is not None:
                # dH/dz = -p (log p + H); a masked-out token has p = 0
                finite = whole.clamp_min(torch.finfo(torch.float32).min)
                grad -= of_entropy[rows, None] * probs * (finite + _entropy(whole)[:, None])
            if of_logprob is not None:
                grad -= of_logprob[rows, None] * probs
                grad.scatter_add_(-1, token_ids[rows, None], of_logprob[rows, None])
            out[rows] = (grad if ctx.temperature in (0.0, 1.0) else grad / ctx.temperature).to(out.dtype)
        return out, None, None, None


def _entropy(logprobs: Tensor) -> Tensor:
    # a masked-out token has log-probability -inf and adds nothing: 0 * -inf would be NaN
    return -(logprobs.exp() * logprobs.clamp_min(torch.finfo(torch.float32).min)).sum(dim=-1)


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Rows whose logits fit into the cache; the result does not depend on them."""
    values = _CPU_VALUES if logits.device.type == "cpu" else _GPU_VALUES
    step = max(1, values // max(logits.shape[1], 1))
    for start in range(0, len(logits), step):
        yield slice(start, start + step)


def compute_dtype_on(device: torch.device, published: torch.dtype) -> torch.dtype:
    """What products are computed in for weights that are published in a type: float32 unless a GPU has it natively.

    Instances on a CPU widen bfloat16 weights to float32, with or without instructions for it; so does the learner.
    """
    native = device.type == "cuda" and (
        published != torch.bfloat16 or torch.cuda.is_bf16_supported(including_emulation=False)
    )
    return published if native else torch.float32


def autocast(
    device: torch.device, compute_dtype: torch.dtype, *, keeps_casts: bool = True
) -> AbstractContextManager[object]:
    """Compute matrix products in `compute_dtype`; float32 leaves everything as it is.

    `keeps_casts`: a rounded weight is kept until the block ends; not where weights are gathered and given back.
    """
    if compute_dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=compute_dtype, cache_enabled=keeps_casts)


def require_master_weights(model: nn.Module) -> None:
    """Raise ConfigError when an optimizer would step weights of another type than float32."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            why = "the learner is not tested"
            if parameter.dtype.itemsize < torch.float32.itemsize:
                why = "most steps round to nothing (at a learning rate of 1e-6, 98 of 100 weights never move)"
            raise ConfigError(
                f"the optimizer would step '{name}' in {dtype}, where {why}; expected float32 weights: build the "
                "model with dtype float32 and let compute_dtype say what to compute in"
            )


def hold_linears_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep a frozen model's linear weights in the type that autocast rounds them to: same bits, less memory.

    Norms, embeddings and a head tied to one stay: their type is that of the hidden states.
    """
    elsewhere = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Linear)
        for parameter in module.parameters(recurse=False)
    }
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in elsewhere:
            module.to(dtype)


_num_forwards = 0


def note_forward() -> None:
    """One more was made."""
    global _num_forwards
    _num_forwards += 1


def forwards_made() -> int:
    """So far, of all models; from any thread."""
    return _num_forwards
