"""Losses as pure functions of log-probabilities, values and advantages; one number a token.

The reduction is left to `token_weights`, so that it is a choice and not a copy. Shapes are [B, T] padded on the right,
or any equal shape; what a sequence is, `Sequences` says. What each algorithm takes of this: `core.settings.algorithm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]
Aggregation = Literal["token_mean", "sequence_mean", "constant_length"]
RatioLevel = Literal["token", "sequence", "sequence_mean"]

MOST_LOG_RATIO = 20.0
"Nats: larger differences are cut before exp, as in verl; 1e8 is as good as infinite, and float32 does not overflow."
MOST_KL = 10.0
"A token's k3 is cut here, as in verl: one token in a thousand of exp(20) would be the whole loss."


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Which of `M` flat tokens belong to which of `S` sequences."""

    of_token: Int[Tensor, " M"]
    "0 to S - 1"
    num_tokens: Float[Tensor, " S"]
    "at least 1"

    @classmethod
    def of(cls, mask: Bool[Tensor, "S T"]) -> Sequences:
        """Those of a padded batch whose tokens are taken row by row."""
        lengths = mask.sum(dim=1)
        of_token = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return cls(of_token=of_token, num_tokens=lengths.clamp_min(1).float())

    def sums(self, per_token: Float[Tensor, " M"]) -> Float[Tensor, " S"]:
        """Sum over each sequence."""
        zeros = torch.zeros_like(self.num_tokens, dtype=per_token.dtype)
        return zeros.index_add(0, self.of_token, per_token)


def log_ratio(
    logprobs: Float[Tensor, " M"],
    old_logprobs: Float[Tensor, " M"],
    level: RatioLevel,
    sequences: Sequences | None = None,
) -> Float[Tensor, " M"]:
    """Log of new over old probability, at each token; above the token level all of a sequence's are one number.

    `sequence`: of the whole response, as RLOO takes a response for one action (Ahmadian et al. 2024, section 3.1);
    `sequence_mean`: its geometric mean over the tokens (Zheng et al. 2025, GSPO, equation 7).
    """
    difference = logprobs - old_logprobs
    if level == "token":
        return difference.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    if sequences is None:
        raise ValueError(f"ratio level {level} needs to know the sequences")
    whole = sequences.sums(difference)
    if level == "sequence_mean":
        whole = whole / sequences.num_tokens
    return whole.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)[sequences.of_token]


class PolicyLoss(NamedTuple):
    """A policy loss and what it was made of, one number a token each."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    "True where a bad action is already less likely than the clip allows"
    clipped_high: Tensor
    "True where a good action is already likelier than the clip allows"


def clipped_policy_loss(
    log_ratios: Float[Tensor, "*S"],
    advantages: Float[Tensor, "*S"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate, negated: -min(r A, clip(r, 1 - low, 1 + high) A).

    With `dual_clip` c a negative advantage costs at most c |A| (Ye et al. 2020, equation 5; TRL's `delta`).
    Source: Schulman et al. 2017, equation 7; unequal bounds: Yu et al. 2025 (DAPO), equation 10.
    """
    ratio = log_ratios.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    free = ratio if dual_clip is None else torch.where(advantages < 0.0, ratio.clamp(max=dual_clip), ratio)
    loss = -torch.minimum(free * advantages, clipped * advantages)
    return PolicyLoss(loss, ratio, *_clipped(ratio, advantages, clip_low, clip_high))


def cispo_loss(
    log_ratios: Float[Tensor, "*S"],
    logprobs: Float[Tensor, "*S"],
    advantages: Float[Tensor, "*S"],
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """REINFORCE with a clipped, constant importance weight: -sg(clip(r, 1 - low, 1 + high)) A log pi.

    Source: MiniMax 2025 (MiniMax-M1), equations 4 and 5; its lower bound is left open by `clip_low` 1.
    """
    ratio = log_ratios.exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high).detach()
    return PolicyLoss(
        -weight * advantages * logprobs, ratio, *_clipped(ratio, advantages, clip_low, clip_high)
    )


