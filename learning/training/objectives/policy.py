"""The loss of some responses: policy, KL divergence, entropy (`core.settings.algorithm`); its steered coefficients,
what is reported of it, and the objective that the trainer takes: a batch is a minibatch of an update's responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ....core.settings.algorithm import AlgorithmConfig
from ....engine.decoding.logprobs import scaled_logits
from ....engine.weights.causal_lm import PreTrainedModel
from ..batching import Pack, PackedSequences
from ..engine_scoring import with_values
from ..experience import Experience
from ..laps import Laps
from ..parallel import OneTrainer
from ..policy_forward import PolicyForward
from .head_statistics import TeacherLogits
from .losses import (
    PolicyLoss,
    Sequences,
    cispo_loss,
    clipped_policy_loss,
    geometric_mean_loss,
    kl_estimate,
    log_ratio,
    off_policy_kept,
    sapo_loss,
    token_weights,
)
from .minibatch_metrics import FIRST_LOG_RATIO, NOTHING, MinibatchMetrics, OpenPart
from .targets import Targets
from .teacher import Teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Of `M` response tokens of whole responses, one number each, on the learner's device.

    The first two and `divergence` learn.
    """

    logprobs: Float[Tensor, " M"]
    entropy: Float[Tensor, " M"] | None
    "None: neither reported nor paid for"
    old_logprobs: Float[Tensor, " M"]
    advantages: Float[Tensor, " M"]
    importance: Float[Tensor, " M"] | None
    "weights against the sampler (`learning.training.objectives.off_policy`)"
    reference: Float[Tensor, " M"] | None
    "log-probabilities of the reference, where the KL divergence is a term of the loss"
    sequences: Sequences
    weight: Float[Tensor, " M"]
    "of the token in the loss: over a minibatch the sum of weight times loss is the loss"
    share: Float[Tensor, " M"]
    "one over the tokens of the minibatch, for means over tokens"
    divergence: Float[Tensor, " M"] | None = None
    "from a teacher, where it is a term of the loss; learns too"
    sampler: Float[Tensor, " M"] | None = None
    "its log-probabilities; off_policy_mask_threshold goes by them"
    least_entropy: float | None = None
    "of a token that the policy loss keeps"


def objective(
    inputs: LossInputs,
    *,
    algorithm: AlgorithmConfig,
    kl_coef: float,
    entropy_coef: float,
    metrics: MinibatchMetrics,
) -> Float[Tensor, ""]:
    """These tokens' part of a minibatch's loss.

    The entropy bonus is a mean over tokens however the losses are added up, as in TRL.
    """
    ratios = log_ratio(inputs.logprobs, inputs.old_logprobs, algorithm.ratio_level, inputs.sequences)
    policy = _policy_loss(ratios, inputs, algorithm)
    loss = policy.loss if inputs.importance is None else policy.loss * inputs.importance
    if algorithm.off_policy_mask_threshold is not None:
        assert inputs.sampler is not None, "a batch brings the sampler's log-probabilities"
        old = inputs.sampler, inputs.advantages, inputs.sequences
        loss = loss * off_policy_kept(inputs.logprobs, *old, algorithm.off_policy_mask_threshold)
    if inputs.least_entropy is not None and inputs.entropy is not None:
        loss = loss * (inputs.entropy >= inputs.least_entropy)
    metrics.add("policy_loss", loss, inputs.weight)
    if inputs.reference is not None:
        kl = kl_estimate(inputs.logprobs, inputs.reference, algorithm.kl_estimator)
        if algorithm.kl_bias_correction:
            kl = kl * log_ratio(inputs.logprobs, inputs.old_logprobs, "token").exp()
            # that ratio ends at the old policy; from there to the sampler it is the weight
            kl = kl if inputs.importance is None else kl * inputs.importance
        metrics.add("kl_loss", kl, inputs.weight)
        loss = loss + kl_coef * kl
    if inputs.divergence is not None:
        metrics.add("distill_loss", inputs.divergence, inputs.weight)
        loss = loss + algorithm.distill_coef * inputs.divergence
    total = (loss * inputs.weight).sum()
    if inputs.entropy is not None:
        metrics.add("entropy", inputs.entropy, inputs.share)
        if entropy_coef > 0.0:
            total = total - entropy_coef * (inputs.entropy * inputs.share).sum()
    metrics.add_ratio(policy, inputs.logprobs - inputs.old_logprobs, inputs.share)
    return total


def _policy_loss(ratios: Tensor, inputs: LossInputs, algorithm: AlgorithmConfig) -> PolicyLoss:
    clip_low, clip_high = algorithm.clip_ratio, algorithm.upper_clip
    if algorithm.policy_loss == "cispo":
        return cispo_loss(ratios, inputs.logprobs, inputs.advantages, clip_low=clip_low, clip_high=clip_high)
    if algorithm.policy_loss == "sapo":
        pos, neg = algorithm.sapo_temperature_pos, algorithm.sapo_temperature_neg
        return sapo_loss(ratios, inputs.advantages, temperature_pos=pos, temperature_neg=neg)
    if algorithm.policy_loss == "geo_mean":
        bounds = {"clip_low": clip_low, "clip_high": clip_high}
        return geometric_mean_loss(ratios, inputs.advantages, inputs.sequences, **bounds)
    return clipped_policy_loss(
        ratios, inputs.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=algorithm.dual_clip
    )


