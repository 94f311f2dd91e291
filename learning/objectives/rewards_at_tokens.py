"""Rewards where they are paid: the response's on its last token, the KL penalty on each.

Source: Stiennon et al. 2020, section 3.4; Ziegler et al. 2019, section 2.1 (the penalty).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rlhfspec.core.settings.algorithm import AlgorithmConfig
from rlhfspec.learning.objectives.advantages import place_terminal_reward
from rlhfspec.learning.objectives.losses import kl_estimate
from rlhfspec.learning.trainer.experience import Experience


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
    """Every token's reward, for estimators that look at tokens."""
    return place_terminal_reward(experience.rewards, experience.mask) - penalty


def response_rewards(experience: Experience, penalty: Float[Tensor, "B R"]) -> Float[Tensor, " B"]:
    """Every response's reward less its penalties, for estimators that compare responses."""
    return experience.rewards - penalty.sum(dim=1)
