"""What is learned from rollouts: advantages, losses, KL and entropy control.

An algorithm is a row of `ALGORITHMS`: choices of parts that stand for themselves. Whatever a config says beside
`kind` replaces that part of the row. docs/reference/algorithms.md shows the table with its sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from .correction import CorrectionConfig, require_level
from .data import DataConfig
from .generation import RolloutConfig
from .run import ModelsConfig
from .section import Name, Section

Kind = Literal[
    "ppo",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "dapo",
    "gspo",
    "cispo",
    "distill",
]

ALGORITHMS: Mapping[str, Mapping[str, object]] = {
    "ppo": {"advantage": "gae", "loss_aggregation": "token_mean", "kl_coef": 0.01},
    "grpo": {"advantage": "group_std", "loss_aggregation": "sequence_mean", "kl_coef": 0.01},
    "dr_grpo": {"advantage": "group_mean", "loss_aggregation": "constant_length"},
    "rloo": {
        "advantage": "leave_one_out",
        "ratio_level": "sequence",
        "loss_aggregation": "sequence_mean",
        "kl_coef": 0.01,
        "kl_estimator": "k1",
        "kl_placement": "reward",
    },
    "reinforce_pp": {
        "advantage": "reinforce_pp",
        "kl_coef": 0.01,
        "kl_estimator": "k1",
        "kl_placement": "reward",
    },
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "kl_coef": 0.01, "kl_estimator": "k2"},
    "dapo": {"advantage": "group_std", "clip_ratio_high": 0.28, "dynamic_sampling": True},
    "gspo": {
        "advantage": "group_std",
        "ratio_level": "sequence_mean",
        "clip_ratio": 3e-4,
        "clip_ratio_high": 4e-4,
        "loss_aggregation": "sequence_mean",
    },
    "cispo": {
        "advantage": "group_std",
        "policy_loss": "cispo",
        "clip_ratio": 1.0,
        "clip_ratio_high": 4.0,
    },
    "distill": {"advantage": "none", "distill_coef": 1.0},
}
"What each `algorithm.kind` sets; what a row leaves out has the default below."

_MOVED: Mapping[str, tuple[object, str]] = {
    "old_logprobs": ("auto", "correction.old_logprobs"),
    "importance_sampling": ("off", "correction.weight and correction.mask"),
    "importance_sampling_cap": (2.0, "correction.weight_cap or correction.mask_high"),
    "importance_sampling_floor": (0.0, "correction.mask_low"),
}
"Former keys: their default, which the configs of earlier runs spell out and which still means nothing; the new place."


_OF_ADVANTAGES = (
    "gamma", "ratio_level", "policy_loss", "clip_ratio", "clip_ratio_high", "dual_clip", "correction",
    "top_entropy_quantile", "off_policy_mask_threshold", "combine",
)  # fmt: skip
"Keys of a loss by rewards."


def _without_effect(algorithm: AlgorithmConfig) -> dict[str, str]:
    """Keys that nothing reads under these settings, and of what each is."""
    of_critic, of_target = "advantage gae, which has a critic", "entropy_target"
    idle: dict[str, str] = {}
    if not algorithm.has_critic:
        idle |= dict.fromkeys(("gae_lambda", "clip_value", "whiten_advantages"), of_critic)
    if not algorithm.compares_groups:
        idle["combine"] = "advantages that compare the samples of one prompt"
    if algorithm.compares_groups:
        idle["gamma"] = "advantages gae and reinforce_pp, which discount"
    if algorithm.entropy_target is None:
        idle |= dict.fromkeys(("entropy_coef_step", "entropy_coef_max"), of_target)
    if algorithm.kl_target is None:
        idle["kl_horizon"] = "kl_target"
    if not algorithm.distill_coef:
        idle |= dict.fromkeys(("distill_beta", "distill_top_k"), "distill_coef, of a teacher")
    if algorithm.advantage == "none":
        idle |= dict.fromkeys(_OF_ADVANTAGES, "an advantage")
    if algorithm.policy_loss == "sapo":
        idle |= dict.fromkeys(("clip_ratio", "clip_ratio_high"), "policy losses that clip")
    else:
        idle |= dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), "policy_loss sapo")
    if not algorithm.sync_ref_model:
        idle |= dict.fromkeys(("ref_model_sync_steps", "ref_model_mixup_alpha"), "sync_ref_model: true")
    if algorithm.kl_coef == 0.0:
        idle["sync_ref_model"] = "kl_coef, without which there is no reference"
    if not algorithm.dynamic_sampling:
        idle |= dict.fromkeys(("dynamic_sampling_metric", "max_extra_groups"), "dynamic_sampling: true")
    return idle


class AlgorithmConfig(Section):
    """A row of `ALGORITHMS`, and the parts of it that are chosen otherwise."""

    kind: Kind = "ppo"
    advantage: Literal[
        "gae",
        "group_std",
        "batch_std",
        "group_mean",
        "leave_one_out",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "none",
    ] = "gae"
    """gae needs a critic, reinforce_pp nothing, none learns from no reward, the others compare the samples of one
    prompt; batch_std divides by the deviation of all rewards of the batch (TRL's scale_rewards batch)"""
    combine: Literal["sum", "normalize_then_sum"] = "sum"
    """reward.parts: their weighted sum is compared, or each part, less its group's mean and over its deviation, is
    added by its weight, and the sum goes over the batch's deviation: with advantage batch_std (GDPO; TRL's
    multi_objective_aggregation)"""
    whiten_advantages: bool = True
    "gae: mean 0 and variance 1 over the batch's tokens"
    gamma: float = Field(default=1.0, gt=0.0, le=1.0)
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    clip_value: float = Field(default=0.2, gt=0.0)
    ratio_level: Literal["token", "sequence", "sequence_mean"] = "token"
    "new over old probability: of each token, of the whole response, or its geometric mean over the tokens (GSPO)"
    policy_loss: Literal["clip", "cispo", "sapo", "geo_mean"] = "clip"
    """clip: PPO's surrogate; cispo: the clipped ratio is a constant weight, every token keeps its gradient; sapo: a
    soft gate of the ratio in place of a clip; geo_mean: the geometric mean of a response's clipped ratios (GMPO, with
    loss_aggregation sequence_mean)"""
    clip_ratio: float = Field(default=0.2, gt=0.0)
    """a ratio is clipped below 1 - clip_ratio and above 1 + clip_ratio_high; geo_mean: its logarithm at the two, in its
    paper 0.4"""
    clip_ratio_high: float | None = Field(default=None, gt=0.0)
    "null: as clip_ratio; higher: DAPO's clip-higher"
    dual_clip: float | None = Field(default=None, gt=1.0)
    "largest ratio that counts where the advantage is negative (Ye et al. 2020; verl's clip_ratio_c); null: none"
    sapo_temperature_pos: float = Field(default=1.0, gt=0.0)
    "of sapo's gate where the advantage is positive (Gao et al. 2025; TRL's)"
    sapo_temperature_neg: float = Field(default=1.05, gt=0.0)
    top_entropy_quantile: float = Field(default=1.0, ge=0.0, le=1.0)
    """share of a minibatch's tokens, those of the highest entropy, that the policy loss keeps (Wang et al. 2025, 0.2
    there); below 1 a forward more of each minibatch"""
    off_policy_mask_threshold: float | None = None
    """nats a token: a response is no part of the policy loss where its advantage is negative and the policy has become
    less likely than the sampler by more, in the mean (DeepSeek-V3.2, section 3.1); null: all are"""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    "constant_length: sums over responses of at most sampling.max_new_tokens, divided by that length"
    entropy_coef: float = Field(default=0.0, ge=0.0)
    "of a bonus on the mean entropy of the tokens; with entropy_target what it begins with"
    entropy_target: float | None = Field(default=None, gt=0.0)
    "nats a token: below it the coefficient grows by entropy_coef_step an optimizer step, above it shrinks and rests"
    entropy_coef_step: float = Field(default=0.005, gt=0.0)
    entropy_coef_max: float = Field(default=1.0, gt=0.0)
    report_entropy: bool = True
    "false: where no bonus is paid the entropy is not computed either"
    kl_coef: float = Field(default=0.0, ge=0.0)
    "of the KL divergence from the first model; 0: no reference model is held"
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3"
    "Schulman 2020; `+`: that value with k2's gradient, which is that of the KL itself"
    kl_placement: Literal["loss", "reward"] = "loss"
    "a term of the loss, or a penalty on each token's reward"
    kl_bias_correction: bool = False
    "weigh the KL term by the policy ratio: right in later minibatches too (DeepSeek-V3.2, section 3.1)"
    sync_ref_model: bool = False
    "true: the reference follows the policy (Gorbatovski et al. 2024, 'Learn your reference model'); as TRL"
    ref_model_sync_steps: int = Field(default=512, ge=1)
    "optimizer steps from one time to the next"
    ref_model_mixup_alpha: float = Field(default=0.6, gt=0.0, le=1.0)
    "reference = alpha policy + (1 - alpha) reference"
    kl_target: float | None = Field(default=None, gt=0.0)
    "nats a token that the coefficient is steered to (Ziegler et al. 2019, section 2.2); null: it stays"
    kl_horizon: float = Field(default=10_000.0, gt=0.0)
    "kl_target: samples over which the coefficient may change by about its size"
    distill_coef: float = Field(default=0.0, ge=0.0)
    "of the divergence from `models.teacher` over the vocabulary, a term of the loss on the student's own samples"
    distill_beta: float = Field(default=1.0, ge=0.0, le=1.0)
    "1: reverse, KL(student || teacher); 0: forward; between: Jensen-Shannon (GKD, Agarwal et al. 2024; TRL's beta)"
    distill_top_k: int | None = Field(default=None, ge=1)
    "over the teacher's so many likeliest tokens, and all others as one; null: over the whole vocabulary"
    echo_coef: float = Field(default=0.0, ge=0.0)
    """of the cross-entropy of what an environment gave between turns, a mean over those tokens (prime-rl's echo);
    0: tools' results are read, and nothing is learned of them"""
    truncated: Literal["learn", "mask", "bootstrap"] = "learn"
    "responses cut at max_new_tokens: as any other, no part of the loss, or (gae) as if they went on"
    dynamic_sampling: bool = False
    """groups whose rewards are all equal are replaced by further prompts while the others are generated (DAPO); with
    rollout.max_staleness in the phase before the update that learns from the batch, whose rewards are awaited there"""
    dynamic_sampling_metric: Name | None = None
    "the part of the reward that is to differ, such as correct (verl's filter_groups.metric); null: the reward before "
    "shaping"
    max_extra_groups: float = Field(default=3.0, gt=0.0)
    "dynamic_sampling: further prompts for each that was asked for; beyond, groups without gradient fill the batch"
    correction: CorrectionConfig = CorrectionConfig()
    "what is done about samples of another policy than the one that learns"

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from values that are learned."""
        return self.advantage == "gae"

    @property
    def compares_groups(self) -> bool:
        """Whether advantages come from the samples of one prompt."""
        return self.advantage not in ("gae", "reinforce_pp", "none")

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether entropy is a term of the loss, now or later."""
        return self.entropy_coef > 0.0 or self.entropy_target is not None

    @property
    def upper_clip(self) -> float:
        """How far above 1 a ratio may be."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    @model_validator(mode="before")
    @classmethod
    def _row(cls, given: Any) -> Any:
        """Fill in the algorithm's row; a kind that is none is refused where fields are checked."""
        if not isinstance(given, dict):
            return given
        for former, (default, place) in _MOVED.items():
            if given.get(former, default) != default:
                raise ValueError(
                    f"{former} is {place} now; write it there, or take a correction.kind (docs/reference/algorithms.md)"
                )
        given = {key: value for key, value in given.items() if key not in _MOVED}
        kind = given.get("kind", "ppo")
        return {**ALGORITHMS.get(kind if isinstance(kind, str) else "", {}), **given}

    @model_validator(mode="after")
    def _clipping(self) -> AlgorithmConfig:
        if self.policy_loss == "clip" and not self.clip_ratio < 1.0:
            raise ValueError(
                f"clip_ratio {self.clip_ratio} clips nothing: ratios are above 0 and the lower bound is 1 - clip_ratio "
                "is not; take one below 1, such as 0.2, or policy_loss cispo"
            )
        if self.dual_clip is not None and self.policy_loss != "clip":
            raise ValueError(
                f"dual_clip is of policy_loss clip, this is {self.policy_loss}; take it out (null)"
            )
        if self.policy_loss == "geo_mean" and (self.ratio_level != "token" or not self.compares_groups):
            raise ValueError(
                f"policy_loss geo_mean takes the mean of single tokens' ratios under one advantage a response, got "
                f"ratio_level {self.ratio_level}, advantage {self.advantage}; take token, group_std"
            )
        if self.top_entropy_quantile < 1.0 and self.has_entropy_bonus:
            raise ValueError(
                f"top_entropy_quantile {self.top_entropy_quantile} keeps the tokens of high entropy, and an entropy "
                "bonus raises that of all; take out one of the two (entropy_coef 0, entropy_target null)"
            )
        return self

    @model_validator(mode="after")
    def _combined(self) -> AlgorithmConfig:
        if self.combine != "sum" and self.compares_groups and self.advantage != "batch_std":
            raise ValueError(
                f"combine {self.combine} has normalised each part within its group, and advantage {self.advantage} "
                "would do so to the sum again; set advantage to batch_std"
            )
        return self

    @model_validator(mode="after")
    def _kl(self) -> AlgorithmConfig:
        in_loss = self.kl_coef > 0.0 and self.kl_placement == "loss"
        if in_loss and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator k1 in the loss has an expected gradient of zero: it would cost a forward and do nothing; "
                "take k2 or k1+ (the gradient of the KL divergence), k3, or kl_placement reward"
            )
        if self.kl_placement == "reward" and self.kl_estimator.endswith("+"):
            raise ValueError(
                f"kl_estimator {self.kl_estimator} differs from {self.kl_estimator[:-1]} in its gradient, and a "
                f"reward has none; take {self.kl_estimator[:-1]}, or kl_placement loss"
            )
        if self.advantage == "none" and (self.distill_coef == 0.0 or self.kl_placement == "reward"):
            raise ValueError(
                f"advantage none learns from no reward, and distill_coef is {self.distill_coef:g}, kl_placement "
                f"{self.kl_placement}: nothing to learn from; set distill_coef above 0 with kl_placement loss, or take "
                "another advantage"
            )
        if self.kl_bias_correction and not in_loss:
            raise ValueError(
                "kl_bias_correction weighs the KL term of the loss, and there is none: kl_coef is "
                f"{self.kl_coef}, kl_placement {self.kl_placement}; take it out, or set kl_coef with kl_placement loss"
            )
        if self.kl_target is not None and self.kl_coef == 0.0:
            raise ValueError(
                "kl_target steers kl_coef by factors, and 0 stays 0; give a kl_coef to begin with, such as 0.01"
            )
        return self

    @model_validator(mode="after")
    def _truncated(self) -> AlgorithmConfig:
        if self.truncated == "bootstrap" and not self.has_critic:
            raise ValueError(
                f"truncated bootstrap goes by a critic's values, advantage {self.advantage} has none; take mask "
                "or learn"
            )
        if self.dynamic_sampling and not self.compares_groups:
            raise ValueError(
                f"dynamic_sampling replaces groups of equal rewards, advantage {self.advantage} compares none; take it "
                "out, or an algorithm that does, such as dapo"
            )
        return self

    @model_validator(mode="after")
    def _level(self) -> AlgorithmConfig:
        require_level(self.correction, self.ratio_level)
        return self

    @model_validator(mode="after")
    def _effects(self) -> AlgorithmConfig:
        """Refuse a key that would change nothing; its default, which a run's own config spells out, says nothing."""
        for key, what in _without_effect(self).items():
            value, default = getattr(self, key), type(self).model_fields[key].default
            if value != default:
                raise ValueError(
                    f"{key} is of {what}, and with kind {self.kind} (advantage {self.advantage}) {value} would have no "
                    f"effect; take it out, or set what it is of"
                )
        return self