_MOST_ERROR = 0.2


@dataclass(slots=True)
class Coefficients:
    """Both as they stand; part of a learner's state."""

    kl: float
    entropy: float
    last_entropy: float | None = None
    "nats a token, of the last optimizer step"

    @classmethod
    def first(cls, algorithm: AlgorithmConfig) -> Coefficients:
        """Those that a run begins with."""
        return cls(kl=algorithm.kl_coef, entropy=algorithm.entropy_coef)

    def entropy_bonus(self, algorithm: AlgorithmConfig) -> float:
        """The coefficient that counts now: with a target none while the entropy is above it."""
        target = algorithm.entropy_target
        if target is not None and (self.last_entropy is None or self.last_entropy > target):
            return 0.0
        return self.entropy

    def after_step(self, entropy: float | None, algorithm: AlgorithmConfig) -> None:
        """Take note of the entropy of an optimizer step.

        Source: He et al. 2025, 'Skywork Open Reasoner 1', section 4.2 (adaptive entropy control).
        """
        target = algorithm.entropy_target
        if target is None or entropy is None:
            return
        step = algorithm.entropy_coef_step if entropy <= target else -algorithm.entropy_coef_step
        self.entropy = min(max(self.entropy + step, 0.0), algorithm.entropy_coef_max)
        self.last_entropy = entropy

    def after_update(self, kl: float | None, num_samples: int, algorithm: AlgorithmConfig) -> None:
        """Take note of an update's divergence from the reference, in nats a token.

        Source: Ziegler et al. 2019, section 2.2 (log-space proportional controller), as in verl and TRL's PPO.
        """
        target = algorithm.kl_target
        if target is None or kl is None:
            return
        error = min(max(kl / target - 1.0, -_MOST_ERROR), _MOST_ERROR)
        self.kl *= max(1.0 + error * num_samples / algorithm.kl_horizon, 0.0)


class SeenLogits(NamedTuple):
    """Logits over the temperature of some samples' `M` response tokens, without a gradient."""

    sample_indices: Sequence[int]
    lengths: Sequence[int]
    "response tokens of each sample"
    scaled: Float[Tensor, "M V"]
    packed: PackedSequences
    "whose targets they predict"
    step: int = 0
    "optimizer steps before"


