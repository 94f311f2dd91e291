"""The loss of all levels against the target's own distributions, by pieces, with its gradient computed on the way.

Logits of a whole step would take gigabytes; here a few dozen rows exist at a time. The target's distribution of a
position is computed once for all levels that predict it.

Source: Hinton et al. 2015, section 2 (soft targets); gradients in the forward pass as in Hsu et al. 2024, 'Liger
Kernel' (FusedLinearCrossEntropy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .stoppable import Products, pieces_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRows:
    """What the target says at every anchor's first predicted position, over the draft vocabulary."""

    states: Float[Tensor, "M H"]
    "behind the target's final norm"
    weight: Float[Tensor, "D H"]
    "rows of the target's output matrix that the draft vocabulary has"
    temperature: float
    "above 0, of both distributions"


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelRows:
    """The rows of a level: which of the target's each is compared with, and what it weighs in the loss."""

    targets: Int[Tensor, " R"]
    "ascending indices of TargetRows.states"
    scale: float


class SoftTargetLoss(torch.autograd.Function):
    """Sum over levels and rows of scale * KL(target || draft).

    `apply(products, target, levels, losses, overlaps, weight, *states)`: `weight` is lm_head's, `states` each level's
    behind the head's norm. Each level's sum of KL is written into `losses` [K], each row's overlap of the two
    distributions, sum of min(p, q), into `overlaps`, a tensor [R] a level.
    """

    @staticmethod
    def forward(
        ctx: Any,
        products: Products,
        target: TargetRows,
        levels: Sequence[LevelRows],
        losses: Tensor,
        overlaps: Sequence[Tensor],
        weight: Tensor,
        *states: Tensor,
    ) -> Tensor:
        """See the class."""
        work = _Work(products, target, levels, losses, overlaps, weight, states)
        ctx.save_for_backward(*work.run())
        return work.total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradients were computed beside the loss."""
        return (None, None, None, None, None, *(grads[0] * saved for saved in ctx.saved_tensors))


class _Work:
    def __init__(
        self,
        products: Products,
        target: TargetRows,
        levels: Sequence[LevelRows],
        losses: Tensor,
        overlaps: Sequence[Tensor],
        weight: Tensor,
        states: Sequence[Tensor],
    ) -> None:
        self._products, self._target, self._levels = products, target, levels
        self._losses, self._overlaps = losses, overlaps
        self._weight, self._states = products.cast(weight), [each.to(products.dtype) for each in states]
        self._weight_grad = torch.zeros_like(weight)
        self._state_grads = [torch.empty_like(each) for each in states]
        self.total = weight.new_zeros(())

    def run(self) -> tuple[Tensor, ...]:
        """Gradients of weight and states."""
        rows = self._products.piece_rows(self._weight)
        for piece in pieces_of(len(self._target.states), rows):
            probs, logprobs = self._of_target(piece)
            parts = []
            for level in range(len(self._levels)):
                found = self._level(level, piece, probs, logprobs)
                if found is not None:
                    parts.append(found)
            self._add_weight_grad(
                torch.cat([grad for grad, _ in parts]), torch.cat([state for _, state in parts])
            )
        return (self._weight_grad, *self._state_grads)

    def _of_target(self, piece: slice) -> tuple[Tensor, Tensor]:
        logits = self._products.product(self._target.states[piece], self._target.weight.t())
        self._products.look()
        logprobs = logits.div_(self._target.temperature).log_softmax(-1)
        return logprobs.exp(), logprobs

    def _level(
        self, level: int, piece: slice, probs: Tensor, logprobs: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Gradient of a level's logits in a piece, and the states that they were computed from."""
        of = self._levels[level]
        ends = torch.tensor([piece.start, piece.stop], device=of.targets.device)
        first, end = torch.searchsorted(of.targets, ends).tolist()
        if first == end:
            return None
        states = self._states[level][first:end]
        logits = self._products.product(states, self._weight.t())
        self._products.look()
        which = of.targets[first:end] - piece.start
        wanted = probs[which]
        drafted = logits.div_(self._target.temperature).log_softmax(-1)
        kl = (wanted * (logprobs[which] - drafted)).sum()
        self._losses[level] += kl
        self.total += of.scale * kl
        self._products.look()
        drafted = drafted.exp_()
        self._overlaps[level][first:end] = torch.minimum(wanted, drafted).sum(-1)
        grad = drafted.sub_(wanted).mul_(of.scale / self._target.temperature)
        grad = grad.to(self._weight.dtype)
        self._state_grads[level][first:end] = self._products.product(grad, self._weight)
        return grad, states

    def _add_weight_grad(self, grad: Tensor, states: Tensor) -> None:
        for piece in pieces_of(len(self._weight), self._products.piece_rows(states)):
            self._weight_grad[piece] += self._products.product(grad[:, piece].t(), states)
