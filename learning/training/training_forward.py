"""One training forward: logits and last hidden states of packed sequences, at chosen positions only, in which types.

Works on any Hugging Face causal LM that takes a registered attention function: a hook before the output head keeps
just the rows that are asked for. Their log-probabilities are computed by chunks in the head's place, so that a large
vocabulary costs a chunk's memory; or from whole logits, where something comes behind the head or reads them.

A bfloat16 weight has 8 significant bits: a step of less than 1/512 of it rounds to nothing, so at usual learning
rates most weights would never move. The optimizer therefore steps float32 weights, and `torch.autocast` rounds
them for each product, on devices that compute in bfloat16.

Source: Micikevicius et al. 2018, 'Mixed precision training', section 3.1 (a float32 master copy of the weights).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ...core.errors import ConfigError, ModelError
from ...core.settings.trainer import ComputeDtype
from ...engine.attention.backends import plan_attention_once
from ...engine.calibration.engine_provenance import device_name
from ...engine.model.comparison import failing_is_refused
from ...engine.model.linears import has_bfloat16
from ...engine.model.support import unsupported
from ...engine.weights.causal_lm import PreTrainedModel
from .batching import PackedSequences
from .objectives.distillation import Divergence
from .objectives.head_statistics import HeadSettings, TeacherLogits, head_statistics, token_statistics
from .packed_attention import ATTENTION_NAME, attend_packed
from .sharded import source_of

logger = logging.getLogger(__name__)


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
    see `autocast`).
    Raises ModelError when the model has no output head to be asked, or attention that knows no trees.
    """
    there = packed.to(model.device)
    kept: list[Tensor] = []

    def keep_rows(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        kept.append(args[0][0, there.before_targets])
        return (kept[0][None] if with_logits else kept[0][None, :0],)

    with _head_of(model).register_forward_pre_hook(keep_rows):
        logits = run_packed(model, there, compute_dtype, keeps_casts)
    return logits[0, :, :vocab_size], kept[0]


class Statistics(NamedTuple):
    """What a training forward says of the tokens that a pack is to predict."""

    logprobs: Float[Tensor, " M"]
    entropy: Float[Tensor, " M"] | None
    states: Float[Tensor, "M H"]
    "that predict them"
    divergence: Float[Tensor, " M"] | None = None
    "from a teacher"

    def of(self, chosen: Tensor) -> Statistics:
        """Those of some of the tokens, by their places."""
        return Statistics(*(None if values is None else values[chosen] for values in self))  # type: ignore[arg-type]


def response_statistics(
    model: PreTrainedModel,
    packed: PackedSequences,
    vocab_size: int,
    temperature: float,
    *,
    entropy: bool,
    learns_entropy: bool = True,
    compute_dtype: torch.dtype = torch.float32,
    keeps_casts: bool = True,
    logits: list[Tensor] | None = None,
    teacher: TeacherLogits | None = None,
) -> Statistics:
    """`token_statistics` of `packed.targets` and the states that predict them, without their logits at once.

    `learns_entropy`: whether entropies have a gradient, which costs as much as that of the log-probabilities.
    `logits`: a list that gets them whole all the same, [M, V], without a gradient; it changes nothing else.
    `teacher`: what it says of the `N` tokens that are predicted once.
    What several sequences have in common is predicted once. Behind a head that has a bias, adapters, or something that
    the model does to its logits (soft-capping, scaling), they are computed whole: the chunks are of a bare product.
    Other arguments and errors as of `response_logits`.
    """
    there = packed.to(model.device)
    chunks: list[Tensor] | None = None if logits is None else []
    # a function's own forward runs without
    has_backward = torch.is_grad_enabled()

    def value(states: Tensor, weight: Tensor) -> Tensor:
        dtype = _products_in(states, compute_dtype)
        settings = HeadSettings(vocab_size, dtype, temperature, entropy, has_backward, teacher)
        # leaves by the model's output, which is where shards of weights are waited for in the backward pass
        found = head_statistics(states, weight, there.targets_once, settings, chunks)
        logprobs, entropies, divergences = found
        entropies = entropies if entropy and learns_entropy else entropies.detach()
        more = () if teacher is None else (divergences,)
        return torch.stack((logprobs, entropies, *more), dim=-1)[None]

    by_head = _at_head(model, there, there.before_once, value, compute_dtype, keeps_casts)
    if by_head is None:
        whole, states = response_logits(
            model, there, vocab_size, compute_dtype=compute_dtype, keeps_casts=keeps_casts
        )
        if logits is not None:
            logits.append(whole.detach())
        of_each = None if teacher is None else teacher.of_each(there.which_once)
        of_tokens = token_statistics(whole, there.targets, temperature, entropy=entropy, teacher=of_each)
    else:
        found, states = by_head
        if logits is not None and chunks:
            logits.append(torch.cat(chunks)[there.which_once])
        of_tokens = found[0, there.which_once].unbind(-1)
        states = states[there.which_once]
    return Statistics(
        of_tokens[0],
        of_tokens[1] if entropy else None,
        states,
        of_tokens[2] if teacher is not None else None,
    )


@torch.no_grad()
def teacher_logits(
    model: PreTrainedModel,
    packed: PackedSequences,
    vocab_size: int,
    divergence: Divergence,
    *,
    compute_dtype: torch.dtype,
    keeps_casts: bool,
) -> TeacherLogits:
    """What a frozen model says of `packed.targets`; whole logits only behind what is no bare head."""
    there = packed.to(model.device)
    weights: list[Tensor] = []

    def keep(states: Tensor, weight: Tensor) -> Tensor:
        kept = weight[:vocab_size].to(_products_in(states, compute_dtype))
        # storage of a weight that is put together for the forward goes with it
        weights.append(kept if keeps_casts else kept.clone())
        return states.new_zeros(1, 0, 1)

    by_head = _at_head(model, there, there.before_targets, keep, compute_dtype, keeps_casts)
    if by_head is not None:
        return TeacherLogits(states=by_head[1].to(weights[0].dtype), weight=weights[0], divergence=divergence)
    whole, _ = response_logits(model, there, vocab_size, compute_dtype=compute_dtype, keeps_casts=keeps_casts)
    return TeacherLogits(states=whole, weight=None, divergence=divergence)


def _at_head(
    model: PreTrainedModel,
    there: PackedSequences,
    places: Int[Tensor, " P"],
    value: Callable[[Tensor, Tensor], Tensor],
    compute_dtype: torch.dtype,
    keeps_casts: bool,
) -> tuple[Tensor, Float[Tensor, "P H"]] | None:
    """Run a forward with `value` of the states at `places` and the head's weight in its head's place.

    Its value and these states; None behind a head that is more than a product with a weight.
    """
    head = _head_of(model)
    if model in _WHOLE_LOGITS or not isinstance(head, nn.Linear) or head.bias is not None:
        return None
    kept: list[Tensor] = []

    def keep_rows(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        kept.append(args[0][0, places])
        return (kept[0][None, :0],)

    def in_its_place(module: Any, _: Any, __: Any) -> Tensor:
        kept.append(value(kept[0], module.weight))
        return kept[1]

    # before shards of the head are given back
    with head.register_forward_pre_hook(keep_rows), head.register_forward_hook(in_its_place, prepend=True):
        found = run_packed(model, there, compute_dtype, keeps_casts)
    if found is not kept[1]:
        _WHOLE_LOGITS.add(model)
        return None
    return found, kept[0]


_WHOLE_LOGITS: WeakSet[PreTrainedModel] = WeakSet()
"Models that do something behind their heads."


def _head_of(model: PreTrainedModel) -> nn.Module:
    if model.config._attn_implementation != ATTENTION_NAME:
        raise ModelError(
            f"{type(model).__name__} attends by '{model.config._attn_implementation}', which would see the tokens of "
            "other sequences in a pack; expected a model that went through prepare_for_training"
        )
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise ModelError(f"{type(model).__name__} has no output head; expected a causal language model")
    return head


def run_packed(
    model: PreTrainedModel, there: PackedSequences, compute_dtype: torch.dtype, keeps_casts: bool
) -> Tensor:
    """What a model's forward over a pack gives."""
    with autocast(model.device, compute_dtype, keeps_casts=keeps_casts):
        logits = model(**there.inputs).logits
    note_forward()
    return logits


def _products_in(states: Tensor, compute_dtype: torch.dtype) -> torch.dtype:
    return states.dtype if compute_dtype == torch.float32 else compute_dtype


def prepare_for_training(model: PreTrainedModel, *, gradient_checkpointing: bool) -> None:
    """Attend to packed sequences, switch gradients on and dropout off: the ratio at the first minibatch must be 1."""
    attend_packed(model)
    plan_attention_once()
    model.requires_grad_(True)
    model.eval()
    _switch_dropout_off(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in model.modules():
            # transformers checkpoints in training mode only; what is inside stays without a router's noise
            module.training = getattr(module, "gradient_checkpointing", False)


@torch.no_grad()
def require_packs(model: PreTrainedModel) -> None:
    """Raise ModelError where a sequence's states are not those that it has alone, whatever lies in the pack before it.

    They are not where layers mix tokens outside attention (convolutions, recurrences), mask by themselves (chunks), or
    do not hand attention what the pack is made of. The model is one that went through `prepare_for_training`.
    """
    if getattr(model.config.get_text_config(), "attention_chunk_size", None):
        raise unsupported(model, "its chunked attention needs a mask of its own")
    if model.device.type == "meta":
        return
    halves = [one.dtype for one in model.parameters() if one.dtype.itemsize < torch.float32.itemsize]
    dtype, tolerated = (halves[0], 0.1) if halves else (torch.float32, 1e-3)
    sequences = [np.arange(3), np.array([3, 4, 5, 6]), np.array([3, 4, 7])]

    # the root's forward alone gathers shards
    is_sharded, kept = isinstance(model, FSDPModule), []

    def states(packed: PackedSequences) -> Tensor:
        there = packed.to(model.device)
        with autocast(model.device, dtype, keeps_casts=not is_sharded):
            (model if is_sharded else model.base_model)(**there.inputs)
        return kept.pop().float()

    keep = model.base_model.register_forward_hook(lambda _, __, out: kept.append(out[0][0]))
    with keep, failing_is_refused(model, "its forward over a pack of sequences"):
        whole = PackedSequences.of(sequences)
        together = states(whole)
        differences = []
        for sequence, places in zip(sequences[1:], whole.places[1:], strict=True):
            alone = states(PackedSequences.of([sequence]))
            there = together[places.to(together.device)]
            differences.append((there - alone).norm(dim=-1) / alone.norm(dim=-1))
    # the middle one: a router's near tie may fall the other way
    difference = float(torch.cat(differences).median())
    if difference > tolerated:
        raise unsupported(
            model,
            f"in a pack the states of a sequence differ by {difference:.1e} of their length from those that it has "
            "alone: its layers mix tokens outside attention, or do not tell attention what is in a pack",
        )


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


def compute_dtype_on(
    device: torch.device, published: torch.dtype, wanted: ComputeDtype = "auto"
) -> torch.dtype:
    """What products are computed in for weights that are published in a type, by `trainer.compute_dtype`.

    auto: float32 unless a GPU has it natively. Instances on a CPU widen bfloat16 weights to float32, with or without
    instructions for it; so does the learner.
    Raises ConfigError where bfloat16 is wanted of a device without instructions for it.
    """
    on_gpu = device.type == "cuda"
    native = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else has_bfloat16()
    if wanted == "auto":
        return published if on_gpu and (published != torch.bfloat16 or native) else torch.float32
    if wanted == "bfloat16" and not native:
        raise ConfigError(
            "trainer.compute_dtype is bfloat16, which needs instructions for it (AVX512-BF16 or AMX of a CPU); found "
            f"{device_name(device)}{'' if on_gpu else ', ' + torch.backends.cpu.get_cpu_capability()}; set it to auto"
        )
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


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


FUSED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"Whose norms, rotations and gates Liger's kernels were compared with."


def use_fused_rows(*models: PreTrainedModel | None) -> None:
    """On a GPU, let Liger's kernels compute what lies between products: half of its bytes (Hsu et al. 2024)."""
    for model in models:
        if model is not None and model.device.type == "cuda":
            logger.info("%s between its products: %s", type(model).__name__, fused_rows(model))


def fused_rows(model: PreTrainedModel) -> str:
    """Do so, wherever the model is; say what computes."""
    kind, device = model.config.model_type, model.device.type
    if kind not in FUSED_FAMILIES:
        return f"torch's kernels, one an operator; Liger's are used for {', '.join(FUSED_FAMILIES)}"
    if find_spec("liger_kernel") is None:
        return "torch's kernels, one an operator; pip install liger-kernel halves their bytes"
    modeling = vars(import_module(f"transformers.models.{kind}.modeling_{kind}"))
    own = dict(modeling)
    apply = getattr(import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{kind}")
    apply(model=model, fused_linear_cross_entropy=False)
    there, elsewhere = (of["apply_rotary_pos_emb"] for of in (modeling, own))
    # nothing for models of other devices, and those to come
    modeling |= own
    modeling["apply_rotary_pos_emb"] = lambda q, *k: (there if q.device.type == device else elsewhere)(q, *k)
    return "Liger's kernels"


def hold_linears_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep a frozen model's linear weights in the type that autocast rounds them to: same bits, less memory.

    Norms, embeddings and a head tied to one stay: their type is that of the hidden states. So do weights that would
    lose bits: they are published, and scored with, as they came.
    """
    elsewhere = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Linear)
        for parameter in module.parameters(recurse=False)
    }
    for module in model.modules():
        if (
            not isinstance(module, nn.Linear)
            or id(module.weight) in elsewhere
            or module.weight.dtype == dtype
        ):
            continue
        values = [one if (it := source_of(one)) is None else it for one in module.parameters(recurse=False)]
        if all(torch.equal(own.to(dtype).to(own.dtype), own) for own in values):
            module.to(dtype)


_num_forwards = 0


def note_forward() -> None:
    """One more was made."""
    global _num_forwards
    _num_forwards += 1


def forwards_made() -> int:
    """So far, of all models; from any thread."""
    return _num_forwards
