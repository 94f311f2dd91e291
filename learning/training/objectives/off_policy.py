"""Where the sampler was not quite the policy: the trainer's own log-probabilities, and importance weights against it.

A sampler differs from the policy that learns by its weights, which may be some versions older
(`rollout.max_staleness`), and by its rounding (CUDA, several threads). Ratios are then better taken over
log-probabilities of the trainer's own forward, the proximal policy, and what lies between the two is weighed, per token
or per response, or masked where it is too much. The sampler's are those recorded with each token, whichever version it
came from. Both are unfiltered: with top-p or top-k the filtered distribution's log-probabilities would put the mass
that was kept into every weight, and shrink the loss by it (as TRL found, issue 6789).

Sources: Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy training' (weights of tokens:
TIS); Liu et al. 2025, 'When speed kills stability: demystifying RL collapse from the training-inference mismatch'
(weights of sequences, masks of sequences and of geometric means: MIS); Ling team 2025, 'Every step evolves' (two-sided
mask of tokens: IcePop); Hilton et al. 2022, 'Batch size-invariance for policy optimization', and Fu et al. 2025,
'AReaL' (decoupled PPO: the clip about a proximal policy, weighed by proximal over behaviour). What other projects call
them: docs/reference/algorithms.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ....core.errors import ConfigError
from ....core.settings.correction import CorrectionConfig
from ..experience import Experience
from .losses import MOST_LOG_RATIO, kl_estimate


def importance_weights(
    policy_logprobs: Float[Tensor, "B R"],
    sampler_logprobs: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    correction: CorrectionConfig,
) -> tuple[Float[Tensor, "B R"], dict[str, float]]:
    """What each token's policy loss is multiplied by, constant for the gradient; 0 off the mask. And its metrics.

    A weight is pi / mu of the token or of its whole response, at most `weight_cap`; 1 where nothing is weighed. It is 0
    where the ratio that the mask looks at lies outside its band: of the token, of the response, or its geometric mean
    over the response's tokens, which is no importance weight, does not shrink with length, and so only rejects.
    Where both policies agree to the bit every weight is exactly 1.
    """
    difference = torch.where(mask, policy_logprobs - sampler_logprobs, torch.zeros_like(policy_logprobs))
    weight = torch.ones_like(difference)
    clipped = torch.zeros_like(mask)
    if correction.weight != "none":
        weight = _ratio(difference, mask, correction.weight)
        if correction.weight_cap is not None:
            clipped = weight > correction.weight_cap
            weight = weight.clamp(max=correction.weight_cap)
    kept = torch.ones_like(mask)
    if correction.mask != "none":
        ratio, (low, high) = _ratio(difference, mask, correction.mask), correction.band
        kept = (ratio >= low) & (ratio <= high)
    weight = torch.where(mask & kept, weight, torch.zeros_like(weight)).detach()
    return weight, _metrics(weight, mask, clipped=clipped, kept=kept)


def _ratio(
    difference: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    level: Literal["token", "sequence", "geometric"],
) -> Float[Tensor, "B R"]:
    """Pi / mu at each token; above the token level all of a response's are one number."""
    if level != "token":
        total = difference.sum(dim=1, keepdim=True)
        if level == "geometric":
            total = total / mask.sum(dim=1, keepdim=True).clamp_min(1)
        difference = total.expand_as(difference)
    # as in verl: no underflow to 0, which would pass for a masked token
    return difference.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def _metrics(
    weight: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    clipped: Bool[Tensor, "B R"],
    kept: Bool[Tensor, "B R"],
) -> dict[str, float]:
    real = weight[mask].double()
    squares = float((real**2).sum())
    masked_whole = ~(mask & kept).any(dim=1)
    return {
        "mismatch/importance_mean": float(real.mean()),
        # Kong 1992: how many tokens of weight 1 are worth these
        "mismatch/effective_share": float(real.sum() ** 2) / (len(real) * squares) if squares else 0.0,
        "mismatch/clipped_share": float(clipped[mask].float().mean()),
        "mismatch/masked_share": float((~kept)[mask].float().mean()),
        "mismatch/masked_response_share": float(masked_whole.float().mean()),
    }


def recomputed(experience: Experience, logprobs: Float[Tensor, "B R"]) -> tuple[Experience, dict[str, float]]:
    """The experience with the trainer's own log-probabilities as the old ones, and how far the sampler's were off.

    `mismatch/kl`: KL(sampler || trainer), both unfiltered, in nats a token (k3), over the tokens that were sampled.
    `mismatch/max_logprob_difference`: of any token. `mismatch/ratio_mean`, `_max`: trainer over sampler, of single
    tokens, before anything is cut or masked.
    """
    mask = experience.mask
    kl = kl_estimate(experience.sampler_logprobs, logprobs, "k3")[mask]
    difference = (logprobs - experience.sampler_logprobs)[mask]
    ratio = difference.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
    metrics = {
        "mismatch/kl": float(kl.mean()),
        "mismatch/max_logprob_difference": float(difference.abs().max()),
        "mismatch/ratio_mean": float(ratio.mean()),
        "mismatch/ratio_max": float(ratio.max()),
    }
    return replace(experience, old_logprobs=logprobs), metrics


def lag_metrics(
    experience: Experience, weight_version: int, correction: CorrectionConfig, *, recompute_old: bool
) -> dict[str, float]:
    """How many versions older than the learner's own weights those are that the tokens came from.

    Raises ConfigError where samples are older, are to be corrected, and nothing is computed to correct them by.
    """
    lag = (weight_version - experience.weight_versions)[experience.mask]
    oldest = int(lag.max())
    if oldest > 0 and correction.compares and not recompute_old:
        raise ConfigError(
            f"samples of {oldest} versions before weight version {weight_version} came to an update that takes its "
            f"ratios over the sampler's log-probabilities, and algorithm.correction has {correction.title}, whose "
            "weights would all be 1; have the old log-probabilities recomputed (Learner.update(recompute_old=True))"
        )
    return {"mismatch/lag_mean": float(lag.double().mean()), "mismatch/lag_max": float(oldest)}
