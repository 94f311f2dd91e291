"""Advantages: from scalar rewards to one number a token. Pure functions, no state.

Axis letters: `B` responses, `T` response tokens (padded on the right), `mask` True on real tokens.
Papers: GAE (Schulman et al. 2016), GRPO (Shao et al. 2024), Dr. GRPO (Liu et al. 2025), RLOO
(Ahmadian et al. 2024).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def place_terminal_reward(rewards: Float[Tensor, " B"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Put each response's scalar reward on its last real token, zero elsewhere.

    Source: Stiennon et al. 2020, section 3.4 (the reward is paid at the end of the response).
    """
    last = mask.sum(dim=1) - 1
    out = torch.zeros(mask.shape, dtype=rewards.dtype)
    out[torch.arange(len(rewards)), last] = rewards
    return out


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    gamma: float,
    lam: float,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalised advantage estimates and the returns the value head learns (advantage + value).

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1}; nothing follows the last
    real token. Padded positions come back zero.
    Source: Schulman et al. 2016, equations 11, 12 and 16.
    """
    keep = mask.to(values.dtype)
    values = values * keep
    advantages = torch.zeros_like(values)
    following_value = torch.zeros_like(values[:, 0])
    following_advantage = torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * following_value - values[:, t]
        following_advantage = (delta + gamma * lam * following_advantage) * keep[:, t]
        following_value = values[:, t]
        advantages[:, t] = following_advantage
    return advantages, (advantages + values) * keep


def discounted_returns(
    rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, gamma: float
) -> Float[Tensor, "B T"]:
    """Discounted sum of the rewards from each token on: G_t = r_t + gamma G_{t+1}.

    Source: Sutton & Barto 2018, equation 3.8; it is `gae` with V = 0 and lambda = 1.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)[0]


def whiten(
    values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, epsilon: float = 1e-8
) -> Float[Tensor, "B T"]:
    """Shift to mean 0 and scale to variance 1 over the real tokens; padding stays zero.

    Source: Huang et al. 2024, 'The N+ implementation details of RLHF with PPO', detail 9.
    """
    real = values[mask]
    mean, variance = real.mean(), real.var(unbiased=False)
    return torch.where(mask, (values - mean) * torch.rsqrt(variance + epsilon), torch.zeros_like(values))


def group_advantages(
    rewards: Float[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    *,
    divide_by_std: bool = True,
    epsilon: float = 1e-6,
) -> tuple[Float[Tensor, " B"], int]:
    """GRPO: each reward against the mean of its group; also counts the groups that teach nothing.

    A_i = (r_i - mean) / (std + epsilon), std unbiased; without the division it is Dr. GRPO. A group
    whose rewards are all equal gets exactly zero, whatever the rounding of its mean.
    Source: Shao et al. 2024, section 4.1.2; Liu et al. 2025, section 3.2 (Dr. GRPO).
    """
    advantages = torch.zeros_like(rewards)
    num_zero_groups = 0
    for group in group_ids.unique().tolist():
        members = group_ids == group
        of_group = rewards[members]
        if bool((of_group == of_group[0]).all()):
            num_zero_groups += 1
            continue
        centred = of_group - of_group.mean()
        advantages[members] = centred / (of_group.std() + epsilon) if divide_by_std else centred
    return advantages, num_zero_groups


def spread(per_response: Float[Tensor, " B"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Give every real token of a response that response's number."""
    return per_response[:, None] * mask.to(per_response.dtype)


def explained_variance(
    predictions: Float[Tensor, "B T"], returns: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> float:
    """Share of the returns' variance that the value head explains: 1 - Var(R - V) / Var(R).

    0 when the returns do not vary. Source: Schulman et al., OpenAI baselines, `explained_variance`.
    """
    target = returns[mask]
    variance = target.var(unbiased=False)
    if float(variance) < 1e-12:
        return 0.0
    return float(1.0 - (target - predictions[mask]).var(unbiased=False) / variance)
