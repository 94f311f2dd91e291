"""PPO's advantages: GAE under the critic as it is, and what the critic then learns from the batch."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from core.config import AlgorithmConfig, TrainerConfig
from learning.algorithms.advantages import (
    discounted_returns,
    explained_variance,
    gae,
    place_terminal_reward,
    whiten,
)
from learning.algorithms.losses import kl_estimate
from learning.critic import Critic, history_features
from learning.experience import Experience
from learning.forward.policy_forward import OwnStates, padded


def ppo_advantages(
    critic: Critic,
    experience: Experience,
    own: OwnStates,
    reference: Float[Tensor, "B R"] | None,
    *,
    algorithm: AlgorithmConfig,
    trainer: TrainerConfig,
    generator: torch.Generator,
    figures: dict[str, float],
) -> Float[Tensor, "B R"]:
    """GAE under the critic as it is; then the critic learns from this batch, for the next one.

    The critic's returns are undiluted by lambda (lambda = 1), the target's advantages are not.
    Source: Yuan et al. 2025, 'What's behind PPO's collapse in long-CoT?', section 4 (decoupled GAE).

    Args:
        critic: is fitted.
        experience: the batch, `M` response tokens in all.
        own: states that predict its tokens, of this trainer's rows.
        reference: log-probabilities of the reference model, None without KL control.
        algorithm: gamma, lambda, where the KL counts.
        trainer: passes and minibatches of the critic.
        generator: orders the critic's minibatches.
        figures: gets explained_variance and value_loss.
    """
    mask = experience.mask
    history = history_features(experience.old_logprobs, mask)[mask]
    flat_values = critic.values(own, history)
    values = padded(flat_values, mask)
    rewards = place_terminal_reward(experience.rewards, mask)
    if reference is not None and algorithm.kl_placement == "reward":
        kl = kl_estimate(experience.old_logprobs, reference, algorithm.kl_estimator)
        rewards = rewards - algorithm.kl_coef * torch.where(mask, kl, torch.zeros_like(kl))
    advantages, _ = gae(rewards, values, mask, gamma=algorithm.gamma, lam=algorithm.gae_lambda)
    returns = discounted_returns(rewards, mask, gamma=algorithm.gamma)
    figures["explained_variance"] = explained_variance(values, returns, mask)
    figures["value_loss"] = critic.fit(
        own,
        history,
        returns[mask],
        flat_values,
        epochs=trainer.value_epochs,
        num_minibatches=-(-len(mask) // trainer.minibatch_size),
        clip_value=algorithm.clip_value,
        generator=generator,
    )
    return whiten(advantages, mask) if algorithm.whiten_advantages else advantages
