"""Coefficients that are steered: of the KL penalty towards a divergence, of the entropy bonus towards an entropy."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfspec.core.settings.algorithm import AlgorithmConfig

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
