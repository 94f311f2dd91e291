"""How far a student's distribution over the vocabulary is from its teacher's, token by token.

Sources: Agarwal et al. 2024, 'On-policy distillation of language models' (GKD), section 3; Gu et al. 2024, 'MiniLLM',
section 2.1 (why the reverse divergence, on the student's own samples).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Divergence:
    """A generalised Jensen-Shannon divergence, in nats; `beta` as TRL's.

    1: reverse, KL(student || teacher); 0: forward, KL(teacher || student); between: beta KL(teacher || m) +
    (1 - beta) KL(student || m) with the mixture m = beta teacher + (1 - beta) student (GKD, equation 1).
    `top_k`: over the teacher's so many likeliest tokens, and all others as one.
    """

    beta: float = 1.0
    top_k: int | None = None

    def of(self, student: Float[Tensor, "N V"], teacher: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
        """Of log-probabilities, the teacher's without a gradient."""
        # 0 * -inf would be NaN: what is masked out has no share
        least = torch.finfo(student.dtype).min
        student, teacher = student.clamp_min(least), teacher.clamp_min(least)
        if self.top_k is not None and self.top_k < student.shape[-1]:
            likeliest = teacher.topk(self.top_k, dim=-1).indices
            student, teacher = _with_rest(student, likeliest), _with_rest(teacher, likeliest)
        if self.beta == 1.0:
            return _kl(student, teacher)
        if self.beta == 0.0:
            return _kl(teacher, student)
        shares = torch.tensor([1.0 - self.beta, self.beta], device=student.device).log()
        mixture = torch.logaddexp(student + shares[0], teacher + shares[1])
        return self.beta * _kl(teacher, mixture) + (1.0 - self.beta) * _kl(student, mixture)

    def gradient(self, student: Float[Tensor, "N V"], teacher: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        """Of each row's divergence, by the student's log-probabilities."""
        with torch.enable_grad():
            leaf = student.detach().requires_grad_()
            (found,) = torch.autograd.grad(self.of(leaf, teacher).sum(), leaf)
        return found


def _kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum(dim=-1)


def _with_rest(log_probs: Float[Tensor, "N V"], places: Int[Tensor, "N K"]) -> Float[Tensor, "N K1"]:
    """Those at some places, and all others as one more."""
    rest = log_probs.scatter(-1, places, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, places), rest], dim=-1)
