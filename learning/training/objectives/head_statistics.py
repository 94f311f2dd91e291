"""Of logits, or of states and the head that makes them: log-probabilities, entropies, distances from a teacher.

Rows at a time, so that a large vocabulary costs a chunk's memory and not that of all logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ....engine.decoding.logprobs import log_softmax, scaled_logits
from .distillation import Divergence

_CPU_VALUES = 1 << 18
"Of logits that are worked on at once, of which there are copies: a megabyte of float32."
_GPU_VALUES = 1 << 24
_PRODUCT_VALUES = 1 << 23
"Of logits of one product with the head, on a CPU: enough rows to read the weights once for all of them."
_GPU_PRODUCT_VALUES = 1 << 26
_GPU_PRODUCT_ROWS = 2048
"Each product reads the head, and adds to its whole gradient: of more rows neither is felt beside the product."
_KEPT_VALUES = 1 << 26
"Of logits of one pack that its backward pass finds again; those beyond are computed anew."
_COPIES = 8
"Of what is worked on at once, in float32, where an entropy learns too (counted)."


_room_bytes = 0


def use_room(room_bytes: int) -> None:
    """Let products with the head on this process's GPU take so many bytes more than the memory plan counts of them."""
    global _room_bytes
    _room_bytes = room_bytes


def most_logits(num_tokens: int, vocab_size: int, *, on_gpu: bool) -> int:
    """Values of a pack's logits that are there at once where they go by chunks.

    Kept ones, the product of a chunk, which becomes its gradient, and copies of the part of it that is worked on.
    """
    whole = num_tokens * vocab_size
    product = min(whole, max(_GPU_PRODUCT_VALUES if on_gpu else _PRODUCT_VALUES, vocab_size))
    return min(whole, _KEPT_VALUES) + product + logit_copies(num_tokens, vocab_size, on_gpu=on_gpu)


