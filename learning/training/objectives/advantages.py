"""Advantages: from scalar rewards to one number a token. Pure functions, no state.

Axis letters: `B` responses, `T` response tokens (padded on the right), `mask` True on real tokens.
Papers: GAE (Schulman et al. 2016), GRPO (Shao et al. 2024), Dr. GRPO (Liu et al. 2025), RLOO
(Ahmadian et al. 2024), REINFORCE++ (Hu et al. 2025). The KL penalty on each token: Stiennon et al. 2020, section 3.4;
Ziegler et al. 2019, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ....core.settings.algorithm import AlgorithmConfig
from ..experience import Experience
from .losses import kl_estimate

_TRL_EPSILON = 1e-4


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
    last_values: Float[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalised advantage estimates and the returns the value head learns (advantage + value).

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1}. After the last real token comes
    `last_values`, or nothing. Positions off the mask come back zero and are passed over: what follows a real token is
    the next real one.
    Source: Schulman et al. 2016, equations 11, 12 and 16; values after a cut: Pardo et al. 2018, section 3.
    """
    keep = mask.to(values.dtype)
    values = values * keep
    advantages = torch.zeros_like(values)
    following_value = torch.zeros_like(values[:, 0]) if last_values is None else last_values.to(values.dtype)
    following_advantage = torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * following_value - values[:, t]
        following_advantage = torch.where(
            here, delta + gamma * lam * following_advantage, following_advantage
        )
        following_value = torch.where(here, values[:, t], following_value)
        advantages[:, t] = following_advantage * keep[:, t]
    return advantages, (advantages + values) * keep


def discounted_returns(
    rewards: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    gamma: float,
    last_values: Float[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T"]:
    """Discounted sum of the rewards from each token on: G_t = r_t + gamma G_{t+1}.

    Source: Sutton & Barto 2018, equation 3.8; it is `gae` with V = 0 and lambda = 1.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0, last_values=last_values)[0]


def whiten(
    values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, epsilon: float = 1e-8
) -> Float[Tensor, "B T"]:
    """Shift to mean 0 and scale to variance 1 (unbiased) over the real tokens; padding stays zero.

    Source: Huang et al. 2024, 'The N+ implementation details of RLHF with PPO', detail 9.
    """
    real = values[mask].double()  # squares of rewards near 1e30 leave float32
    if not len(real):
        return torch.zeros_like(values)
    # one token has no variance, and no advantage over itself
    mean, variance = real.mean(), real.var() if len(real) > 1 else torch.zeros(())
    scaled = ((values.double() - mean) * torch.rsqrt(variance + epsilon)).to(values.dtype)
    return torch.where(mask, scaled, torch.zeros_like(values))


def group_advantages(
    rewards: Float[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    *,
    divide_by_std: bool = True,
    epsilon: float = 1e-6,
) -> Float[Tensor, " B"]:
    """GRPO: each reward against the mean of its group.

    A_i = (r_i - mean) / (std + epsilon), std unbiased; without the division it is Dr. GRPO. A group
    whose rewards are all equal gets exactly zero, whatever the rounding of its mean.
    Source: Shao et al. 2024, section 4.1.2; Liu et al. 2025, section 3.2 (Dr. GRPO).
    """
    advantages = torch.zeros_like(rewards)
    for members, of_group in _unequal_groups(rewards, group_ids):
        of_group = of_group.double()
        centred = of_group - of_group.mean()
        scaled = centred / (of_group.std() + epsilon) if divide_by_std else centred
        advantages[members] = scaled.to(rewards.dtype)
    return advantages


def batch_std_advantages(rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Each reward against the mean of its group, over the deviation (unbiased) of all rewards of the batch.

    Source: TRL's `scale_rewards="batch"`, its epsilon too; Liu et al. 2025 (arXiv 2508.08221).
    """
    centred = group_advantages(rewards.double(), group_ids, divide_by_std=False)
    std = rewards.double().std(correction=min(len(rewards) - 1, 1))
    return (centred / (std + _TRL_EPSILON)).to(rewards.dtype)


def normalized_sum(
    parts: Float[Tensor, "B K"], weights: Sequence[float], group_ids: Int[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """Each part of a mixture by `group_advantages`, then summed by weight: none drowns in another's spread.

    What does not apply to a response (NaN) adds nothing and is not compared with. Each group sums up to zero.
    Source: Liu et al. 2026 (GDPO, arXiv 2601.05242), as TRL has it.
    """
    total = torch.zeros(len(parts), dtype=torch.float64)
    for part, weight in zip(parts.double().T, weights, strict=True):
        applies = ~part.isnan()
        total[applies] += weight * group_advantages(part[applies], group_ids[applies], epsilon=_TRL_EPSILON)
    return total.float()


def leave_one_out_advantages(
    rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """RLOO: each reward against the mean of the others of its group; alone in it, or all equal: zero.

    Source: Ahmadian et al. 2024, section 3.2.
    """
    advantages = torch.zeros_like(rewards)
    for members, of_group in _unequal_groups(rewards, group_ids):
        advantages[members] = of_group - (of_group.sum() - of_group) / (len(of_group) - 1)
    return advantages


def reinforce_pp_advantages(
    token_rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, gamma: float
) -> Float[Tensor, "B T"]:
    """REINFORCE++: returns from each token on, whitened over all tokens of the batch; neither critic nor groups.

    Source: Hu et al. 2025 (arXiv 2501.03262), section 3.
    """
    return whiten(discounted_returns(token_rewards, mask, gamma=gamma), mask)


def reinforce_pp_baseline_advantages(
    rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """REINFORCE++-baseline: each reward against the mean of its group, whitened over all tokens of the batch.

    Source: Hu et al. 2025 (arXiv 2501.03262), section 3; over tokens as in verl and OpenRLHF.
    """
    centred = group_advantages(rewards, group_ids, divide_by_std=False)
    return whiten(spread(centred, mask), mask)


def _unequal_groups(rewards: Tensor, group_ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for group in group_ids.unique().tolist():
        members = group_ids == group
        of_group = rewards[members]
        if not bool((of_group == of_group[0]).all()):
            yield members, of_group


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


def kl_penalty(
    experience: Experience, reference: Float[Tensor, "B R"] | None, algorithm: AlgorithmConfig, kl_coef: float
) -> Float[Tensor, "B R"]:
    """What each token's reward is lowered by; zero where the KL divergence is no part of the reward."""
    mask = experience.mask
    if reference is None or algorithm.kl_placement != "reward":
        return torch.zeros(mask.shape)
    kl = kl_estimate(experience.old_logprobs, reference, algorithm.kl_estimator)
    return kl_coef * torch.where(mask, kl, torch.zeros_like(kl))


def token_rewards(experience: Experience, penalty: Float[Tensor, "B R"]) -> Float[Tensor, "B R"]:
    """Every token's reward, for estimators that look at tokens: its own, on the last one what is left."""
    left = experience.rewards - experience.paid.sum(dim=1)
    return place_terminal_reward(left, experience.mask) + experience.paid - penalty


def response_rewards(experience: Experience, penalty: Float[Tensor, "B R"]) -> Float[Tensor, " B"]:
    """Every response's reward less its penalties, for estimators that compare responses."""
    return experience.rewards - penalty.sum(dim=1)
