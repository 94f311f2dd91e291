"""What is learned from rollouts: advantages, losses, KL control."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from core.settings.section import Section


class AlgorithmConfig(Section):
    """PPO (Schulman et al. 2017) or GRPO (Shao et al. 2024)."""

    kind: Literal["ppo", "grpo"] = "ppo"
    gamma: float = Field(default=1.0, gt=0.0, le=1.0)
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    clip_ratio: float = Field(default=0.2, gt=0.0)
    clip_value: float = Field(default=0.2, gt=0.0)
    entropy_coef: float = Field(default=0.0, ge=0.0)
    report_entropy: bool = True
    "false: where the coefficient is 0 the entropy is not computed either"
    kl_coef: float = Field(default=0.01, ge=0.0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    "Schulman 2020, 'Approximating KL divergence'"
    kl_placement: Literal["loss", "reward"] = "loss"
    "where the reference KL counts: a loss term, or (ppo only) a penalty on each token's reward"
    whiten_advantages: bool = True
    group_std: bool = True
    "grpo: divide by the group's standard deviation (false: Dr. GRPO)"
    loss_aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    old_logprobs: Literal["auto", "sampler", "trainer"] = "auto"
    "what ratios are over: the sampler's log-probabilities, or those of one more forward of the trainer before its "
    "first step; auto: the trainer's where tokens are promised without every bit (CUDA, several threads)"
    importance_sampling: Literal[
        "off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
    ] = "off"
    "weighs the policy loss by trainer over sampler, per token or sequence; above the cap truncated, or masked"
    importance_sampling_cap: float = Field(default=2.0, gt=0.0)
    importance_sampling_floor: float = Field(default=0.0, ge=0.0)
    "masks only: what is below counts 0 too; of a geometric mean 1 / cap where it is 0"

    @model_validator(mode="after")
    def _band(self) -> AlgorithmConfig:
        floor, cap, mode = (
            self.importance_sampling_floor,
            self.importance_sampling_cap,
            self.importance_sampling,
        )
        if mode != "off" and self.old_logprobs == "sampler":
            raise ValueError(
                f"importance_sampling {mode} weighs the trainer's log-probabilities against the sampler's, and "
                "old_logprobs sampler computes none of the trainer's: every weight would be 1; set old_logprobs auto "
                "or trainer, or importance_sampling off"
            )
        if floor > 0.0 and not mode.endswith("mask"):
            raise ValueError(
                f"importance_sampling_floor {floor} is of the modes that mask, importance_sampling is {mode}; take "
                "token_mask, sequence_mask or geometric_mask, or leave the floor out"
            )
        if mode.endswith("mask") and not floor < 1.0 < cap:
            raise ValueError(
                f"importance_sampling {mode} keeps what lies from importance_sampling_floor {floor} to "
                f"importance_sampling_cap {cap}, and the ratio of a token on which trainer and sampler agree is 1: it "
                "would be masked; take a floor below 1 and a cap above"
            )
        return self
