"""The loss of some responses: policy, KL divergence, entropy (`core.settings.algorithm`); its steered coefficients,
what is reported of it, and the objective that the trainer takes: a batch is a minibatch of an update's responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from ....core.errors import NumericsError
from ....core.settings.algorithm import AlgorithmConfig
from ....engine.decoding.logprobs import scaled_logits
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


_FIRST = "log_ratio_to_sampler"
_OF_SEEN = ("entropy", "approx_kl", "clip_fraction", "clip_fraction_low", "clip_fraction_high", _FIRST)
"Means over the tokens whose logits were computed; of the others they are not known."


LOG_RATIO_BINS, LOG_RATIO_WIDTH = 32, 2.0**-6
"Of the histogram of token log-ratios, new over old: from -0.25 to 0.25, what is beyond in the outermost."


class OpenPart(NamedTuple):
    """What one trainer adds to a minibatch: weighted sums by name, their weight, the smallest and largest ratio."""

    sums: dict[str, float]
    weight: float
    ratios: tuple[float, float] | None


NOTHING = OpenPart({}, 0.0, None)


class MinibatchMetrics:
    """Weighted sums within a minibatch, plain means over minibatches; read from a device once a minibatch.

    `ratio_min` and `ratio_max` are over all of them. `ratio_at_first_minibatch` is the policy ratio furthest from 1
    before any step was taken: it says how well engine and learner agree on log-probabilities. It is left out where no
    sample of that minibatch had a gradient: no ratio was computed. `first_log_ratio` is the mean distance of the
    learner's own log-probabilities from the sampler's there, whatever forward or correction ratios are taken by.
    """

    def __init__(self) -> None:
        self._open: dict[str, Tensor] = {}
        self._open_weight: Tensor | None = None
        self._extremes: Tensor | None = None
        self._closed: list[dict[str, float]] = []
        self._ratios: list[tuple[float, float] | None] = []
        self._log_ratio_counts: Tensor | None = None
        self.work = (0, 0, 0)
        "this trainer's packs with a gradient, their tokens, and those of the rows that they stand for"

    def count(self, packed: PackedSequences) -> None:
        """Add a pack."""
        packs, tokens, of_rows = self.work
        self.work = packs + 1, tokens + len(packed.ids), of_rows + sum(len(one) for one in packed.places)

    def add(self, name: str, per_token: Float[Tensor, " M"], weight: Float[Tensor, " M"]) -> None:
        """Add a part of the current minibatch; weights of the whole minibatch sum to 1.

        Tokens that are left out count as 0 here, as they do in the loss.
        """
        part = (per_token.detach().float() * weight).sum().double()
        before = self._open.get(name)
        self._open[name] = part if before is None else before + part

    def add_ratio(
        self, policy: PolicyLoss, differences: Float[Tensor, " M"], weight: Float[Tensor, " M"]
    ) -> None:
        """Add what depends on the ratio: approx_kl (k3, Schulman 2020, of `differences` new less old), clip fractions.

        The ratios themselves are those of single tokens, whatever level the loss takes them at.
        """
        difference = differences.detach()
        total = weight.sum().double()
        self._open_weight = total if self._open_weight is None else self._open_weight + total
        self.add("approx_kl", torch.expm1(difference) - difference, weight)
        self.add("clip_fraction", (policy.clipped_low | policy.clipped_high).float(), weight)
        self.add("clip_fraction_low", policy.clipped_low.float(), weight)
        self.add("clip_fraction_high", policy.clipped_high.float(), weight)
        bins = (difference / LOG_RATIO_WIDTH).floor().long() + LOG_RATIO_BINS // 2
        before = self._log_ratio_counts
        if before is None:
            before = torch.zeros(LOG_RATIO_BINS, device=difference.device)
        counted = (weight > 0.0).float()
        self._log_ratio_counts = before.index_add(0, bins.clamp(0, LOG_RATIO_BINS - 1), counted)
        ratio = difference.exp()
        seen = ratio if self._extremes is None else torch.cat([self._extremes, ratio])
        self._extremes = torch.stack([seen.min(), seen.max()])

    def open_part(self) -> OpenPart:
        """This trainer's part of the minibatch that is under way; read from the device."""
        if self._open_weight is None or self._extremes is None:
            return NOTHING
        values = (
            torch.stack([*self._open.values(), self._open_weight, *self._extremes.double()]).cpu().tolist()
        )
        sums = dict(zip(self._open, values, strict=False))
        return OpenPart(sums, values[len(sums)], (values[-2], values[-1]))

    def close_minibatch(
        self, parts: Sequence[OpenPart], *, grad_norm: float, max_grad_norm: float = math.inf
    ) -> dict[str, float]:
        """End a minibatch after its optimizer step; its figures. `parts` are those of all trainers, by rank."""
        sums = dict(parts[0].sums)
        for part in parts[1:]:
            for name, value in part.sums.items():
                sums[name] = sums.get(name, 0.0) + value
        ratios = [part.ratios for part in parts if part.ratios is not None]
        self._ratios.append((min(r[0] for r in ratios), max(r[1] for r in ratios)) if ratios else None)
        weight = sum(part.weight for part in parts)
        seen = {name: value / weight for name, value in sums.items() if name in _OF_SEEN}
        own = {"grad_norm": grad_norm, "grad_clipped_share": float(grad_norm > max_grad_norm)}
        self._closed.append({"policy_loss": 0.0, **sums, **seen, **own})
        self._open, self._open_weight, self._extremes = {}, None, None
        return self._closed[-1]

    def log_ratio_counts(self) -> tuple[int, ...]:
        """Tokens of this trainer in each bin of the histogram, over all minibatches; read from the device."""
        counts = self._log_ratio_counts
        return (
            (0,) * LOG_RATIO_BINS if counts is None else tuple(int(count) for count in counts.cpu().tolist())
        )

    def means(self) -> dict[str, float]:
        """Mean of every figure. Raises NumericsError naming one that is not finite."""
        out = {}
        for name in dict.fromkeys(name for one in self._closed for name in one):
            values = [one[name] for one in self._closed if name in one]
            out[name] = sum(values) / len(values)
        if out.pop(_FIRST, None) is not None and _FIRST in self._closed[0]:
            out["first_log_ratio"] = self._closed[0][_FIRST]
        out["num_skipped_minibatches"] = float(sum(one["grad_norm"] == 0.0 for one in self._closed))
        if self._ratios and self._ratios[0] is not None:
            out["ratio_at_first_minibatch"] = max(self._ratios[0], key=lambda ratio: abs(ratio - 1.0))
        if known := [ratios for ratios in self._ratios if ratios is not None]:
            out["ratio_min"], out["ratio_max"] = min(r[0] for r in known), max(r[1] for r in known)
        for name, value in out.items():
            if not math.isfinite(value):
                raise NumericsError(f"learner figure {name} is {value}; expected a finite number")
        return out


