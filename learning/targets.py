"""What an update computes once, before its first optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from learning.forward.engine_scoring import EngineValues


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Per-token tensors [B, R], padded like the experience, and the figures found on the way."""

    advantages: Tensor
    reference: Tensor | None
    "the reference model's log-probabilities, None without KL control"
    has_kl_loss: bool
    "whether the reference counts as a term of the loss"
    figures: dict[str, float]
    importance: Tensor | None = None
    "weights of the policy loss against the sampler (`learning.off_policy`), None where it is not corrected"
    engine: EngineValues | None = None
    "the policy's log-probabilities by the engine's forward; None: by the learner's own"
