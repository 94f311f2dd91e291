"""The learner: PPO, GRPO and kin on finished rollouts, deterministic to the last bit on the CPU.

What an algorithm is made of: `core.settings.algorithm`; its formulas: `learning.training.objectives`.
Old log-probabilities are the engine's, or of one more forward here where it rounds otherwise; the reference is a frozen
copy of the initial target.
Equal rollouts give bitwise equal parameters on the CPU (CUDA may add up gradients in any order): samples are
ordered by index, minibatches are drawn from (seed, weight version), and nothing else is random.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from ...core.config import AlgorithmConfig, TrainerConfig
from ...core.errors import ConfigError
from ...core.records import Rollout, UpdateReport
from ...engine.weights.causal_lm import PreTrainedModel
from ...engine.weights.chunks import describe_not_finite, not_finite
from .engine_scoring import EngineScorer, EngineValues
from .experience import Experience, collate
from .laps import peak_flops, step_flops
from .learner_state import LearnerState
from .learning_rate import Horizon, rate_factor
from .objectives.advantages import normalized_sum
from .objectives.critic import Critic
from .objectives.minibatch_metrics import MinibatchMetrics, added_up
from .objectives.off_policy import lag_metrics, recomputed
from .objectives.policy import Coefficients, LogitsObserver, PolicyObjective
from .objectives.targets import Targets, update_targets
from .objectives.teacher import Teacher
from .parallel import OneTrainer
from .policy_forward import FirstForwards, Part, PolicyForward
from .reloaded import few_of
from .sharded import sources_of
from .trainer_core import Trainer
from .training_forward import prepare_for_training, require_packs


class Learner(Trainer):
    """Holds the target, its optimizer, for PPO a critic, and with KL control a reference.

    With `trainer.lora` only adapters learn, and the reference is the target with them switched off.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        algorithm: AlgorithmConfig,
        trainer: TrainerConfig,
        temperature: float,
        seed: int,
        pad_token_id: int,
        vocab_size: int | None = None,
        observers: Sequence[LogitsObserver] = (),
        compute_dtype: torch.dtype = torch.float32,
        scorer: EngineScorer | None = None,
        part_weights: Mapping[str, float] | None = None,
        trainers: OneTrainer | None = None,
        horizon: Horizon | None = None,
    ) -> None:
        """See `Trainer`; all trainers of a group get equal rollouts.

        `observers` see every update's logits, for a draft model. `scorer` values log-probabilities by the engine's
        forward instead of the model's own; `trainer.scoring` engine needs one.
        `part_weights`: of a mixture of rewards, for `algorithm.combine` normalize_then_sum.
        `horizon` is how far the run goes; a schedule that falls, and `loss_aggregation` constant_length, need one.
        Raises ConfigError: settings that do not go together; and as `Trainer`.
        """
        self._horizon = horizon or Horizon()
        _require_consistent(algorithm, trainer, temperature, self._horizon, has_scorer=scorer is not None)
        prepare_for_training(model, gradient_checkpointing=trainer.gradient_checkpointing is True)
        require_packs(model)
        is_unfilled = bool(sources_of(model))
        super().__init__(
            model,
            trainer,
            seed=seed,
            rate_factor=rate_factor(trainer, self._horizon),
            compute_dtype=compute_dtype,
            trainers=trainers,
            has_reference=algorithm.kl_coef > 0.0,
            moves_reference=algorithm.sync_ref_model,
        )
        if is_unfilled:
            # shards have been filled
            require_packs(model)
        self._scorer = scorer
        self._part_weights = (part_weights or {}) if algorithm.combine == "normalize_then_sum" else {}
        self.algorithm = algorithm
        self.trainer = trainer
        self.pad_token_id = pad_token_id
        self.observers = list(observers)
        text_config = model.config.get_text_config()
        self._forward = PolicyForward(
            # padded ids are cut off here as in the engine, or the two would not normalise over the same tokens
            vocab_size=vocab_size or int(text_config.vocab_size),
            temperature=temperature,
            max_tokens=trainer.max_tokens_per_forward,
            compute_dtype=compute_dtype,
            trainers=self.trainers,
        )
        self._first = FirstForwards(
            forward=self._forward,
            model=model,
            reference=self.reference,
            adapter=self.adapter,
            scorer=scorer,
            weights=self.weights,
            block_size=trainer.block_samples * self.trainers.size,
        )
        self.critic: Critic | None = None
        if algorithm.has_critic:
            self.critic = Critic(
                text_config.hidden_size,
                seed=seed,
                learning_rate=trainer.value_learning_rate,
                max_grad_norm=trainer.max_grad_norm,
                device=model.device,
                trainers=self.trainers,
            )
        self._coefficients = Coefficients.first(algorithm)
        self._teacher: Teacher | None = None

    def take_teacher(self, model: PreTrainedModel) -> None:
        """Learn from a model's distribution, too (`algorithm.distill_coef`); it is frozen here. Collective."""
        self._teacher = Teacher.of(
            model,
            self.algorithm,
            vocab_size=self._forward.vocab_size,
            compute_dtype=self.compute_dtype,
            trainers=self.trainers,
        )

    def update(self, rollouts: Sequence[Rollout], *, recompute_old: bool = False) -> UpdateReport:
        """Learn from one batch of rollouts; `weight_version` grows by one.

        With `recompute_old` ratios are over log-probabilities of this learner's own forward before the first step,
        and not over the sampler's; with `trainer.scoring` engine they are the engine's, which cost nothing more.

        Raises ConfigError when stale samples are to be corrected without it. Raises NotFiniteError, naming what, when
        anything is not finite: no step is taken with it, and weights that a step made so are not given a version.
        """
        if (self._teacher is None) != (self.algorithm.distill_coef == 0.0):
            raise ConfigError(
                f"algorithm.distill_coef is {self.algorithm.distill_coef:g} and the learner has "
                f"{'no' if self._teacher is None else 'a'} teacher; name one by models.teacher with a coefficient "
                "above 0, or neither"
            )
        self.laps.begin()
        experience = collate(rollouts, pad_token_id=self.pad_token_id, parts=tuple(self._part_weights))
        if self._part_weights:
            summed = normalized_sum(experience.parts, [*self._part_weights.values()], experience.group_ids)
            experience = replace(experience, rewards=summed)
        self.lately = few_of(experience.sequence(row) for row in range(len(rollouts)))
        self.laps.lap("collate")
        mismatch = lag_metrics(
            experience, self.weight_version, self.algorithm.correction, recompute_old=recompute_old
        )
        first = self._first.of(experience, self._first_parts(recompute_old))
        if recompute_old:
            proximal = first.logprobs["own" if self._scorer is None else "engine"]
            experience, found = recomputed(experience, proximal)
            mismatch |= found
        self.laps.lap("first_forwards")
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.weight_version) % 2**63)
        targets = update_targets(
            experience,
            first,
            algorithm=self.algorithm,
            trainer=self.trainer,
            critic=self.critic,
            trainers=self.trainers,
            generator=generator,
            kl_coef=self._coefficients.kl,
        )
        if self._scorer is not None:
            engine = EngineValues(self._scorer, experience, self.weights, first.logprobs["engine"])
            targets = replace(targets, engine=engine)
            targets.metrics["mismatch/bit_equal_share"] = engine.bit_equal_share
        self.laps.lap("advantages")
        metrics = MinibatchMetrics()
        objective = PolicyObjective(
            experience=experience,
            targets=targets,
            algorithm=self.algorithm,
            coefficients=self._coefficients,
            forward=self._forward,
            weight_version=self.weight_version,
            metrics=metrics,
            observers=self.observers,
            teacher=self._teacher,
            laps=self.laps,
            max_new_tokens=self._horizon.max_new_tokens,
        )
        for observer in self.observers:
            observer.begin()
        steps_before = self.num_steps
        for rows in self._minibatches(experience.group_ids, generator):
            self._take_minibatch(objective, rows)
        return self._close(experience, targets, metrics, mismatch, num_steps=self.num_steps - steps_before)

    def load(self, folder: Path) -> LearnerState:
        """See `Trainer`; the same algorithm is expected."""
        state = super().load(folder)
        self._coefficients = state.coefficients
        if self._scorer is not None:
            self._scorer.holds = None
        return state

    def _close(
        self,
        experience: Experience,
        targets: Targets,
        metrics: MinibatchMetrics,
        mismatch: Mapping[str, float],
        *,
        num_steps: int,
    ) -> UpdateReport:
        """End an update whose steps are taken: a version of finite weights, and what it did. Collective."""
        odd = not_finite(self.trainers.held(self.model))
        self.trainers.agree(
            f"the update of the target model to weight version {self.weight_version + 1} failed: "
            f"{describe_not_finite(odd)}; lower trainer.learning_rate"
            if odd
            else None
        )
        self.laps.lap("checks")
        for observer in self.observers:
            targets.metrics.update(observer.end(self.trainers))
        self.laps.lap("observers")
        self.weight_version += 1
        log_ratio_counts, work = zip(
            *self.trainers.gather((metrics.log_ratio_counts(), metrics.work)), strict=True
        )
        unmoved = self.unmoved()
        self.laps.lap("checks")
        part_seconds = self.laps.end()
        coefficients = {"kl_coef": self._coefficients.kl, "entropy_coef": self._coefficients.entropy}
        self._coefficients.after_update(
            targets.metrics.get("reference_kl"), len(experience.lengths), self.algorithm
        )
        return UpdateReport(
            weight_version=self.weight_version,
            num_samples=len(experience.lengths),
            num_tokens=experience.num_tokens,
            num_optimizer_steps=num_steps,
            metrics={
                **mismatch,
                **targets.metrics,
                **coefficients,
                **metrics.means(),
                "num_unmoved_tensors": float(len(unmoved)),
                "lr": self.optimizer.param_groups[0]["lr"],
            },
            log_ratio_counts=added_up(log_ratio_counts),
            sample_advantages=targets.sample_advantages(experience.mask),
            unmoved=tuple(unmoved),
            part_seconds=part_seconds,
            cost=self._cost(part_seconds, added_up(work)),
        )

    def _cost(self, seconds: Mapping[str, float], work: Sequence[int]) -> dict[str, float]:
        """What all trainers computed, packs, tokens and those of the rows that they stand for, and how fast.

        MFU (model FLOPs utilisation): of the forward's and backward's seconds; source: Chowdhery et al. 2022, 'PaLM'.
        """
        num_packs, num_tokens, num_of_rows = work
        cost = {
            "num_packs": float(num_packs),
            "num_tokens": float(num_tokens),
            "num_shared_tokens": float(num_of_rows - num_tokens),
        }
        learned_s = seconds.get("forward", 0.0) + seconds.get("backward", 0.0)
        if learned_s > 0.0:
            cost["tokens_per_s"] = num_of_rows / learned_s
            if (peak := peak_flops(self.model.device)) is not None:
                flops = step_flops(self.model, num_tokens) / self.trainers.size
                cost["mfu_fwd_bwd"] = flops / learned_s / peak
        return cost

    def _first_parts(self, recompute_old: bool) -> list[Part]:
        """What is to be computed before the first step."""
        parts: dict[Part, bool] = {
            "reference": self.algorithm.kl_coef > 0.0,
            "own": recompute_old and self._scorer is None,
            "states": self.critic is not None,
            "engine": self._scorer is not None,
        }
        return [part for part, is_needed in parts.items() if is_needed]

    def _state(self) -> LearnerState:
        critic = None if self.critic is None else (self.critic.head, self.critic.optimizer)
        return replace(super()._state(), critic=critic, coefficients=self._coefficients)

    def _take_minibatch(self, objective: PolicyObjective, rows: list[int]) -> None:
        """Take one optimizer step, unless its gradient is 0, and close the minibatch's figures."""
        least, share = None, self.algorithm.top_entropy_quantile
        if share < 1.0:
            counted = [row for row in rows if objective.targets.learned[row]]
            least = self._forward.least_entropy(self.model, objective.experience, counted, share)
        batch = objective.batch(rows, num_steps=self.num_steps, least_entropy=least)
        self.laps.lap("collate")
        norm = self.learn(batch, f"at weight version {self.weight_version}")
        if norm > 0.0 and self.algorithm.sync_ref_model:
            self._move_reference()
        closed = objective.metrics.close_minibatch(
            self.trainers.gather(batch.part),
            grad_norm=norm,
            max_grad_norm=self.trainer.max_grad_norm,
        )
        self._coefficients.after_step(closed.get("entropy"), self.algorithm)
        self.laps.lap("checks")
        for observer in self.observers:
            observer.step()
        self.laps.lap("observers")
        if objective.targets.engine is not None and norm > 0.0:
            objective.targets.engine.changed()

    @torch.no_grad()
    def _move_reference(self) -> None:
        """Let the reference follow, where it is due; the next update's divergence is from it."""
        assert self.reference is not None, "kl_coef above 0 has one"
        if self.num_steps % self.algorithm.ref_model_sync_steps:
            return
        alpha = self.algorithm.ref_model_mixup_alpha
        for old, new in zip(self.reference.parameters(), self.model.parameters(), strict=True):
            old.mul_(1.0 - alpha).add_(new, alpha=alpha)
        if self._scorer is not None and self._scorer.holds == "reference":
            self._scorer.holds = None

    def _minibatches(self, group_ids: Int[Tensor, " B"], generator: torch.Generator) -> Iterator[list[int]]:
        """Of equal size up to one sample: a small last one would step as far as a whole one.

        Groups are in random order, the samples of each behind one another: what they share is computed once.
        """
        groups, group_of = group_ids.unique(return_inverse=True)
        num_minibatches = -(-len(group_ids) // self.trainer.minibatch_size)
        for _ in range(self.trainer.epochs):
            place = torch.randperm(len(groups), generator=generator).argsort()
            order = place[group_of].argsort(stable=True)
            for rows in order.tensor_split(num_minibatches):
                yield sorted(rows.tolist())


def _require_consistent(
    algorithm: AlgorithmConfig,
    trainer: TrainerConfig,
    temperature: float,
    horizon: Horizon,
    *,
    has_scorer: bool,
) -> None:
    if temperature <= 0.0:
        raise ConfigError(
            f"cannot train at temperature {temperature}: greedy sampling has no log-probability; use 1.0"
        )
    if (trainer.scoring == "engine") != has_scorer:
        raise ConfigError(
            f"trainer.scoring is {trainer.scoring}, but the learner was given {'a' if has_scorer else 'no'} scorer; "
            "give it an EngineScorer with engine, none with model"
        )
    if algorithm.loss_aggregation == "constant_length" and horizon.max_new_tokens is None:
        raise ConfigError(
            "algorithm.loss_aggregation constant_length divides by the most tokens that a response may have, and "
            "the learner was not told; give it a Horizon with max_new_tokens"
        )