def added_up(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Counts of all trainers, one by one."""
    return tuple(sum(of_one) for of_one in zip(*counts, strict=True))


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
        engine: Tensor | None = None
        if targets.engine is not None and learned:
            self.laps.lap("collate")
            engine = targets.engine.of(self.forward.rows_of(learned, self.experience))
            self.laps.lap("scoring")
        packs = self.forward.packs(learned, self.experience)
        return PolicyBatch(self, packs, weight, share, engine, num_steps, least_entropy)


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
        packed = of.experience.packed(pack.rows)
        teacher: TeacherLogits | None = None
        if of.teacher is not None:
            of.laps.lap("collate")
            teacher = of.teacher.logits(of.experience, pack.rows, packed)
            of.laps.lap("teacher")
        if not pack.is_filler:
            of.metrics.count(packed)
        packed, (of_token, num_tokens, *there) = packed.sent(
            model.device,
            sequences.of_token.numpy(),
            sequences.num_tokens.numpy(),
            *(per_token[pack.rows][mask].numpy() for per_token in given.values()),
        )
        per_token = dict(zip(given, there, strict=True))
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
        logprobs = found.logprobs
        for logits in seen or ():
            of.laps.lap("forward")
            self._show(pack, packed, logits)
            of.laps.lap("observers")
        gap = (logprobs.detach() - per_token["sampler"]).abs()
        of.metrics.add(_FIRST, gap, per_token["share"])
        if self.engine is not None:
            logprobs = with_values(logprobs, per_token["engine"])
        return objective(
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
