"""Where the sampler was not quite the policy: the trainer's own log-probabilities, and importance weights against it.

An engine that rounds otherwise than the trainer (CUDA, several threads) samples from another distribution than the
policy that learns. Ratios are then better taken over log-probabilities of the trainer's own forward, and what is left
between the two is weighed, per token or per sequence, or masked where it is too much. Both are unfiltered: with top-p
or top-k the filtered distribution's log-probabilities would put the mass that was kept into every weight, and shrink
the loss by it (as TRL found, issue 6789).

Sources: Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy training' (token_truncate);
Liu et al. 2025, 'When speed kills stability: demystifying RL collapse from the training-inference mismatch'
(sequence_truncate, sequence_mask, geometric_mask); names as in TRL's `vllm_importance_sampling_mode`. A band of the
weights is verl's `rollout_is_threshold: "lower_upper"` (`verl/trainer/ppo/rollout_corr_helper.py`); that of a
geometric mean its `rollout_rs: seq_mean_k1`, whose ratio is the inverse of ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from learning.algorithms.losses import MOST_LOG_RATIO, kl_estimate
from learning.experience import Experience

ImportanceSampling = Literal[
    "off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
]


def importance_weights(
    policy_logprobs: Float[Tensor, "B R"],
    sampler_logprobs: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    mode: ImportanceSampling,
    cap: float,
    floor: float,
) -> Float[Tensor, "B R"]:
    """Pi / mu of each token, or of its whole sequence, constant for the gradient; 0 off the mask.

    `*_truncate`: at most `cap`. `*_mask`: 0 where it is above `cap` or below `floor`. `geometric_mask`: 1 where the
    geometric mean over the sequence's tokens is within the two, else 0; the mean is no importance weight and does not
    shrink with length, so it only rejects. Its floor is 1 / cap where none is given.
    """
    if mode == "geometric_mask" and floor == 0.0:
        floor = 1.0 / cap
    difference = torch.where(mask, policy_logprobs - sampler_logprobs, torch.zeros_like(policy_logprobs))
    if mode.startswith(("sequence", "geometric")):
        total = difference.sum(dim=1, keepdim=True)
        if mode.startswith("geometric"):
            total = total / mask.sum(dim=1, keepdim=True).clamp_min(1)
        difference = total.expand_as(difference)
    # as in verl: no underflow to 0, which would pass for a masked token
    ratio = difference.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
    if mode.endswith("truncate"):
        weight = ratio.clamp(max=cap)
    else:
        kept = torch.ones_like(ratio) if mode.startswith("geometric") else ratio
        weight = torch.where((ratio > cap) | (ratio < floor), 0.0, kept)
    return torch.where(mask, weight, torch.zeros_like(weight)).detach()


def importance_figures(weights: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> dict[str, float]:
    """Mean weight of the response tokens, and the share of them that is masked."""
    real = weights[mask]
    return {
        "mismatch/importance_mean": float(real.mean()),
        "mismatch/masked_share": float((real == 0.0).float().mean()),
    }


def recomputed(experience: Experience, logprobs: Float[Tensor, "B R"]) -> tuple[Experience, dict[str, float]]:
    """The experience with the trainer's own log-probabilities as the old ones, and how far the sampler's were off.

    `mismatch/kl`: KL(sampler || trainer), both unfiltered, in nats a token (k3), over the tokens that were sampled.
    `mismatch/max_logprob_difference`: of any token.
    """
    mask = experience.mask
    kl = kl_estimate(experience.old_logprobs, logprobs, "k3")[mask]
    difference = (experience.old_logprobs - logprobs)[mask]
    figures = {
        "mismatch/kl": float(kl.mean()),
        "mismatch/max_logprob_difference": float(difference.abs().max()),
    }
    return replace(experience, old_logprobs=logprobs), figures
