"""The one log-probability function of rollouts and training: equal logits give equal log-probabilities.

The logits are not equal to the bit: the learner runs the Hugging Face module, an engine its own forward or its own
products. The difference is rounding, and measured in every update (figure `learner/ratio_at_first_minibatch`); with
`trainer.scoring` engine the learner takes the engine's values (`learning.training.engine_scoring`) and there is none.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from ..parts import PARTS, part_width


def scaled_logits(logits: Float[Tensor, "... V"], temperature: float) -> Float[Tensor, "... V"]:
    """Return `logits / T` in float32, of float64 in that; greedy decoding (T = 0) reports at T = 1."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature in (0.0, 1.0) else logits / temperature


def token_logprobs(
    logits: Float[Tensor, "M V"], token_ids: Int[Tensor, " M"], temperature: float
) -> Float[Tensor, " M"]:
    """Return log-softmax(logits / T) at `token_ids`: PPO's log-probability, unfiltered.

    Source: design 3.1, `policy_logprob`. Differentiable.
    """
    scaled = scaled_logits(logits, temperature)
    if scaled.device.type != "cpu" or torch.is_grad_enabled():
        return log_softmax(scaled).gather(-1, token_ids[:, None]).squeeze(-1)
    # the same bits, and no pass over all that nobody asked for
    return (scaled.gather(-1, token_ids[:, None]) - _normalizer_of(scaled)).squeeze(-1)


def log_softmax(scaled: Float[Tensor, "M V"]) -> Float[Tensor, "M V"]:
    """Return the log-softmax of every row, the same bits whichever rows stand beside it. Differentiable.

    torch's own on a CPU adds a row's exponentials up one after the other: its error grows with the vocabulary, all
    one way (1e-5 at 151,936 ids); `logsumexp` adds them up as a tree. On a GPU torch's own is a tree too.
    """
    if scaled.device.type != "cpu":
        return torch.log_softmax(scaled, dim=-1)
    return _LogSoftmax.apply(scaled) if torch.is_grad_enabled() else _log_softmax(scaled)


def _log_softmax(scaled: Tensor) -> Tensor:
    return scaled - _normalizer_of(scaled)


def _normalizer_of(scaled: Float[Tensor, "M V"]) -> Float[Tensor, "M 1"]:
    return normalizer(part_sums(scaled, part_width(scaled.shape[-1])))


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scaled: Tensor) -> Tensor:
        found = _log_softmax(scaled)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (found,) = ctx.saved_tensors
        return grads[0] - found.exp() * grads[0].sum(-1, keepdim=True)


def part_sums(scaled: Float[Tensor, "M V"], width: int) -> Float[Tensor, "M parts"]:
    """Return the log of each part's sum of exponentials (`engine.parts.part_width`)."""
    missing = -scaled.shape[-1] % width
    rows = F.pad(scaled, (0, missing), value=float("-inf")) if missing else scaled.contiguous()
    return _logsumexp(rows.view(len(rows), -1, width))


def normalizer(sums: Float[Tensor, "M parts"]) -> Float[Tensor, "M 1"]:
    """Return that of whole rows, from their parts', whichever ranks hold them."""
    # a part without ids adds nothing, and is not always there
    missing = PARTS - sums.shape[1]
    return _logsumexp(F.pad(sums, (0, missing), value=float("-inf")) if missing else sums)[:, None]


def _logsumexp(rows: Tensor) -> Tensor:
    # the sum of one row alone would be split among torch's threads
    return rows.expand(2, *rows.shape[1:]).logsumexp(-1)[:1] if len(rows) == 1 else rows.logsumexp(-1)