def logit_copies(num_tokens: int, vocab_size: int, *, on_gpu: bool) -> int:
    """Values of the copies of what is worked on at once, whole logits or not."""
    return _COPIES * min(num_tokens * vocab_size, max(_GPU_VALUES if on_gpu else _CPU_VALUES, vocab_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherLogits:
    """What a teacher says of `N` tokens that a student predicts, some rows at a time; without a gradient."""

    states: Float[Tensor, "N H"]
    "that its head makes logits of; the logits themselves [N, V] where there is no `weight`"
    weight: Float[Tensor, "V H"] | None
    divergence: Divergence

    def logits(self, rows: slice) -> Float[Tensor, "n V"]:
        """Of some rows."""
        return self.states[rows] if self.weight is None else self.states[rows] @ self.weight.T

    def of_each(self, which: Int[Tensor, " M"]) -> TeacherLogits:
        """The same of tokens that several have in common, for each of them."""
        return replace(self, states=self.states[which])


def token_statistics(
    logits: Float[Tensor, "M V"],
    token_ids: Int[Tensor, " M"],
    temperature: float,
    *,
    entropy: bool,
    teacher: TeacherLogits | None = None,
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"], Float[Tensor, " M"]]:
    """Log-softmax(logits / T) at `token_ids`, entropy in nats, and distance from the teacher of the same distribution.

    Differentiable. Autograd would keep a log-softmax [M, V] for each of the three. Here the logits are kept alone, and
    the backward pass computes the softmax of a few rows again: the rows are still in the processor's cache.
    Values are those of `engine.decoding.logprobs.token_logprobs`, to the bit.
    Source of the entropy: Schulman et al. 2017, equation 9 (the bonus S). What is not asked for is 0.
    """
    settings = HeadSettings(logits.shape[1], logits.dtype, temperature, entropy, True, teacher)
    return _TokenStatistics.apply(logits, token_ids, settings)


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, token_ids: Tensor, settings: HeadSettings
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(logits, token_ids)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return _values(logits, token_ids, settings, slice(None))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        logits, token_ids = ctx.saved_tensors
        grad = torch.empty_like(logits)
        _gradient(logits, token_ids, ctx.settings, slice(None), grads, into=grad)
        return grad, None, None


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """How the statistics of a head's logits are computed."""

    vocab_size: int
    dtype: torch.dtype
    "of the product"
    temperature: float
    entropy: bool
    has_backward: bool
    "whether logits are kept for it"
    teacher: TeacherLogits | None = None


def head_statistics(
    states: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    token_ids: Int[Tensor, " N"],
    settings: HeadSettings,
    seen: list[Tensor] | None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, " N"]]:
    """As `token_statistics` of the product of states and a head's weight, of which only a part is there at once.

    What is kept for the backward pass, in full precision as log-probabilities, becomes the gradient in its place.
    `seen`: a list that gets the logits of each part.
    """
    return _HeadStatistics.apply(states, weight, token_ids, settings, seen)


class _HeadStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        token_ids: Tensor,
        settings: HeadSettings,
        seen: list[Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        vocab_size, dtype = settings.vocab_size, settings.dtype
        left, right = states.to(dtype), weight[:vocab_size].to(dtype)
        nothing = torch.zeros(0, dtype=torch.promote_types(dtype, torch.float32), device=states.device)
        kept, found = [], [(nothing,) * 3]
        # shorter types would round them
        ctx.keeps_logprobs = dtype.itemsize >= torch.float32.itemsize
        for rows in _product_chunks(states, vocab_size):
            logits = left[rows] @ right.T
            is_kept = settings.has_backward and rows.stop * vocab_size <= _KEPT_VALUES
            if seen is not None:
                seen.append(logits.clone() if is_kept else logits)
            into = logits if is_kept and ctx.keeps_logprobs else None
            found.append(_values(logits, token_ids[rows], settings, rows, into=into))
            if is_kept:
                kept.append(logits)
            # not beside the next
            del logits, into
        ctx.save_for_backward(states, weight, token_ids, *kept)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        logprobs, entropies, divergences = (torch.cat(parts) for parts in zip(*found, strict=True))
        return logprobs, entropies, divergences

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        states, weight, token_ids, *kept = ctx.saved_tensors
        settings = ctx.settings
        vocab_size, dtype = settings.vocab_size, settings.dtype
        left, right = states.to(dtype), weight[:vocab_size].to(dtype)
        of_states, of_weight = (
            torch.zeros_like(one) if is_needed else None
            for one, is_needed in zip((states, weight), ctx.needs_input_grad, strict=False)
        )
        for i, rows in enumerate(_product_chunks(states, vocab_size)):
            grad = kept[i] if i < len(kept) else left[rows] @ right.T
            are_logprobs = i < len(kept) and ctx.keeps_logprobs
            parts = [None if one is None else one[rows] for one in grads]
            _gradient(grad, token_ids[rows], settings, rows, parts, into=grad, are_logprobs=are_logprobs)
            if of_states is not None:
                _add_product(of_states[rows], grad, right)
            if of_weight is not None:
                _add_product(of_weight[:vocab_size], grad.T, left[rows])
            del grad
        return of_states, of_weight, None, None, None


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product in the type that is added up in; on a GPU no shorter one lies between them."""
    if into.dtype == left.dtype:
        into.addmm_(left, right)
    elif into.device.type == "cpu":
        into += left @ right
    else:
        torch.addmm(into, left, right, out_dtype=into.dtype, out=into)


def _values(
    logits: Tensor, token_ids: Tensor, settings: HeadSettings, places: slice, into: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`places`: of these logits among the teacher's. `into`, if any, gets the log-softmax."""
    temperature, teacher = settings.temperature, settings.teacher
    logprobs = scaled_logits(logits[:, 0], 1.0).clone()
    entropies, divergences = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
    taught = None if teacher is None else teacher.logits(places)
    for rows in _chunks(logits):
        whole = log_softmax(scaled_logits(logits[rows], temperature))
        logprobs[rows] = whole.gather(-1, token_ids[rows, None]).squeeze(-1)
        if settings.entropy:
            entropies[rows] = _entropy(whole)
        if teacher is not None and taught is not None:
            divergences[rows] = teacher.divergence.of(
                whole, log_softmax(scaled_logits(taught[rows], temperature))
            )
        if into is not None:
            into[rows] = whole
    return logprobs, entropies, divergences


def _gradient(
    logits: Tensor,
    token_ids: Tensor,
    settings: HeadSettings,
    places: slice,
    grads: Sequence[Tensor | None],
    *,
    into: Tensor,
    are_logprobs: bool = False,
) -> None:
    """Write that of the logits, which may lie there; `are_logprobs`: they are log-probabilities already."""
    temperature, teacher = settings.temperature, settings.teacher
    of_logprob, of_entropy, of_divergence = grads
    taught = None if teacher is None or of_divergence is None else teacher.logits(places)
    has_more = of_entropy is not None or of_divergence is not None
    for rows in _chunks(logits):
        whole = logits[rows] if are_logprobs else log_softmax(scaled_logits(logits[rows], temperature))
        probs = whole.exp()
        grad = torch.zeros_like(probs) if has_more or of_logprob is None else probs * -of_logprob[rows, None]
        if of_entropy is not None:
            # dH/dz = -p (log p + H); a masked-out token has p = 0
            finite = whole.clamp_min(torch.finfo(torch.float32).min)
            grad -= of_entropy[rows, None] * probs * (finite + _entropy(whole)[:, None])
        if teacher is not None and taught is not None and of_divergence is not None:
            taught_logprobs = log_softmax(scaled_logits(taught[rows], temperature))
            of_whole = of_divergence[rows, None] * teacher.divergence.gradient(whole, taught_logprobs)
            grad += of_whole - probs * of_whole.sum(dim=-1, keepdim=True)
        if of_logprob is not None:
            if has_more:
                grad -= of_logprob[rows, None] * probs
            grad.scatter_add_(-1, token_ids[rows, None], of_logprob[rows, None])
        into[rows] = (grad if temperature in (0.0, 1.0) else grad / temperature).to(into.dtype)


def _entropy(logprobs: Tensor) -> Tensor:
    # a masked-out token has log-probability -inf and adds nothing: 0 * -inf would be NaN
    return -(logprobs.exp() * logprobs.clamp_min(torch.finfo(torch.float32).min)).sum(dim=-1)


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Rows whose logits fit into the cache; the result does not depend on them."""
    values = _CPU_VALUES if logits.device.type == "cpu" else _GPU_VALUES
    return _row_chunks(logits.shape[0], logits.shape[1], values)


def _product_chunks(states: Tensor, width: int) -> Iterator[slice]:
    """Rows whose logits are computed by one product."""
    if states.device.type == "cpu":
        return _row_chunks(len(states), width, _PRODUCT_VALUES)
    most = _GPU_PRODUCT_VALUES + _room_bytes // torch.float32.itemsize
    return _row_chunks(len(states), width, max(_GPU_PRODUCT_VALUES, min(_GPU_PRODUCT_ROWS * width, most)))


def _row_chunks(num_rows: int, width: int, values: int) -> Iterator[slice]:
    step = max(1, values // max(width, 1))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
