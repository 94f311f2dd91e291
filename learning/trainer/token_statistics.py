"""Log-probability and entropy of response tokens, a few rows of logits at a time.

Autograd keeps a log-softmax [M, V] for each of the two, and builds a gradient of that size for every step between
them and the logits. Here the logits are kept alone, and the backward pass computes the softmax of a few rows again:
a quarter of the memory, and the rows are still in the processor's cache.
Values are those of `engine.decoding.logprobs.token_logprobs`, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhfspec.engine.decoding.logprobs import scaled_logits

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
