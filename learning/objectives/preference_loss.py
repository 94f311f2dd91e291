"""The loss of a reward model on pairs of responses, and what is reported of it.

Sources: Ouyang et al. 2022, equation 1 (Bradley and Terry 1952); Touvron et al. 2023, 'Llama 2', equation 2 (the
margin); Eisenstein et al. 2023, 'Helping or herding?', equation 2 (scores kept around zero).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def bradley_terry_loss(
    chosen: Float[Tensor, " N"],
    rejected: Float[Tensor, " N"],
    margins: Float[Tensor, " N"],
    *,
    center_coefficient: float = 0.0,
) -> Float[Tensor, " N"]:
    """-log sigmoid(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2 of each pair, in nats."""
    loss = -F.logsigmoid(chosen - rejected - margins)
    if center_coefficient > 0.0:
        loss = loss + center_coefficient * (chosen + rejected) ** 2
    return loss


def preference_figures(
    chosen: Float[Tensor, " N"], rejected: Float[Tensor, " N"]
) -> dict[str, Float[Tensor, " N"]]:
    """For each pair: whether the chosen response scores higher, by how much, and the mean score of the two."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "accuracy": (chosen > rejected).float(),
        "margin": chosen - rejected,
        "mean_reward": (chosen + rejected) / 2.0,
    }
