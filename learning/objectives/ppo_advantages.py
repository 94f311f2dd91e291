"""PPO's advantages: GAE under the critic as it is, and what the critic then learns from the batch."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.learning.objectives.advantages import (
    discounted_returns,
    explained_variance,
    gae,
    whiten,
)
from rlhfspec.learning.objectives.rewards_at_tokens import token_rewards
from rlhfspec.learning.trainer.critic import Critic, history_features
from rlhfspec.learning.trainer.experience import Experience
from rlhfspec.learning.trainer.policy_forward import OwnStates, padded


def ppo_advantages(
    critic: Critic,
    experience: Experience,
    own: OwnStates,
    penalty: Float[Tensor, "B R"],
    learned: Bool[Tensor, " B"],
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
        penalty: what each token's reward is lowered by.
        learned: responses that are part of the loss; over them advantages are whitened. The critic learns from all.
        algorithm: gamma, lambda, what a truncated response is.
        trainer: passes and minibatches of the critic.
        generator: orders the critic's minibatches.
        figures: gets explained_variance and value_loss.
    """
    mask = experience.mask
    history = history_features(experience.old_logprobs, mask)[mask]
    flat_values = critic.values(own, history)
    values = padded(flat_values, mask)
    after = _values_after(values, experience) if algorithm.truncated == "bootstrap" else None
    rewards = token_rewards(experience, penalty)
    advantages, _ = gae(
        rewards, values, mask, gamma=algorithm.gamma, lam=algorithm.gae_lambda, last_values=after
    )
    returns = discounted_returns(rewards, mask, gamma=algorithm.gamma, last_values=after)
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
    return whiten(advantages, mask & learned[:, None]) if algorithm.whiten_advantages else advantages


def _values_after(values: Float[Tensor, "B R"], experience: Experience) -> Float[Tensor, " B"]:
    """What a response that was cut would still have got; 0 of one that ended.

    The value before its last token stands for the one after it, whose state no forward has computed.
    Source: Pardo et al. 2018, 'Time limits in reinforcement learning', section 3.
    """
    places = torch.arange(values.shape[1]).expand_as(values)
    last = torch.where(experience.mask, places, 0).amax(dim=1)
    return torch.where(experience.truncated, values[torch.arange(len(values)), last], 0.0)