def sapo_loss(
    log_ratios: Float[Tensor, "*S"],
    advantages: Float[Tensor, "*S"],
    *,
    temperature_pos: float,
    temperature_neg: float,
) -> PolicyLoss:
    """A gate of slope 1 at ratio 1 that closes smoothly on both sides: -(4 / t) sigmoid(t (r - 1)) A.

    `t` is `temperature_pos` where A > 0. Source: Gao et al. 2025, 'Soft adaptive policy optimization', equation 6.
    """
    ratio = log_ratios.exp()
    slope = torch.where(advantages > 0.0, temperature_pos, temperature_neg)
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    loss = -torch.sigmoid(slope * (ratio - 1.0)) * 4.0 / slope * advantages
    return PolicyLoss(loss, ratio, nowhere, nowhere)


def geometric_mean_loss(
    log_ratios: Float[Tensor, " M"],
    advantages: Float[Tensor, " M"],
    sequences: Sequences,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """A response's advantage times the geometric mean of its tokens' ratios, negated, at each of its tokens.

    A token's log-ratio is clipped at `-clip_low` or `clip_high`, on the side that PPO's surrogate is.
    Source: Zhao et al. 2025, 'Geometric-mean policy optimization', equation 4; verl's `geo_mean`.
    """
    sign = advantages.sign()
    kept = sign * torch.minimum(sign * log_ratios, sign * log_ratios.clamp(-clip_low, clip_high))
    mean = (sequences.sums(kept) / sequences.num_tokens)[sequences.of_token]
    low, high = (log_ratios < -clip_low) & (advantages < 0.0), (log_ratios > clip_high) & (advantages > 0.0)
    return PolicyLoss(-mean.exp() * advantages, log_ratios.exp(), low, high)


def off_policy_kept(
    logprobs: Float[Tensor, " M"],
    sampler_logprobs: Float[Tensor, " M"],
    advantages: Float[Tensor, " M"],
    sequences: Sequences,
    threshold: float,
) -> Float[Tensor, " M"]:
    """1 for tokens that count: of a good response, or one whose mean log-ratio, sampler over policy, is small enough.

    Source: DeepSeek-AI 2025, 'DeepSeek-V3.2', section 3.1 (off-policy sequence masking).
    """
    gap = sequences.sums((sampler_logprobs - logprobs).detach()) / sequences.num_tokens
    return ((advantages >= 0.0) | (gap <= threshold)[sequences.of_token]).float()


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Where the bound is what counts: on the other side the loss keeps its gradient."""
    return (ratio < 1.0 - clip_low) & (advantages < 0.0), (ratio > 1.0 + clip_high) & (advantages > 0.0)


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

    Of these only k2 has, in expectation, the gradient of KL(p || q); k1's is 0 and k3's that of KL(q || p)
    (Tang and Munos 2025, 'On a few pitfalls in KL divergence gradient estimation for RL'). `k1+` and `k3+` have the
    value of k1 and k3 and the gradient of k2.
    """
    # not cut for k1 and k2: a token that has run away would be left without a way back
    difference = other_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference**2
    if estimator == "k3":
        near = difference.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
        return (torch.expm1(near) - near).clamp(max=MOST_KL)
    value = kl_estimate(logprobs, other_logprobs, "k1" if estimator == "k1+" else "k3")
    square = 0.5 * difference**2
    return square + (value - square).detach()


def token_weights(
    mask: Bool[Tensor, "B T"], aggregation: Aggregation, *, max_tokens: int = 1
) -> Float[Tensor, "B T"]:
    """Weights whose weighted sum of per-token losses is what is asked for.

    `token_mean`: every token counts the same (Yu et al. 2025, equation 8). `sequence_mean`: the mean
    over responses of each response's token mean (Shao et al. 2024, equation 3). `constant_length`: the mean over
    responses of each response's sum, divided by `max_tokens`, the most that a response may have; no response counts
    less for being long (Liu et al. 2025, 'Understanding R1-Zero-like training', section 3.2). The first two add up
    to 1.
    """
    real = mask.float()
    if aggregation == "token_mean":
        return real / real.sum().clamp_min(1.0)
    if aggregation == "constant_length":
        return real / (max(len(mask), 1) * max_tokens)
    return real / real.sum(dim=1, keepdim=True).clamp_min(1.0) / max(len(mask), 1)
