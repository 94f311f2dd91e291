"""What an update computes once, before its first optimizer step: advantages, the reference, weights of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ....core.config import AlgorithmConfig, TrainerConfig
from ..engine_scoring import EngineValues
from ..experience import Experience
from ..parallel import OneTrainer
from ..policy_forward import FirstValues
from .advantages import (
    batch_std_advantages,
    group_advantages,
    kl_penalty,
    leave_one_out_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    response_rewards,
    spread,
    token_rewards,
)
from .critic import Critic, ppo_advantages
from .losses import kl_estimate
from .off_policy import importance_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Per-token tensors [B, R], padded like the experience, and the metrics found on the way."""

    advantages: Tensor
    reference: Tensor | None
    "the reference model's log-probabilities, None without KL control"
    has_kl_loss: bool
    "whether the reference counts as a term of the loss"
    has_entropy_loss: bool
    learned: Tensor
    "[B], False for responses that are no part of the loss"
    metrics: dict[str, float]
    has_teacher: bool = False
    "whether the divergence from a teacher is a term of the loss"
    has_echo: bool = False
    "whether the cross-entropy of what an environment gave is"
    importance: Tensor | None = None
    "weights of the policy loss against the sampler (`off_policy`), None where it is not corrected"
    engine: EngineValues | None = None
    "the policy's log-probabilities by the engine's forward; None: by the learner's own"

    def sample_advantages(self, mask: Bool[Tensor, "B R"]) -> tuple[float, ...]:
        """Mean advantage of each response's tokens."""
        sums = torch.where(mask, self.advantages, torch.zeros_like(self.advantages)).sum(dim=1)
        return tuple((sums / mask.sum(dim=1).clamp_min(1)).tolist())

    def with_gradient(self, rows: Sequence[int]) -> list[int]:
        """Rows whose loss has a gradient: of the others (equal rewards in a group) no forward is computed."""
        everywhere = self.has_entropy_loss or self.has_kl_loss or self.has_teacher or self.has_echo
        return [row for row in rows if self.learned[row] and (everywhere or bool(self.advantages[row].any()))]


def update_targets(
    experience: Experience,
    first: FirstValues,
    *,
    algorithm: AlgorithmConfig,
    trainer: TrainerConfig,
    critic: Critic | None,
    trainers: OneTrainer,
    generator: torch.Generator,
    kl_coef: float,
) -> Targets:
    """Advantages and what they come from; the critic, where there is one, is fitted. Collective.

    `first` are the values under the weights before any step; `generator` orders the critic's minibatches; `kl_coef` is
    the coefficient as it stands.
    """
    reference = first.logprobs.get("reference")
    metrics: dict[str, float] = {}
    if reference is not None:
        kl = kl_estimate(experience.old_logprobs, reference, algorithm.kl_estimator)
        metrics["reference_kl"] = float(kl[experience.mask].mean())
    penalty = kl_penalty(experience, reference, algorithm, kl_coef)
    learned = (
        ~experience.truncated if algorithm.truncated == "mask" else torch.ones_like(experience.truncated)
    )
    if critic is not None:
        assert first.states is not None, "a critic's states are among the first values"
        advantages = ppo_advantages(
            critic,
            experience,
            first.states,
            penalty,
            learned,
            algorithm=algorithm,
            trainer=trainer,
            generator=generator,
            metrics=metrics,
        )
        # trainers on unlike processors round unlike, and would drift apart
        trainers.take_first([advantages, *critic.head.parameters()])
    else:
        advantages = _advantages_without_critic(experience, penalty, learned, algorithm)
    if algorithm.compares_groups:
        metrics["num_groups"] = float(len(experience.group_ids.unique()))
        teaching = experience.group_ids[advantages.any(dim=1)].unique()
        metrics["num_zero_advantage_groups"] = metrics["num_groups"] - float(len(teaching))
    metrics["truncated_share"] = float(experience.truncated.float().mean())
    importance = None
    if algorithm.correction.compares:
        importance, found = importance_weights(
            experience.old_logprobs, experience.sampler_logprobs, experience.mask, algorithm.correction
        )
        metrics |= found
    targets = Targets(
        advantages=advantages,
        importance=importance,
        reference=reference,
        has_kl_loss=reference is not None and algorithm.kl_placement == "loss",
        has_entropy_loss=algorithm.has_entropy_bonus,
        has_teacher=algorithm.distill_coef > 0.0,
        has_echo=algorithm.echo_coef > 0.0,
        learned=learned,
        metrics=metrics,
    )
    num_learned = len(targets.with_gradient(range(len(advantages))))
    return replace(targets, metrics=metrics | {"num_skipped_samples": float(len(advantages) - num_learned)})


def _advantages_without_critic(
    experience: Experience, penalty: Tensor, learned: Tensor, algorithm: AlgorithmConfig
) -> Float[Tensor, "B R"]:
    """One estimator a row of `core.settings.algorithm.ALGORITHMS`; whitened over what is learned."""
    groups, mask = experience.group_ids, experience.mask
    if algorithm.advantage == "none":
        return torch.zeros(mask.shape)
    counted = mask & learned[:, None]
    if algorithm.advantage == "reinforce_pp":
        return reinforce_pp_advantages(token_rewards(experience, penalty), counted, gamma=algorithm.gamma)
    rewards = response_rewards(experience, penalty)
    if algorithm.advantage == "reinforce_pp_baseline":
        return reinforce_pp_baseline_advantages(rewards, groups, counted)
    if algorithm.advantage == "leave_one_out":
        return spread(leave_one_out_advantages(rewards, groups), mask)
    if algorithm.advantage == "batch_std":
        return spread(batch_std_advantages(rewards, groups), mask)
    return spread(group_advantages(rewards, groups, divide_by_std=algorithm.advantage == "group_std"), mask)
