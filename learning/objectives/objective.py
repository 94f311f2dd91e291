"""The loss of some responses: policy, KL divergence, entropy; what is in it says `core.settings.algorithm`."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from rlhfspec.core.settings.algorithm import AlgorithmConfig
from rlhfspec.learning.objectives.losses import (
    PolicyLoss,
    Sequences,
    cispo_loss,
    clipped_policy_loss,
    kl_estimate,
    log_ratio,
)
from rlhfspec.learning.trainer.update_metrics import MinibatchFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Of `M` response tokens of whole responses, one number each, on the learner's device; only the first two learn."""

    logprobs: Float[Tensor, " M"]
    entropy: Float[Tensor, " M"] | None
    "None: neither reported nor paid for"
    old_logprobs: Float[Tensor, " M"]
    advantages: Float[Tensor, " M"]
    importance: Float[Tensor, " M"] | None
    "weights against the sampler (`learning.objectives.off_policy`)"
    reference: Float[Tensor, " M"] | None
    "log-probabilities of the reference, where the KL divergence is a term of the loss"
    sequences: Sequences
    weight: Float[Tensor, " M"]
    "of the token in the loss: over a minibatch the sum of weight times loss is the loss"
    share: Float[Tensor, " M"]
    "one over the tokens of the minibatch, for means over tokens"


def objective(
    inputs: LossInputs,
    *,
    algorithm: AlgorithmConfig,
    kl_coef: float,
    entropy_coef: float,
    figures: MinibatchFigures,
) -> Float[Tensor, ""]:
    """These tokens' part of a minibatch's loss.

    The entropy bonus is a mean over tokens however the losses are added up, as in TRL.
    """
    ratios = log_ratio(inputs.logprobs, inputs.old_logprobs, algorithm.ratio_level, inputs.sequences)
    policy = _policy_loss(ratios, inputs, algorithm)
    loss = policy.loss if inputs.importance is None else policy.loss * inputs.importance
    figures.add("policy_loss", loss, inputs.weight)
    if inputs.reference is not None:
        kl = kl_estimate(inputs.logprobs, inputs.reference, algorithm.kl_estimator)
        if algorithm.kl_bias_correction:
            kl = kl * log_ratio(inputs.logprobs, inputs.old_logprobs, "token").exp()
            # that ratio ends at the old policy; from there to the sampler it is the weight
            kl = kl if inputs.importance is None else kl * inputs.importance
        figures.add("kl_loss", kl, inputs.weight)
        loss = loss + kl_coef * kl
    total = (loss * inputs.weight).sum()
    if inputs.entropy is not None:
        figures.add("entropy", inputs.entropy, inputs.share)
        if entropy_coef > 0.0:
            total = total - entropy_coef * (inputs.entropy * inputs.share).sum()
    figures.add_ratio(policy, inputs.logprobs - inputs.old_logprobs, inputs.share)
    return total


def _policy_loss(ratios: Tensor, inputs: LossInputs, algorithm: AlgorithmConfig) -> PolicyLoss:
    clip_low, clip_high = algorithm.clip_ratio, algorithm.upper_clip
    if algorithm.policy_loss == "cispo":
        return cispo_loss(ratios, inputs.logprobs, inputs.advantages, clip_low=clip_low, clip_high=clip_high)
    return clipped_policy_loss(
        ratios, inputs.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=algorithm.dual_clip
    )