@runtime_checkable
class LogitsObserver(Protocol):
    """Keeps or learns from what an update's own forwards say; it changes nothing there."""

    def begin(self) -> None:
        """A new update begins."""

    def observe(self, seen: SeenLogits) -> None:
        """See what one forward said."""

    def step(self) -> None:
        """A minibatch has ended. Collective."""

    def end(self, trainers: OneTrainer) -> dict[str, float]:
        """The update has ended; figures of it. Collective."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """The policy's loss on one update's responses, given what preceded its steps."""

    experience: Experience
    targets: Targets
    algorithm: AlgorithmConfig
    coefficients: Coefficients
    forward: PolicyForward
    weight_version: int
    "before the update"
    metrics: MinibatchMetrics
    "are added to"
    laps: Laps
    observers: Sequence[LogitsObserver] = ()
    teacher: Teacher | None = None
    "whose divergence is a term of the loss"
    max_new_tokens: int | None = None
    "of a response; loss_aggregation constant_length needs it"

    def batch(self, rows: list[int], *, num_steps: int, least_entropy: float | None = None) -> PolicyBatch:
        """One minibatch of samples, after so many optimizer steps. Collective with `trainer.scoring` engine.

        `least_entropy` is of the tokens that the policy loss keeps; None: of all.
        """
        mask, targets = self.experience.mask, self.targets
        weight, share = torch.zeros(2, *mask.shape)
        counted = mask[rows] & targets.learned[rows, None]
        weight[rows] = token_weights(
            counted, self.algorithm.loss_aggregation, max_tokens=self.max_new_tokens or 1
        )
        share[rows] = token_weights(counted, "token_mean")
        learned = targets.with_gradient(rows)
        num_given = int((~self.experience.sampled(learned)).sum()) if targets.has_echo and learned else 0
        engine: Tensor | None = None
        if targets.engine is not None and learned:
            self.laps.lap("collate")
            engine = targets.engine.of(self.forward.rows_of(learned, self.experience))
            self.laps.lap("scoring")
        packs = self.forward.packs(learned, self.experience)
        echo_share = 1.0 / max(1, num_given)
        return PolicyBatch(self, packs, weight, share, engine, num_steps, least_entropy, echo_share)


@dataclass(slots=True)
class PolicyBatch:
    """See `trainer_core.Batch`; tensors [B, R] are those of `LossInputs`, of all the update's rows."""

    of: PolicyObjective
    packs: list[Pack]
    weight: Float[Tensor, "B R"]
    share: Float[Tensor, "B R"]
    engine: Float[Tensor, "B R"] | None
    "log-probabilities by the engine's forward, where they are to be its"
    num_steps: int
    least_entropy: float | None = None
    echo_share: float = 1.0
    "one over the tokens of the minibatch that an environment gave"
    part: OpenPart = NOTHING
    "of its figures, once `problem` has been asked"

    def problem(self, losses: Sequence[float]) -> str | None:
        """See `Batch`."""
        self.part = self.of.metrics.open_part()
        for pack, loss in zip(self.packs, losses, strict=True):
            if not math.isfinite(loss):
                samples = [self.of.experience.sample_indices[row] for row in pack.rows]
                return (
                    f"the loss of weight version {self.of.weight_version} is {loss}; "
                    f"expected a finite number; samples {samples[:8]}; lower trainer.learning_rate"
                )
        return None

    def loss(self, model: PreTrainedModel, pack: Pack) -> Tensor:
        """See `Batch`."""
        of, algorithm, given = self.of, self.of.algorithm, self._given(pack)
        mask = of.experience.mask[pack.rows]
        sequences = Sequences.of(mask)
        has_echo = of.targets.has_echo
        packed = of.experience.packed(pack.rows, whole=has_echo)
        teacher: TeacherLogits | None = None
        if of.teacher is not None:
            of.laps.lap("collate")
            teacher = of.teacher.logits(of.experience, pack.rows, packed)
            of.laps.lap("teacher")
        if not pack.is_filler:
            of.metrics.count(packed)
        sampled = of.experience.sampled(pack.rows).numpy()
        kinds = [np.flatnonzero(sampled), np.flatnonzero(~sampled)] if has_echo else []
        packed, (of_token, num_tokens, *there) = packed.sent(
            model.device,
            sequences.of_token.numpy(),
            sequences.num_tokens.numpy(),
            *(per_token[pack.rows][mask].numpy() for per_token in given.values()),
            *kinds,
        )
        per_token = dict(zip(given, there, strict=False))
        of.laps.lap("collate")
        asks = algorithm.has_entropy_bonus or self.least_entropy is not None
        has_entropy = asks or algorithm.report_entropy
        seen: list[Tensor] | None = [] if of.observers and not pack.is_filler else None
        found = of.forward.statistics(
            model,
            packed,
            entropy=has_entropy,
            learns_entropy=algorithm.has_entropy_bonus,
            logits=seen,
            teacher=teacher,
        )
        echo: Tensor | None = None
        if has_echo:
            own, of_environment = there[len(given) :]
            echo, found = -found.logprobs[of_environment], found.of(own)
        logprobs = found.logprobs
        for logits in seen or ():
            of.laps.lap("forward")
            shown = of.experience.packed(pack.rows).to(model.device) if has_echo else packed
            self._show(pack, shown, logits[there[len(given)]] if has_echo else logits)
            of.laps.lap("observers")
        gap = (logprobs.detach() - per_token["sampler"]).abs()
        of.metrics.add(FIRST_LOG_RATIO, gap, per_token["share"])
        if self.engine is not None:
            logprobs = with_values(logprobs, per_token["engine"])
        loss = objective(
            LossInputs(
                logprobs=logprobs,
                entropy=found.entropy,
                divergence=found.divergence,
                old_logprobs=per_token["old_logprobs"],
                advantages=per_token["advantages"],
                importance=per_token.get("importance"),
                reference=per_token.get("reference"),
                sequences=Sequences(of_token=of_token, num_tokens=num_tokens),
                weight=per_token["weight"],
                share=per_token["share"],
                sampler=per_token["sampler"],
                least_entropy=self.least_entropy,
            ),
            algorithm=algorithm,
            kl_coef=of.coefficients.kl,
            entropy_coef=of.coefficients.entropy_bonus(algorithm),
            metrics=of.metrics,
        )
        if echo is None:
            return loss
        share = torch.full_like(echo, 0.0 if pack.is_filler else self.echo_share)
        of.metrics.add("echo_loss", echo, share)
        return loss + algorithm.echo_coef * (echo * share).sum()

    def _given(self, pack: Pack) -> dict[str, Tensor]:
        """What the loss takes of each token, [B, R]; tokens of a filler weigh nothing."""
        experience, targets = self.of.experience, self.of.targets
        given = {
            "old_logprobs": experience.old_logprobs,
            "sampler": experience.sampler_logprobs,
            "advantages": targets.advantages,
            "weight": torch.zeros_like(self.weight) if pack.is_filler else self.weight,
            "share": torch.zeros_like(self.share) if pack.is_filler else self.share,
            "importance": targets.importance,
            "reference": targets.reference if targets.has_kl_loss else None,
            "engine": self.engine,
        }
        return {name: per_token for name, per_token in given.items() if per_token is not None}

    def _show(self, pack: Pack, packed: PackedSequences, logits: Tensor) -> None:
        experience = self.of.experience
        samples = [experience.sample_indices[row] for row in pack.rows]
        lengths = experience.mask[pack.rows].sum(dim=1).tolist()
        scaled = scaled_logits(logits, self.of.forward.temperature)
        seen = SeenLogits(samples, lengths, scaled, packed, step=self.num_steps)
        for observer in self.of.observers:
            observer.observe(seen)
