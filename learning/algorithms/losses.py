"""Losses of PPO and GRPO as pure functions of log-probabilities, values and advantages.

All work on one token each and leave the reduction to `token_weights`, so that token mean and sequence
mean are a choice and not a copy. Shapes are [B, T] padded on the right, or any equal shape.
Papers: PPO (Schulman et al. 2017), KL estimators (Schulman 2020), DAPO (Yu et al. 2025, token mean).
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token_mean", "sequence_mean"]


def clipped_policy_loss(
    logprobs: Float[Tensor, "*S"],
    old_logprobs: Float[Tensor, "*S"],
    advantages: Float[Tensor, "*S"],
    *,
    clip_ratio: float,
) -> Float[Tensor, "*S"]:
    """PPO's clipped surrogate, negated, per token: -min(r A, clip(r, 1 - eps, 1 + eps) A).

    Source: Schulman et al. 2017, equation 7.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1.0 - clip_ratio, 1.0 + clip_ratio)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def clipped_value_loss(
    values: Float[Tensor, "*S"],
    old_values: Float[Tensor, "*S"],
    returns: Float[Tensor, "*S"],
    *,
    clip_value: float,
) -> Float[Tensor, "*S"]:
    """Half the larger of the plain and the clipped squared error, per token.

    The clipped value stays within `clip_value` of the value at sampling time.
    Source: Huang et al. 2022, '37 implementation details of PPO', detail 9.
    """
    clipped = old_values + (values - old_values).clamp(-clip_value, clip_value)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)


def kl_estimate(
    logprobs: Float[Tensor, "*S"], other_logprobs: Float[Tensor, "*S"], estimator: KLEstimator
) -> Float[Tensor, "*S"]:
    """Estimate KL(p || q) per token from a token sampled from p; `logprobs` are p's, `other` q's.

    With d = log q - log p:  k1 = -d (unbiased, may be negative);  k2 = d^2 / 2;  k3 = exp(d) - 1 - d
    (unbiased, never negative). Source: Schulman 2020, 'Approximating KL divergence'.
    """
    difference = other_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference**2
    return torch.expm1(difference) - difference


def token_weights(mask: Bool[Tensor, "B T"], aggregation: Aggregation) -> Float[Tensor, "B T"]:
    """Weights whose weighted sum of per-token losses is the mean asked for; they add up to 1.

    `token_mean`: every token counts the same (Yu et al. 2025, equation 8). `sequence_mean`: the mean
    over responses of each response's token mean (Shao et al. 2024, equation 3).
    """
    real = mask.float()
    if aggregation == "token_mean":
        return real / real.sum().clamp_min(1.0)
    return real / real.sum(dim=1, keepdim=True).clamp_min(1.0) / max(len(mask), 1)