def require_teacher(
    models: ModelsConfig, algorithm: AlgorithmConfig, data: DataConfig, *, environment: str | None
) -> None:
    """Raise ValueError for a teacher without a coefficient, or what belongs to a teacher without one."""
    if (models.teacher is None) != (algorithm.distill_coef == 0.0):
        raise ValueError(
            f"models.teacher is {models.teacher or 'null'} and algorithm.distill_coef {algorithm.distill_coef:g} (kind "
            f"{algorithm.kind}): one without the other does nothing; name a teacher and give it a coefficient above 0, "
            "as kind distill has it"
        )
    own = any(one.teacher_prompt_template is not None for one in data.each_source())
    if own and models.teacher is None:
        raise ValueError(
            "data.teacher_prompt_template is what a teacher reads, and models.teacher is null; name one, such as the "
            "target itself, or take the template out"
        )
    if own and environment is not None:
        raise ValueError(
            "data.teacher_prompt_template is not known to an environment, whose first words belong to every prompt; "
            "take it out, or environment.kind"
        )


def require_echo(algorithm: AlgorithmConfig, *, environment: str | None, max_turns: int) -> None:
    """Raise ValueError where nothing is given between turns that could be learned."""
    if algorithm.echo_coef and (environment is None or max_turns == 1):
        raise ValueError(
            f"algorithm.echo_coef {algorithm.echo_coef:g} learns what an environment says between turns, got "
            f"environment.kind {environment or 'null'} with max_turns {max_turns}; name one, such as tools, with "
            "max_turns 2 or more, or set echo_coef to 0"
        )


def require_groups(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> None:
    """Raise ValueError where groups are compared and there are none, or cannot be replaced while others run ahead."""
    if algorithm.compares_groups and rollout.samples_per_prompt < 2:
        raise ValueError(
            f"algorithm.kind {algorithm.kind} compares samples of one prompt: rollout.samples_per_prompt >= 2, got "
            f"{rollout.samples_per_prompt}"
        )
    if rollout.schedule == "free" and algorithm.dynamic_sampling:
        raise ValueError(
            "algorithm.dynamic_sampling replaces groups of the batch that is due next, and with rollout.schedule free "
            "batches are the groups that end first; set schedule: recorded, or dynamic_sampling: false"
        )
