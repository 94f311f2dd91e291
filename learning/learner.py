"""The learner: PPO and GRPO on finished rollouts, deterministic to the last bit.

PPO: Schulman et al. 2017, algorithm 1, with a value head and GAE. GRPO: Shao et al. 2024, algorithm 1.
Old log-probabilities are the engine's; the reference is a frozen copy of the initial policy.
Equal rollouts give bitwise equal parameters: samples are ordered by index, minibatches are drawn from
(seed, weight version), and nothing else is random.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from core.config import AlgorithmConfig, TrainerConfig
from core.errors import ConfigError, NumericsError
from core.records import Rollout, UpdateReport
from engine.logprobs import scaled_logits, token_logprobs
from learning.advantages import (
    explained_variance,
    gae,
    group_advantages,
    place_terminal_reward,
    spread,
    whiten,
)
from learning.batching import pack_by_length
from learning.experience import Experience, collate
from learning.figures import MinibatchFigures
from learning.forward import logits_where, prepare_for_training
from learning.losses import (
    clipped_policy_loss,
    clipped_value_loss,
    kl_estimate,
    token_entropy,
    token_weights,
    truncated_importance_weight,
)
from learning.targets import Targets
from learning.value import ValueHead


class Learner:
    """Holds the policy, its optimizer, for PPO a value head, and with KL control a reference."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        algorithm: AlgorithmConfig,
        trainer: TrainerConfig,
        temperature: float,
        seed: int,
        pad_token_id: int,
    ) -> None:
        if temperature <= 0.0:
            raise ConfigError(
                f"cannot train at temperature {temperature}: greedy sampling has no log-probability; use 1.0"
            )
        if algorithm.kl_placement == "reward" and algorithm.kind != "ppo":
            raise ConfigError("algorithm.kl_placement 'reward' needs algorithm.kind ppo; use 'loss'")
        self.model = model
        self.algorithm = algorithm
        self.trainer = trainer
        self.temperature = temperature
        self.seed = seed
        self.pad_token_id = pad_token_id
        self.weight_version = 0
        self.reference: PreTrainedModel | None = None
        if algorithm.kl_coef > 0.0:
            self.reference = copy.deepcopy(model).eval().requires_grad_(False)
        prepare_for_training(model, gradient_checkpointing=trainer.gradient_checkpointing)
        self.value_head: ValueHead | None = None
        groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "lr": trainer.learning_rate}]
        if algorithm.kind == "ppo":
            hidden_size = model.config.get_text_config().hidden_size
            self.value_head = ValueHead(hidden_size, seed=seed).to(model.device)
            groups.append({"params": list(self.value_head.parameters()), "lr": trainer.value_learning_rate})
        self.optimizer = torch.optim.AdamW(groups, weight_decay=trainer.weight_decay, betas=(0.9, 0.95))
        self._base_rates = [group["lr"] for group in groups]
        self._num_optimizer_steps = 0

    def update(self, rollouts: Sequence[Rollout]) -> UpdateReport:
        """Learn from one batch of rollouts; `weight_version` grows by one.

        Raises NumericsError, naming what, when anything is not finite: no step is taken with it.
        """
        start = time.perf_counter()
        experience = collate(rollouts, pad_token_id=self.pad_token_id)
        targets = self._targets(experience)
        figures = MinibatchFigures()
        steps_before = self._num_optimizer_steps
        for rows in self._minibatches(len(experience.lengths)):
            self._learn(experience, targets, rows, figures)
        self.weight_version += 1
        return UpdateReport(
            weight_version=self.weight_version,
            num_samples=len(experience.lengths),
            num_tokens=experience.num_tokens,
            num_optimizer_steps=self._num_optimizer_steps - steps_before,
            update_s=time.perf_counter() - start,
            figures={**targets.figures, **figures.means()},
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything an interrupted run needs to go on: weights, optimizer, reference, counters."""
        return {
            "model": self.model.state_dict(),
            "reference": None if self.reference is None else self.reference.state_dict(),
            "value_head": None if self.value_head is None else self.value_head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "weight_version": self.weight_version,
            "num_optimizer_steps": self._num_optimizer_steps,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises ConfigError when the algorithm differs."""
        for name, part in (("reference", self.reference), ("value_head", self.value_head)):
            if (part is None) != (state[name] is None):
                raise ConfigError(
                    f"the checkpoint {'has no' if state[name] is None else 'has a'} {name}, this run's "
                    "algorithm section says otherwise; resume with the same algorithm"
                )
            if part is not None:
                part.load_state_dict(state[name])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.weight_version = state["weight_version"]
        self._num_optimizer_steps = state["num_optimizer_steps"]
        self.seed = state["seed"]

    @torch.no_grad()
    def _targets(self, experience: Experience) -> Targets:
        """Compute advantages, returns and reference log-probabilities once, before any step."""
        algorithm, mask = self.algorithm, experience.mask
        figures: dict[str, float] = {}
        reference = values = returns = None
        if self.reference is not None:
            reference = torch.zeros(mask.shape)
            for rows in self._packs(range(len(mask)), experience):
                ids, where = self._inputs(experience, rows)
                logits, _ = logits_where(self.reference, ids, where)
                _scatter(reference, rows, mask, token_logprobs(logits, ids[:, 1:][where], self.temperature))
            kl = kl_estimate(experience.old_logprobs, reference, algorithm.kl_estimator)
            figures["reference_kl"] = float(kl[mask].mean())
        if self.value_head is None:
            per_response, num_zero = group_advantages(
                experience.rewards, experience.group_ids, divide_by_std=algorithm.group_std
            )
            figures["num_zero_advantage_groups"] = float(num_zero)
            advantages = spread(per_response, mask)
        else:
            values = torch.zeros(mask.shape)
            for rows in self._packs(range(len(mask)), experience):
                _, hidden = logits_where(self.model, *self._inputs(experience, rows))
                _scatter(values, rows, mask, self.value_head(hidden))
            rewards = place_terminal_reward(experience.rewards, mask)
            if reference is not None and algorithm.kl_placement == "reward":
                kl = kl_estimate(experience.old_logprobs, reference, algorithm.kl_estimator)
                rewards = rewards - algorithm.kl_coef * torch.where(mask, kl, torch.zeros_like(kl))
            advantages, returns = gae(rewards, values, mask, gamma=algorithm.gamma, lam=algorithm.gae_lambda)
            figures["explained_variance"] = explained_variance(values, returns, mask)
            if algorithm.whiten_advantages:
                advantages = whiten(advantages, mask)
        return Targets(
            advantages=advantages, returns=returns, values=values, reference=reference, figures=figures
        )

    def _learn(
        self, experience: Experience, targets: Targets, rows: list[int], figures: MinibatchFigures
    ) -> None:
        """Accumulate the gradient of one minibatch and take one optimizer step."""
        weights = token_weights(experience.mask[rows], self.algorithm.loss_aggregation)
        weight_of = torch.zeros(experience.mask.shape)
        weight_of[rows] = weights
        for micro in self._packs(rows, experience):
            loss = self._loss(experience, targets, micro, weight_of[micro], figures)
            if not bool(torch.isfinite(loss)):
                samples = [experience.sample_indices[row] for row in micro]
                raise NumericsError(
                    f"the loss of weight version {self.weight_version} is {float(loss.detach())}; "
                    f"expected a finite number; samples {samples[:8]}; lower trainer.learning_rate"
                )
            loss.backward()
        self._step(figures)

    def _loss(
        self,
        experience: Experience,
        targets: Targets,
        rows: list[int],
        weights: Tensor,
        out: MinibatchFigures,
    ) -> Tensor:
        """Loss of some rows, weighted so that a minibatch's parts add up to its mean."""
        algorithm, mask, device = self.algorithm, experience.mask[rows], self.model.device

        def flat(padded: Tensor) -> Tensor:
            return padded[rows][mask].to(device)

        ids, where = self._inputs(experience, rows)
        logits, hidden = logits_where(self.model, ids, where)
        logprobs = token_logprobs(logits, ids[:, 1:][where], self.temperature)
        old = flat(experience.old_logprobs)
        weight = weights[mask].to(device)
        policy = clipped_policy_loss(logprobs, old, flat(targets.advantages), clip_ratio=algorithm.clip_ratio)
        if algorithm.truncated_is_cap > 0.0:
            policy = policy * truncated_importance_weight(
                old, flat(experience.sampling_logprobs), cap=algorithm.truncated_is_cap
            )
        with torch.set_grad_enabled(algorithm.entropy_coef > 0.0):
            entropy = token_entropy(scaled_logits(logits, self.temperature))
        total = policy - algorithm.entropy_coef * entropy
        if targets.reference is not None and algorithm.kl_placement == "loss":
            kl = kl_estimate(logprobs, flat(targets.reference), algorithm.kl_estimator)
            total = total + algorithm.kl_coef * kl
        if self.value_head is not None and targets.values is not None and targets.returns is not None:
            value = clipped_value_loss(
                self.value_head(hidden),
                flat(targets.values),
                flat(targets.returns),
                clip_value=algorithm.clip_value,
            )
            total = total + algorithm.value_coef * value
            out.add("value_loss", value, weight)
        out.add("policy_loss", policy, weight)
        out.add("entropy", entropy, weight)
        out.add_ratio(logprobs, old, weight, clip_ratio=algorithm.clip_ratio)
        return (total * weight).sum()

    def _step(self, figures: MinibatchFigures) -> None:
        self._num_optimizer_steps += 1
        warmup = min(1.0, self._num_optimizer_steps / max(self.trainer.warmup_updates, 1))
        norms: list[float] = []
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * warmup
            # policy and value head share no gradient, so each is clipped by its own norm
            norms.append(float(torch.nn.utils.clip_grad_norm_(group["params"], self.trainer.max_grad_norm)))
        if not all(math.isfinite(norm) for norm in norms):
            raise NumericsError(
                f"the gradient norm at weight version {self.weight_version} is {norms}; expected finite "
                "numbers; lower trainer.learning_rate"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        figures.close_minibatch(grad_norm=norms[0])

    def _minibatches(self, num_samples: int) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.weight_version) % 2**63)
        for _ in range(self.trainer.epochs):
            order = torch.randperm(num_samples, generator=generator).tolist()
            for start in range(0, num_samples, self.trainer.minibatch_size):
                yield sorted(order[start : start + self.trainer.minibatch_size])

    def _packs(self, rows: Sequence[int], experience: Experience) -> list[list[int]]:
        rows = list(rows)
        packs = pack_by_length([experience.lengths[row] for row in rows], self.trainer.max_tokens_per_forward)
        return [[rows[i] for i in pack] for pack in packs]

    def _inputs(self, experience: Experience, rows: list[int]) -> tuple[Tensor, Tensor]:
        longest = max(experience.lengths[row] for row in rows)
        device = self.model.device
        return (
            experience.ids[rows, :longest].to(device),
            experience.where[rows, : longest - 1].to(device),
        )


def _scatter(out: Tensor, rows: list[int], mask: Tensor, flat: Tensor) -> None:
    part = torch.zeros(mask[rows].shape)
    part[mask[rows]] = flat.float().cpu()
    out[rows] = part
